"""Ray Train and Ray Tune save into the run's folder, without a word in the program.

Each program here is one that a user could bring: it knows nothing of this project.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from containers.program.start import ray_defaults
from containers.program.start.code import STARTUP
from contract import nodes
from training.data import catalog

#: Where the programs of ``RUNS`` save, and the lines and the errors of each.
Ran = tuple[str, list[list[str]], list[str]]

TRAIN = """
import json, ray.train
plain, second = ray.train.RunConfig(), ray.train.RunConfig()
own = ray.train.RunConfig(
    name="mine", storage_path="/tmp/mine",
    failure_config=ray.train.FailureConfig(max_failures=0),
)
print(json.dumps([
    [each.name, each.storage_path, each.failure_config.max_failures]
    for each in (plain, second, own)
]))
"""
#: Searches as far as their ``Tuner``, or what ``tune.run`` makes, is there; none of them is run.
TUNE = """
import json
from ray import air, tune

found = []
for run_config in (air.RunConfig(), None, tune.RunConfig(name="mine"), None):
    config = tune.Tuner(lambda config: None, run_config=run_config)._local_tuner.get_run_config()
    found.append([config.name, config.storage_path])
experiment = tune.Experiment("of tune.run", lambda config: None)
found.append(["of tune.run", experiment.storage.storage_fs_path])
print(json.dumps(found))
"""
#: Runs programs in processes of their own that share the two seconds of importing Ray: for each the
#: file that it is in, its output and the folder with the names of its attempt.
PROCESSES = """
import json, os, sys
from pathlib import Path
import ray.train, ray.tune

for script, output, names in json.loads(sys.argv[1]):
    if not os.fork():
        with open(output, "w") as file, open(f"{output}.err", "w") as errors:
            os.dup2(file.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        sys.argv = [script]
        os.environ["TRAIN_RAY_NAMES"] = names
        exec(Path(script).read_text())
        sys.stdout.flush()
        os._exit(0)
    assert not os.wait()[1], Path(f"{output}.err").read_text()
"""
#: (script, attempt of the job) of those that run, in this order.
RUNS = [("train.py", 1), ("train.py", 2), ("train.py", 2), ("tune.py", 1)]


def start(folder: Path, program: str, *arguments: str, **more: str) -> str:
    """Output of a program that is started as the head does it."""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(folder / "program.py"), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(STARTUP),
            nodes.ENV_RUN: "first",
            nodes.ENV_RAY_STORAGE: str(folder / "store"),
            **more,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("first")
    (folder / "train.py").write_text(TRAIN)
    (folder / "tune.py").write_text(TUNE)
    (folder / "1").mkdir()
    (folder / "2").mkdir()
    outputs = [folder / f"output-{number}" for number, _ in enumerate(RUNS)]
    processes = [
        [str(folder / script), str(output), str(folder / str(attempt))]
        for (script, attempt), output in zip(RUNS, outputs, strict=True)
    ]
    start(folder, PROCESSES, json.dumps(processes))
    return (
        str(folder / "store"),
        [output.read_text().splitlines() for output in outputs],
        [Path(f"{output}.err").read_text() for output in outputs],
    )


def test_the_variables_are_those_that_the_head_sets() -> None:
    assert ray_defaults.STORAGE == nodes.ENV_RAY_STORAGE
    assert ray_defaults.NAMES == nodes.ENV_RAY_NAMES
    assert ray_defaults.RUN == nodes.ENV_RUN


def test_train_saves_below_the_run_unless_the_program_says_where(ran: Ran) -> None:
    store, outputs, errors = ran
    expected = [
        ["first-train", store, ray_defaults.MAX_FAILURES],
        ["first-train-2", store, ray_defaults.MAX_FAILURES],
        ["mine", "/tmp/mine", 0],
    ]
    first, again, other = (json.loads(lines[0]) for lines in outputs[:3])
    assert first == expected
    assert "[ray]" not in errors[0]
    assert again == expected, "so it resumes"
    assert other[0][0] == "first-train-3", "a second program of the same job is another training"


def test_without_the_variables_ray_is_as_it_is(tmp_path: Path) -> None:
    program = "import sys; print('ray.train' in sys.meta_path[0]._changes)"
    assert start(tmp_path, program, TRAIN_RAY_STORAGE="") == "False\n"
    assert start(tmp_path, program) == "True\n"


#: As in torchvision 0.28, ``torchvision/datasets/mnist.py``.
MNIST = """
class MNIST:
    mirrors = ["https://ossci-datasets.s3.amazonaws.com/mnist/"]
class FashionMNIST(MNIST):
    mirrors = ["http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"]
"""


def test_torchvision_fetches_fashion_mnist_from_an_address_that_nodes_reach(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "torchvision" / "datasets"
    folder.mkdir(parents=True)
    (folder / "mnist.py").write_text(MNIST)
    (folder / "__init__.py").write_text("from .mnist import MNIST, FashionMNIST\n")
    program = "from torchvision.datasets import *; print(MNIST.mirrors + FashionMNIST.mirrors)"
    known, fashion = json.loads(start(tmp_path, program).replace("'", '"'))
    assert known == "https://ossci-datasets.s3.amazonaws.com/mnist/"
    assert fashion == f"{catalog.ALL[0].address}/"


@pytest.mark.parametrize("storage_path", [None, "s3://mine"])
def test_a_program_that_says_where_ray_saves_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage_path: str | None
) -> None:
    class RunConfig:
        def __init__(self) -> None:
            self.storage_path, self.name, self.failure_config = storage_path, "own", None
            self.__post_init__()

        def __post_init__(self) -> None: ...

    monkeypatch.setenv(nodes.ENV_RAY_NAMES, str(tmp_path))
    module = SimpleNamespace(__name__="ray.air", RunConfig=RunConfig, FailureConfig=None)
    ray_defaults.CHANGES["ray.train"](module)
    module.RunConfig()
    assert (tmp_path / ray_defaults.OWN_STORAGE).exists() == bool(storage_path)


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_a_program_that_sizes_its_own_ray_runs_on_the_jobs(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(address: str | None = None, **given: object) -> dict[str, object]:
        return {"address": address, **given}

    module = ModuleType("ray")
    module.init = init  # type: ignore[attr-defined]
    ray_defaults.CHANGES["ray"](module)
    monkeypatch.setenv("RAY_ADDRESS", address)
    left = {} if address else {"num_cpus": 4}
    assert module.init(num_cpus=4, namespace="own") == {"address": None, "namespace": "own"} | left
    assert ("num_cpus of ray.init is left out" in capsys.readouterr().err) == bool(address)
    assert module.init("local", num_cpus=4) == {"address": "local", "num_cpus": 4}


def test_a_search_saves_below_the_run_unless_the_program_says_where(ran: Ran) -> None:
    store, outputs, _ = ran
    names = ["first-tune", "first-tune-2", "mine", "first-tune-3", "of tune.run"]
    assert json.loads(outputs[3][0]) == [[name, store] for name in names]


def test_a_process_that_ray_has_started_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nodes.ENV_RAY_NAMES, raising=False)
    assert ray_defaults._name() is None
