"""Default storage and retries of Ray Train and Ray Tune: the run's folder in the bucket.

Ray's own default is a folder of the head's disk: on two nodes a training fails with "Unable to set
up cluster storage", and a name with the time in it never resumes. No variable of Ray changes
either. ``startup/sitecustomize.py`` runs this file in each Python of a user's job; it imports
nothing of this project, which the user's code may hide, and nothing of Ray until the program does.

Three things of Ray are changed, right after they have been imported:

* ``DEFAULT_STORAGE_PATH``, which ``RunConfig`` and ``tune.run`` read where the program gives none.
* ``RunConfig`` of Train and of Tune, the older ``ray.air.RunConfig`` included: a name where the
  program gives none, and in Train two restarts of a failed group of workers, as recipes have: the
  workers beside a lost one fail too.
* ``ray.init``: many programs give the size of the Ray that they start on one machine, and Ray
  refuses that where a cluster is there already.
"""

from __future__ import annotations  # a program's own Python may be as old as 3.8

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

# As in contract.nodes; a test compares them.
STORAGE: Final = "TRAIN_RAY_STORAGE"
NAMES: Final = "TRAIN_RAY_NAMES"
RUN: Final = "TRAIN_RUN"
#: File beside the names: the program gave a place to save to itself.
OWN_STORAGE: Final = ".own-storage"

MAX_FAILURES: Final = 2
#: Arguments of ``ray.init`` that size a new cluster; it refuses them where one exists.
_OF_CLUSTER: Final = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


def _name() -> str | None:
    """Name of the program's next training, the same at each start of the job; None in a process
    that Ray has started: it is one of many, and which of them is not known."""
    if not (folder := os.environ.get(NAMES)):
        return None
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path([*sys.argv, ""][0]).stem).strip("-")
    base = "-".join(filter(None, (os.environ.get(RUN), stem))) or "train"
    number = 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        try:
            # Programs of one job, one after the other or at a time, share the folder.
            os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
            return name
        except FileExistsError:
            number += 1


def _change_config(module: Any) -> None:
    config, failures = module.RunConfig, module.FailureConfig
    init = config.__post_init__

    @functools.wraps(init)
    def post_init(self: Any) -> None:
        if self.storage_path and (folder := os.environ.get(NAMES)):
            Path(folder, OWN_STORAGE).touch()
        self.name = self.name or _name()
        if module.__name__ == "ray.train":
            self.failure_config = self.failure_config or failures(max_failures=MAX_FAILURES)
        init(self)

    config.__post_init__ = post_init


def _change_storage(module: Any) -> None:
    module.DEFAULT_STORAGE_PATH  # noqa: B018 -- AttributeError where it has another name
    module.DEFAULT_STORAGE_PATH = os.environ[STORAGE]


def _change_init(module: Any) -> None:
    init = module.init

    @functools.wraps(init)
    def new(address: str | None = None, **options: Any) -> Any:
        left_out = [name for name in _OF_CLUSTER if options.get(name) is not None]
        if left_out and address is None and os.environ.get("RAY_ADDRESS"):
            for name in left_out:
                del options[name]
            text = f"{', '.join(left_out)} of ray.init is left out: the job's nodes have their own"
            print(f"[ray] {text}", file=sys.stderr, flush=True)
        return init(address, **options)

    module.init = new


#: Module -> what changes it once it has been imported.
CHANGES: Final = {
    "ray": _change_init,
    "ray.air.config": _change_config,  # the base of Tune's too
    "ray.train": _change_config,
    "ray.train.constants": _change_storage,
}
