"""Ray Train and Ray Tune save into the run's folder, and resume, without a word in the program.

Ray's own default is a folder of the head's disk: on two nodes a training fails with "Unable to set
up cluster storage", and a name with the time in it never resumes. No variable of Ray changes
either, so this puts the run's folder and name where a program gives none, as Ray's modules are
imported. ``startup/sitecustomize.py`` loads this file in each Python of a user's job; it imports
nothing of this project, which the user's code may hide, and nothing of Ray until the program does.

What it changes in Ray 2.60, each with its reason:

* ``ray.init``: many programs say how large the Ray shall be that they start on one machine, and Ray
  refuses that where a cluster is there already.
* ``RunConfig`` of Train and of Tune: the storage; for Train the name, and two restarts of a failed
  group of workers, as recipes have: the workers beside a lost one fail too.
* ``TunerInternal`` and ``tune.run``: the name; and a search that is in the storage already is
  restored as ``Tuner.restore`` does it, once per name and start of the program.
* The controller's log: while nodes are on their way, Ray Train gives up on a group of workers every
  few seconds and asks for it again, each time with two tracebacks. One line a minute says so.
* ``ActorDiedError``: an actor whose node was lost counts as preempted, which both take for no
  failure of the program. Ray sets that only for a node that had been drained.

A program that gives a storage or a name keeps its own. What cannot be done from outside: a search
space that has changed is refused by Ray (a new run name begins anew), and a trainer that a Ray task
starts has a new name each time, unless the program gives one.
"""

import copy
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

# As in contract.nodes; a test compares them.
STORAGE: Final = "TRAIN_RAY_STORAGE"
NAMES: Final = "TRAIN_RAY_NAMES"
RUN: Final = "TRAIN_RUN"

MAX_FAILURES: Final = 2
_WORKER_MODE: Final = 1  # of ray._private.worker: a process that Ray started
_NODE_DIED: Final = "NODE_DIED"
_WAITING_EVERY_S: Final = 60.0
#: Of ``ray.init``: sizes of a cluster that it starts, which it refuses where there is one.
_OF_CLUSTER: Final = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


def is_needed() -> bool:
    """Whether this is a program that runs beside Ray, in a job that keeps what it saves."""
    return bool(os.environ.get(STORAGE))


# --- names ----------------------------------------------------------------------------------------
_used: set[str] = set()


