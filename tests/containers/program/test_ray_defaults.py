"""Ray Train and Ray Tune save into the run's folder, and resume, without a word in the program.

Each program here is one that a user could bring: it knows nothing of this project.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from containers.program import ray_defaults
from containers.program.launch import STARTUP
from contract import nodes

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
#: What Ray Train's controller does again and again while nodes are on their way.
WAITS = """
import logging, ray.train
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy

logging.basicConfig(level=logging.INFO)
policy = DefaultFailurePolicy(ray.train.FailureConfig())
for error in (WorkerGroupStartupTimeoutError(2), WorkerGroupStartupTimeoutError(2), OSError("no")):
    try:
        raise error
    except Exception as error:
        controller.logger.exception("Error in control loop iteration: %s", error)
        print(policy.make_decision(controller.ControllerError(error)).value)
"""
#: A search as far as its ``Tuner`` decides whether it is a new one; nothing of it is run.
TUNE = """
import json, sys
from pathlib import Path
from ray import tune

def objective(config):
    tune.report({"loss": config["x"]})

space = {"x": tune.grid_search(json.loads(sys.argv[1]))} if sys.argv[1:] else {}
found = []
for run_config in (None, tune.RunConfig(name="mine"), None):
    tuner = tune.Tuner(objective, param_space=space, run_config=run_config)
    inside = tuner._local_tuner
    resume = inside._resume_config
    found.append([
        inside.get_run_config().name,
        resume is not None and resume.errored == tune.ResumeConfig.ResumeType.RESUME,
    ])
    # What a search has in its storage after its first results.
    place = Path(inside.get_run_config().storage_path) / inside.get_run_config().name
    assert (place / "tuner.pkl").exists(), [*place.iterdir()]
    (place / "experiment_state-1.json").touch()
print(json.dumps(found))
"""
ERRORS = """
import json
from ray.core.generated.common_pb2 import ActorDiedErrorContext as Cause
from ray.exceptions import ActorDiedError
found = [ActorDiedError(Cause(actor_id=bytes(16), reason=reason)).preempted
         for reason in (Cause.Reason.NODE_DIED, Cause.Reason.WORKER_DIED)]
print(json.dumps(found + [ActorDiedError().preempted]))
"""


def start(
    tmp_path: Path, program: str, *, attempt: int = 1, script: str = "train.py", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as the head does, at an attempt of a job; its folder and names are kept."""
    (tmp_path / script).write_text(program)
    names = tmp_path / f"names-{attempt}"
    names.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(tmp_path / script)],
        env={
            **os.environ,
            "PYTHONPATH": str(STARTUP),
            nodes.ENV_RUN: "first",
            nodes.ENV_RAY_STORAGE: str(tmp_path / "store"),
            nodes.ENV_RAY_NAMES: str(names),
            **more,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """The folder, the lines and the errors of a process that runs three of these programs: each
    would spend two seconds on importing Ray Train."""
    folder = tmp_path_factory.mktemp("first")
    done = start(folder, TRAIN + ERRORS + WAITS)
    return folder, done.stdout.splitlines(), done.stderr


def test_the_variables_are_those_that_the_head_sets() -> None:
    assert ray_defaults.STORAGE == nodes.ENV_RAY_STORAGE
    assert ray_defaults.NAMES == nodes.ENV_RAY_NAMES
    assert ray_defaults.RUN == nodes.ENV_RUN


def test_every_module_that_is_changed_is_in_this_version_of_ray() -> None:
    missing = [name for name in ray_defaults.CHANGES if importlib.util.find_spec(name) is None]
    assert missing == []


def test_train_saves_below_the_run_unless_the_program_says_where(
    first: tuple[Path, list[str], str],
) -> None:
    folder, lines, errors = first
    store = str(folder / "store")
    expected = [
        ["first-train", store, ray_defaults.MAX_FAILURES],
        ["first-train-2", store, ray_defaults.MAX_FAILURES],
        ["mine", "/tmp/mine", 0],
    ]
    assert json.loads(lines[0]) == expected
    assert "cannot be changed" not in errors
    assert json.loads(start(folder, TRAIN, attempt=2).stdout) == expected, "so it resumes"
    other = json.loads(start(folder, TRAIN, attempt=2).stdout)
    assert other[0][0] == "first-train-3", "a second program of the same job is another training"


def test_without_the_variables_ray_is_as_it_is(tmp_path: Path) -> None:
    done = start(tmp_path, TRAIN, TRAIN_RAY_STORAGE="")
    name, storage, failures = json.loads(done.stdout)[0]
    assert name.startswith("ray_train_run-")
    assert storage.endswith("ray_results")
    assert failures == 0


def test_waiting_for_nodes_is_said_in_one_line(first: tuple[Path, list[str], str]) -> None:
    _, lines, errors = first
    assert lines[2:] == ["RETRY", "RETRY", "RAISE"]
    before, _, rest = errors.partition("Waiting for nodes: ")
    assert rest.startswith("those that are there have no room for 2 workers\n")
    assert "Traceback" not in before
    assert "timed out" not in errors
    for told in ("OSError: no\n", "ControllerError: Training failed"):
        assert told in rest, "what else goes wrong is said as ever"


def test_a_lost_node_is_no_failure_of_the_program_but_a_lost_process_is(
    first: tuple[Path, list[str], str],
) -> None:
    assert json.loads(first[1][1]) == [True, False, False]


def test_a_sitecustomize_of_the_users_is_run_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'")
    path = os.pathsep.join([str(STARTUP), str(own)])
    done = start(tmp_path, "import os; print(os.environ.get('SEEN'))", PYTHONPATH=path)
    assert done.stdout == "yes\n"


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_a_program_that_sizes_its_own_ray_runs_on_the_jobs(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(address: str | None = None, **given: object) -> dict[str, object]:
        return {"address": address, **given}

    module = ModuleType("ray._private.worker")
    module.init = init  # type: ignore[attr-defined]
    ray_defaults.CHANGES["ray._private.worker"](module)
    monkeypatch.setenv("RAY_ADDRESS", address)
    left = {} if address else {"num_cpus": 4}
    assert module.init(num_cpus=4, namespace="own") == {"address": None, "namespace": "own"} | left
    assert ("num_cpus of ray.init is left out" in capsys.readouterr().err) == bool(address)
    assert module.init("local", num_cpus=4) == {"address": "local", "num_cpus": 4}


def test_a_search_that_is_started_again_resumes_and_one_that_is_new_begins(tmp_path: Path) -> None:
    first = json.loads(start(tmp_path, TUNE).stdout)
    assert first == [["first-train", False], ["mine", False], ["first-train-2", False]]
    again = start(tmp_path, TUNE, attempt=2)
    assert json.loads(again.stdout) == [[name, True] for name, _ in first]
    place = f"{tmp_path}/store/first-train"
    assert f"[ray] resuming the search in {place}\n" in again.stderr
