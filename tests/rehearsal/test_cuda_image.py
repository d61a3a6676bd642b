"""The workers' image with torch for CUDA, on a base of Debian's packages: built, and run without a
GPU. By night: it fetches 3 GB of packages."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from containers import publish
from rehearsal import image_builds
from rehearsal.cycle import Rehearsal
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.night]

BASE, IMAGE = "ecs-train-base-cuda:test", "ecs-train-worker-cuda:test"
MAX_BYTES = 8e9
#: Finds out what the image has, and compiles as Triton does.
LOOK = """
import json, pathlib, subprocess, sysconfig
import torch, triton, ray, transformers
code = '#include <Python.h>\\n#include <cuda.h>\\nint main(void) { return PY_MAJOR_VERSION - 3; }'
cuda = pathlib.Path(triton.__file__).parent / 'backends/nvidia/include'
command = ['gcc', '-x', 'c', '-', '-o', '/tmp/compiled', '-I', str(cuda)]
command += ['-I', sysconfig.get_path('include')]
subprocess.run(command, input=code.encode(), check=True)
subprocess.run(['/tmp/compiled'], check=True)
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """The engine, with the image in it."""
    found = Rehearsal.here()
    engine, docker = found.engine, found.docker()
    found.folder.mkdir(exist_ok=True)
    folder = tmp_path_factory.mktemp("base")
    # The builds here reach no package source: what the Dockerfile would install is in the base.
    recipe = (ROOT / "rehearsal" / "debian_base.sh").read_text()
    assert recipe.count(",tini ") == 1
    script = recipe.replace(",tini ", ",tini,gcc,libc6-dev,python3-dev ")
    made = [engine.client, BASE, str(folder)]
    subprocess.run(["sh", "-c", script, "sh", *made], env=engine.environment(), check=True)
    # Of the default index, and of no other place that has a build without CUDA.
    pip = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    wheels = image_builds.wheels(
        engine,
        image_builds.DEBIAN_PYTHON,
        environment=pip | {"PIP_CONFIG_FILE": os.devnull},
        mark="cuda",
    )
    arguments = [f"BASE_IMAGE={BASE}", f"WHEELS_IMAGE={wheels}", "WORKER_TORCH=cuda"]
    arguments.append("EFA_INSTALLER=")  # AWS's installer cannot be reached
    try:
        publish.build(
            docker, targets={"worker": IMAGE}, git_sha="unknown", build_arguments=arguments
        )
        yield found
    finally:
        engine("image", "rm", "--force", BASE, wheels, IMAGE, check=False)


@pytest.mark.timeout(1800)
def test_it_has_cuda_and_a_compiler_and_trains_where_there_is_no_gpu(
    built: Rehearsal, record_property: Callable[[str, object], None]
) -> None:
    printed = built.engine("run", "--rm", "--entrypoint", "python", IMAGE, "-c", LOOK)
    torch, cuda, has_gpu = json.loads(printed.splitlines()[-1])
    assert (torch.partition("+")[0], has_gpu) == (torch_pin(), False)
    # The driver of the hosts' AMI, 580, is the one of CUDA 13.0 (docs/operations.md).
    assert cuda.startswith("13.")
    record = built.engine.inspect("image", IMAGE)
    assert record is not None
    record_property("GB", round(record["Size"] / 1e9, 2))
    assert record["Size"] < MAX_BYTES
    publish.try_out(built.docker(), IMAGE)  # raises where it does not end as it should


def torch_pin() -> str:
    pins = Path(ROOT / "requirements" / "training.txt").read_text().splitlines()
    return next(each.split()[0].removeprefix("torch==") for each in pins if each[:7] == "torch==")