def _is_first(name: str) -> bool:
    """Whether nothing has used ``name`` since the job's program was started; it is used now."""
    folder = os.environ.get(NAMES)
    if not folder:
        is_first = name not in _used
        _used.add(name)
        return is_first
    try:
        # Programs of one job, one after the other or at a time, share the folder.
        os.close(os.open(Path(folder) / name.replace("/", "%"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _name() -> str | None:
    """Name of the next training or search, the same at each start of the program; None where there
    is nothing that stays the same."""
    trial = _trial()
    if trial:
        return f"train-{trial}"
    ray = sys.modules.get("ray")
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and worker.global_worker.mode == _WORKER_MODE:
        return None  # one of many tasks, and which of them is not known
    script = Path(sys.argv[0] if sys.argv else "")
    stem = script.parent.name if script.stem == "__main__" else script.stem
    words = [os.environ.get(RUN, ""), re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-")]
    base = "-".join(filter(None, words)) or "train"
    number = 1
    while not _is_first(name := base if number == 1 else f"{base}-{number}"):
        number += 1
    return name


def _trial() -> str:
    """Id of the trial of Ray Tune that this process runs; empty where it runs none."""
    tune = sys.modules.get("ray.tune")
    if tune is None or not hasattr(tune, "get_context"):
        return ""
    try:
        return tune.get_context().get_trial_id() or ""
    except (RuntimeError, AttributeError):
        return ""


# --- what is changed ------------------------------------------------------------------------------
def _change_init(module: ModuleType) -> None:
    init = module.init

    @functools.wraps(init)
    def new(address: str | None = None, **given: Any) -> Any:
        of_cluster = [name for name in _OF_CLUSTER if given.get(name) is not None]
        if of_cluster and address is None and os.environ.get("RAY_ADDRESS"):
            given = {name: value for name, value in given.items() if name not in of_cluster}
            _say(f"{', '.join(of_cluster)} of ray.init is left out: the job's nodes have their own")
        return init(address, **given)

    module.init = new  # type: ignore[attr-defined]


def _change_train_config(module: ModuleType) -> None:
    config, failures = module.RunConfig, module.FailureConfig
    init = config.__post_init__

    @functools.wraps(init)
    def post_init(self: Any) -> None:
        if self.storage_path is None and self.storage_filesystem is None:
            self.storage_path = os.environ[STORAGE]
        self.name = self.name or _name()
        self.failure_config = self.failure_config or failures(max_failures=MAX_FAILURES)
        init(self)

    config.__post_init__ = post_init


def _change_tune_config(module: ModuleType) -> None:
    config = module.RunConfig
    init = config.__post_init__

    @functools.wraps(init)
    def post_init(self: Any) -> None:
        if self.storage_path is None and self.storage_filesystem is None:
            self.storage_path = os.environ[STORAGE]
        init(self)

    config.__post_init__ = post_init


def _change_tuner(module: ModuleType) -> None:
    internal = module.TunerInternal
    init = internal.__init__

    @functools.wraps(init)
    def new(self: Any, restore_path: str | None = None, **given: Any) -> None:
        config = copy.copy(given.get("run_config"))
        if restore_path is not None or _is_trainer(given.get("trainable")):
            init(self, restore_path, **given)
            return
        config = config or module.RunConfig()
        is_first = config.name is None or _is_first(config.name)
        config.name = config.name or _name()
        place = f"{config.storage_path}/{config.name}"
        if not (is_first and config.name and _is_saved(config.storage_path, place)):
            init(self, restore_path, **{**given, "run_config": config})
            return
        _say(f"resuming the search in {place}")
        kept = {name: given[name] for name in ("trainable", "param_space") if name in given}
        try:
            init(self, place, resume_config=_resume_config(), **kept)
        except ValueError as error:
            error.add_note(
                f"The search in {place} is another one: submit the job under another run name to "
                "begin a new one"
            )
            raise

    internal.__init__ = new


def _change_tune_run(module: ModuleType) -> None:
    run = module.run
    entry_points = module.AirEntrypoint

    @functools.wraps(run)
    def new(run_or_experiment: Any, **given: Any) -> Any:
        is_own = given.get("_entrypoint", entry_points.TUNE_RUN) == entry_points.TUNE_RUN
        has_place = any(
            given.get(each) is not None
            for each in ("storage_path", "storage_filesystem", "local_dir", "_remote")
        )
        is_one = not isinstance(run_or_experiment, list | tuple | module.Experiment)
        if is_own and not has_place and is_one:
            storage = given["storage_path"] = os.environ[STORAGE]
            is_first = given.get("name") is None or _is_first(given["name"])
            given["name"] = given.get("name") or _name()
            place = f"{storage}/{given['name']}"
            asked = given.get("resume") is not None or given.get("resume_config") is not None
            if is_first and given["name"] and not asked and _is_saved(storage, place):
                _say(f"resuming the search in {place}")
                given["resume_config"] = _resume_config()
        return run(run_or_experiment, **given)

    module.run = new  # type: ignore[attr-defined]


def _change_errors(module: ModuleType) -> None:
    died = module.ActorDiedError
    init = died.__init__

    @functools.wraps(init)
    def new(self: Any, cause: Any = None) -> None:
        init(self, cause)
        reason = getattr(cause, "reason", None)
        if reason is not None and cause.Reason.Name(reason) == _NODE_DIED:
            self._preempted = True

    died.__init__ = new


def _change_controller(module: ModuleType) -> None:
    last = float("-inf")

    def is_shown(record: logging.LogRecord) -> bool:
        nonlocal last
        error = _late_group(record)
        if error is None:
            return True
        if time.monotonic() - last < _WAITING_EVERY_S:
            return False
        last = time.monotonic()
        record.msg = "Waiting for nodes: those that are there have no room for %d workers"
        record.args, record.exc_info = (error.num_workers,), None
        record.levelno, record.levelname = logging.INFO, "INFO"
        return True

    module.logger.addFilter(is_shown)


def _change_failure_policy(module: ModuleType) -> None:
    module.logger.addFilter(lambda record: _late_group(record) is None)


def _late_group(record: logging.LogRecord) -> Any:
    """The error that says that a group of workers has waited too long; None where it is another."""
    error = record.exc_info[1] if record.exc_info else None
    error = getattr(error, "controller_failure", error)
    return error if type(error).__name__ == "WorkerGroupStartupTimeoutError" else None


_EXECUTION: Final = "ray.train.v2._internal.execution"
#: Module -> what changes it, right after it has been imported.
CHANGES: Final[dict[str, Callable[[ModuleType], None]]] = {
    "ray._private.worker": _change_init,
    "ray.exceptions": _change_errors,
    "ray.train.v2.api.config": _change_train_config,
    f"{_EXECUTION}.controller.controller": _change_controller,
    f"{_EXECUTION}.failure_handling.default": _change_failure_policy,
    "ray.tune.impl.config": _change_tune_config,
    "ray.tune.impl.tuner_internal": _change_tuner,
    "ray.tune.tune": _change_tune_run,
}


# --- what a search has left -----------------------------------------------------------------------
def _is_trainer(trainable: object) -> bool:
    """Whether it is a trainer of the first version of Ray Train, which brings its own config."""
    return any(each.__name__ == "BaseTrainer" for each in type(trainable).__mro__)


def _is_saved(storage: object, place: str) -> bool:
    """Whether the run's folder holds a search that can be restored: one that was killed before its
    first save begins anew."""
    if str(storage) != os.environ[STORAGE]:
        return False
    import pyarrow.fs

    files, path = pyarrow.fs.FileSystem.from_uri(place)
    found = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
    names = {each.base_name for each in found}
    return "tuner.pkl" in names and any(name.startswith("experiment_state") for name in names)


def _resume_config() -> Any:
    from ray.tune import ResumeConfig

    # What failed because a node was lost, or for any other reason, is tried again from its last
    # checkpoint: the job was submitted again for that.
    config: Any = ResumeConfig  # declared with the type of its names
    return config(errored=ResumeConfig.ResumeType.RESUME)


def _say(text: str) -> None:
    print(f"[ray] {text}", file=sys.stderr, flush=True)
