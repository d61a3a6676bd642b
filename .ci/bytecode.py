"""Compile to bytecode what a training run imports, once, where an environment is made.

`.ci/venv` installs without compiling: all 18,000 files take longer than the rest of the
installation. A run imports a quarter of them, in several processes that would all compile them at
the same time, and on a machine with PYTHONDONTWRITEBYTECODE set again and again.
"""

import os
import subprocess
import sys

# Imported, so that each brings along just what it needs. Two groups, for two processors.
GROUPS = (
    ("torch", "torch.distributed", "transformers.models.resnet.modeling_resnet"),
    ("ray.train", "pandas", "fsspec", "s3fs", "matplotlib.figure", "sklearn.datasets"),
)
# Ray's own processes import these, and can only be started as a cluster.
OF_RAYS_PROCESSES = (
    "_private",
    "autoscaler",
    "core",
    "dashboard",
    "job_submission",
    "train",
    "tune",
)

COMPILE_FOLDERS = """
import compileall, pathlib, ray, sys
for name in sys.argv[1:]:
    compileall.compile_dir(pathlib.Path(ray.__path__[0], name), quiet=2)
"""


def main() -> int:
    environment = os.environ | {"MPLBACKEND": "agg"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    commands = [[sys.executable, "-c", "import " + ", ".join(group)] for group in GROUPS]
    commands.append([sys.executable, "-c", COMPILE_FOLDERS, *OF_RAYS_PROCESSES])
    running = [subprocess.Popen(command, env=environment) for command in commands]
    return max([process.wait() for process in running])


if __name__ == "__main__":
    sys.exit(main())
