"""Compile to bytecode what training, trainctl and a synth import, where an environment is made.

`.ci/venv` installs without compiling: all 18,000 files take longer than the rest of the
installation. A run imports a quarter of them, in several processes that would all compile them at
the same time, and on a machine with PYTHONDONTWRITEBYTECODE set again and again: of the six CPU
seconds that Python takes for a synth, five.
"""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

# Imported, so that each brings along just what it needs. Each program belongs to a package, and
# runs where that is installed; the longest come first.
PROGRAMS = (
    # The CDK is 183 MB of source; an import of the app reads what our stacks use of it. It starts
    # Node. Where there is none yet, the first synth compiles.
    ("aws_cdk", "import shutil; shutil.which('node') and __import__('app')"),
    (
        "torch",
        "import torch, torch.distributed, torch._dynamo, torch.utils.serialization.config, "
        "safetensors.torch, transformers.models.gpt_neox.modeling_gpt_neox",
    ),
    ("ray", "import ray.train.torch, pandas, pyarrow.json, fsspec, s3fs"),
    # The programs of Ray's own processes: none starts when it is imported. aiohttp comes before the
    # last of them, which puts Ray's copy of it first in the path. The dashboard's processes import
    # their modules by walking a package.
    (
        "ray",
        "import aiohttp.web, importlib, pkgutil, pydantic.v1, ray.dashboard.modules as modules\n"
        "import ray.dashboard.agent, ray.dashboard.dashboard, ray.dashboard.optional_deps\n"
        "import ray.autoscaler._private.monitor, ray._common.tls_utils, ray._private.log_monitor\n"
        "import ray._private.runtime_env.agent.main\n"
        "for found in pkgutil.walk_packages(modules.__path__, modules.__name__ + '.'):\n"
        "    if '.tests' not in found.name:\n"
        "        importlib.import_module(found.name)",
    ),
    (
        "matplotlib",
        "import jinja2, matplotlib.figure, matplotlib.backends.backend_agg, "
        "matplotlib.backends.backend_svg; from PIL import Image, features; Image.preinit()",
    ),
    (
        "typer",
        "import typer.main, rich.console, rich.live, rich.layout, rich.panel, rich.pretty, "
        "rich.status, rich.table, rich._emoji_codes",
    ),
    # A client, because botocore imports most of itself when one is made.
    ("boto3", "import boto3; boto3.Session(region_name='us-east-1').client('sts')"),
)
# Ray imports these in the middle of a run.
RAY_FOLDERS = (
    *("_private", "air", "autoscaler", "core", "dashboard", "data/_internal/cluster_autoscaler"),
    *("data/_internal/execution", "data/_internal/issue_detection", "job_submission"),
    *("train", "tune", "util/state"),
)
COMPILE_FOLDERS = """
import compileall, pathlib, ray, sys
for name in sys.argv[1:]:
    compileall.compile_dir(pathlib.Path(ray.__path__[0], name), quiet=2)
"""


def main() -> int:
    environment = os.environ | {"MPLBACKEND": "agg"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    commands = [
        ["-c", program] for package, program in PROGRAMS if importlib.util.find_spec(package)
    ]
    if importlib.util.find_spec("ray"):
        commands.append(["-c", COMPILE_FOLDERS, *RAY_FOLDERS])

    def run(command: list[str]) -> int:
        return subprocess.run([sys.executable, *command], env=environment, check=False).returncode

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        worst = max(pool.map(run, commands), default=0)
    # What is not compiled here starts more slowly, and still starts: only CI insists.
    return worst if os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main())
