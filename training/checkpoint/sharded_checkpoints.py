"""Checkpoints of a sharded model: each rank writes its own part, in the background.

    <run>/checkpoints/step-00000470/
        __0_0.distcp, __1_0.distcp …   a file per rank: its shards of weights and moments
        .metadata                      where each piece of each tensor lies (torch's own format)
        config.json, tokenizer.json    what an export needs beside the weights
        state.json                     position and settings
        manifest.json                  size and SHA-256 of the others; written last

``torch.distributed.checkpoint`` reads them on any number of workers. Training waits while the
shards are copied to host memory, and then for nothing: planning and writing have a gloo group of
their own, because on the group of the training they would take turns with its collectives. Use
``training.checkpoint.checkpoints`` for a model that every worker has whole.
"""

import hashlib
import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from contract import faults
from contract.errors import InputError, UnreachableError
from contract.runs import RunPaths
from store import storage
from training.checkpoint import checkpoints
from training.checkpoint.checkpoints import Position
from training.checkpoint.dcp import (
    METADATA_FILE,
    CheckpointReader,
    LoadPlanner,
    Places,
    Share,
    StateDict,
)
from training.checkpoint.manifest import DamagedError, File
from training.checkpoint.soundness import refuse_unsound, unsound
from training.loop.worker import Worker
from training.record.events import Warned
from training.settings import most_kept
from training.system import lease

STATE_FILE: Final = "state.json"
#: How torch says that a checkpoint is of another model.
_MISFITS: Final = ("Missing key in checkpoint", "Size mismatch between saved")
_MODEL, _OPTIMIZER = "model", "optimizer"

T = TypeVar("T")


class ShardedSaver:
    """Saves one run's model and optimizer; every rank has one and calls it at the same steps."""

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        files: Mapping[str, bytes],
        settings: Mapping[str, Any],
        keep: int,
    ) -> None:
        """
        Args:
            files: small ones to put beside the shards, by name.
            settings: the run's, kept with its position.
            keep: newest checkpoints that stay.
        """
        self._worker, self._model, self._optimizer = worker, model, optimizer
        self._files, self._settings, self._keep = dict(files), dict(settings), keep
        self._size = self._best = 0
        self.recorded: Mapping[str, Any] = {}
        """Settings of the run as its checkpoint has them."""
        self._group = dist.new_group(backend="gloo")
        self._share = Share()

    def resume(self, *, from_scratch: bool) -> Position:
        """Continue from the newest usable checkpoint; return its position, 0 where there is none.

        Args:
            from_scratch: start at step 0 where the run has checkpoints and none of them is usable.

        Raises:
            InputError: the newest one is of another model, or none of them is usable.
        """
        found = newest(self._worker, from_scratch=from_scratch)
        trained = filter(lambda each: each.requires_grad, self._model.parameters())
        most = most_kept(self._keep, self._settings)
        self._size = checkpoints.check_room(self._worker, self._optimizer, trained, keep=most)
        if found is None:
            return Position()
        self.recorded = found.config
        found.load(self._model, self._optimizer)
        return found.position

    def keep(self, step: int) -> None:
        """Keep the checkpoint of a step, which has been saved, in place of another one."""
        self._best = step

    def prepare(self) -> None:
        """Begin to make the buffers of the saves, once the optimizer has its moments."""
        # Of the optimizer, whose parameters are this rank's shards at any time.
        groups, states = self._optimizer.param_groups, self._optimizer.state.values()
        trained = [each for group in groups for each in group["params"]]
        moments = [value for state in states for value in state.values()]
        tensors = [each for each in [*trained, *moments] if isinstance(each, torch.Tensor)]
        self._share.prepare(tensors, self._worker.device)

    def save(self, position: Position) -> None:
        """Copy the state, and begin to write it."""
        self._worker.saves.finish()  # the buffers are in use until then
        if failure := self._share.stop():
            said = f"no buffers for checkpoints could be made ahead ({faults.text(failure)})"
            self._worker.emit(
                Warned(message=f"{said}: the save of step {position.step} makes them")
            )
        self._share.copy(state_of(self._model, self._optimizer))
        files = {
            **self._files,
            STATE_FILE: json.dumps(
                {"position": asdict(position), "config": self._settings}, indent=1
            ).encode(),
        }
        worker, step, best = self._worker, position.step, self._best

        def write() -> str:
            uri = write_checkpoint(
                worker.run_uri,
                step,
                self._share,
                files=files,
                group=self._group,
                fence=worker.fence,
            )
            if worker.rank == 0:
                checkpoints.prune(
                    worker.run_uri, keep=self._keep, step=step, fence=worker.fence, best=best
                )
            return uri

        worker.saves.start(step, storage.room(worker.run_uri, self._size)(write))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """State to save: trained weights and optimizer moments as DTensors, by the model's parameter
    names."""
    options = StateDictOptions(ignore_frozen_params=True)
    return {
        _MODEL: get_model_state_dict(model, options=options),
        _OPTIMIZER: get_optimizer_state_dict(model, optimizer, options=options),
    }


def write_checkpoint(
    run_uri: str,
    step: int,
    share: Share,
    *,
    files: Mapping[str, bytes],
    group: dist.ProcessGroup,
    fence: int = 0,
) -> str:
    """Write a checkpoint with all ranks of ``group``; return its address.

    Args:
        share: what this rank has copied.
        fence: number of the lease that the run's writer holds; 0 without one.

    Raises:
        LostError: another process has taken the run over; on every rank.
        InputError: a rank's part of the state is not sound; on every rank.
        OSError, UnreachableError: the storage refuses to be written to; what is written is left as
            it is.
    """
    uri = RunPaths(run_uri).checkpoint(step, fence)
    check = partial(lease.check, run_uri, fence)
    rank = dist.get_rank(group)

    # All ranks say whether their part is sound, and whether others have other parts than before.
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (unsound(share.entries.items()), share.is_planned), group)
    bad, planned = zip(*said, strict=True)
    refuse_unsound(partial(checkpoints.continues, run_uri), step, bad)

    def begin() -> str:
        check()
        return checkpoints.begin(uri)

    place = _first_does(begin, group)
    # Each rank writes its file; the first one learns how that went.
    own: Any
    try:
        if not all(planned):
            share.plan(group)
        own = share.write(place, rank)
    except Exception as error:  # raised on the first rank
        own = _sendable(error)
    parts: list[Any] = [None] * len(said)
    dist.gather_object(own, None if rank else parts, dst=0, group=group)

    def complete() -> None:
        failures = [each for each in parts if isinstance(each, Exception)]
        if failures:
            raise min(failures, key=faults.is_passing)
        found: dict[str, File] = {}
        places: Places = {}
        for file, entries in parts:
            found |= file
            places |= entries
        metadata = pickle.dumps(replace(share.metadata, storage_data=places))
        for name, content in {**files, METADATA_FILE: metadata}.items():
            storage.write_bytes(storage.join(place, name), content)
            found[name] = File(len(content), hashlib.sha256(content).hexdigest())
        checkpoints.complete(place, uri, found, check=check)

    _first_does(complete, group)
    return uri


def _first_does(task: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Let the first rank do something; return its result. Fail on every rank where it fails: those
    that went on alone would wait for the others at the next save."""
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [task()]
        except lease.LostError as error:
            box = [error]
        except Exception as error:  # raised on every rank
            box = [_sendable(error)]
    dist.broadcast_object_list(box, src=0, group=group)
    if isinstance(box[0], Exception):
        raise box[0]
    done: T = box[0]
    return done


class ShardedCheckpoint:
    """A checkpoint that has been checked."""

    def __init__(self, uri: str) -> None:
        """
        Raises:
            DamagedError: its state or its metadata cannot be read.
        """
        self.uri = uri
        self._reader = CheckpointReader(uri)
        try:
            state = json.loads(storage.read_bytes(storage.join(uri, STATE_FILE)) or b"{}")
            self.position = Position.from_values(state["position"])
            self.config: Mapping[str, Any] = dict(state["config"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedError(f"{STATE_FILE} cannot be read") from None
        self._reader.read_metadata()

    def read(self, name: str) -> bytes | None:
        """One of the small files beside the shards."""
        return storage.read_bytes(storage.join(self.uri, name))

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The model's ``config.json``."""
        return dict(json.loads(self.read(checkpoints.MODEL_CONFIG_FILE) or b"{}"))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put it into a model and its optimizer, written by any number of workers.

        Raises:
            InputError: it is of another model, or of one with other adapters.
            Exception: what else went wrong on a rank, such as a lack of memory; on every rank.
        """
        state = state_of(model, optimizer)
        self._check_none_left(state[_MODEL])
        # What no loss depends on has no moments.
        metadata = self._reader.read_metadata().state_dict_metadata
        saved = {name.rpartition(".")[0] for name in metadata}
        state[_OPTIMIZER]["state"] = {
            name: moments
            for name, moments in state[_OPTIMIZER]["state"].items()
            if f"{_OPTIMIZER}.state.{name}" in saved
        }
        # Settings are the run's own, and earlier versions decayed other parameters.
        groups = state[_OPTIMIZER].pop("param_groups")
        self._load(state)
        state[_OPTIMIZER]["param_groups"] = groups
        options = StateDictOptions(strict=False)  # frozen weights are not in it
        set_model_state_dict(model, state[_MODEL], options=options)
        set_optimizer_state_dict(model, optimizer, state[_OPTIMIZER], options=options)

    def _load(self, state: StateDict) -> None:
        try:
            load(state, storage_reader=self._reader, planner=LoadPlanner())
        except CheckpointException as error:  # the same on every rank
            cause = _cause(error)
            if not _is_misfit(cause):
                raise cause from None
            raise InputError(
                f"checkpoint {self.uri} does not fit the model: {faults.text(cause)}; "
                "give the model that the run began with, or another --run"
            ) from None

    def load_weights(self, model: nn.Module) -> None:
        """Put the weights into a whole model, in one process by itself.

        Raises:
            InputError: they are those of another model, or of one with other adapters.
        """
        self._check_none_left(model.state_dict())
        model.load_state_dict(self.read_weights(self.weights()), strict=False)  # the rest is frozen

    def _check_none_left(self, names: Iterable[str]) -> None:
        """
        Raises:
            InputError: it holds weights besides these, which torch would leave out silently.
        """
        if left := sorted({*self.weights()} - {*names}):
            raise InputError(
                f"checkpoint {self.uri} does not fit the model: it also holds {', '.join(left[:2])}"
                f"{f' and {len(left) - 2} more' if left[2:] else ''}; give the model and the "
                "adapters that the run began with, use the version of this project that it began "
                "with, or give another --run"
            )

    def read_weights(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole weights, for one process by itself; what is not asked for is not read."""
        known = self.weights()
        tensors = {name: torch.empty(known[name][0], dtype=known[name][1]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this is one process: it is
            state = {_MODEL: tensors}
            try:
                load(state, storage_reader=self._reader, planner=LoadPlanner(), no_dist=True)
            except CheckpointException as error:
                cause, what = _cause(error), f"checkpoint {self.uri} cannot be read"
                if faults.is_passing(cause):
                    raise faults.explained(cause, what) from None
                raise InputError(
                    f"{what}: {faults.text(cause)}; train the run further, or use another one"
                ) from None
        return tensors

    def weights(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each weight that it holds.

        Raises:
            DamagedError: its metadata cannot be used.
        """
        metadata = self._reader.read_metadata().state_dict_metadata
        prefix = f"{_MODEL}."
        return {
            name.removeprefix(prefix): (entry.size, entry.properties.dtype)
            for name, entry in metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }


def newest(worker: Worker, *, from_scratch: bool = False) -> ShardedCheckpoint | None:
    """The newest usable checkpoint of a run, or None; all ranks read and check their share.

    Args:
        from_scratch: where a run has checkpoints and none of them is usable, return None.

    Raises:
        InputError: none of the run's checkpoints is usable.
    """
    checked = partial(_checked, worker=worker)
    return checkpoints.newest_usable(worker, checked, from_scratch=from_scratch)


def _checked(uri: str, worker: Worker) -> "ShardedCheckpoint":
    """
    Raises:
        DamagedError: this rank's share of the checkpoint must not be used.
    """
    checkpoints.verify(uri, part=worker.rank, num_parts=worker.world_size)
    return ShardedCheckpoint(uri)


def newest_of(run_uri: str, *, step: int = 0) -> ShardedCheckpoint:
    """The newest whole checkpoint of a run, or that of a step, for one process that only reads.

    Raises:
        InputError: there is none.
    """
    candidates = [checkpoints.name_of(run_uri, step)] if step else checkpoints.names(run_uri)
    for name in reversed(candidates):
        uri = checkpoints.place_of(run_uri, name)
        try:
            checkpoints.verify(uri)
            if storage.exists(storage.join(uri, METADATA_FILE)):
                return ShardedCheckpoint(uri)
        except DamagedError:
            continue
    raise InputError(
        f"{run_uri} has no whole checkpoint of a sharded model: give the name of a run that has "
        "saved one (--storage is where runs are kept)"
    )


def _cause(error: CheckpointException) -> Any:
    """Failure of the rank that says most: a wrong model before a lack of memory, and that before a
    storage that may answer the next time."""
    failures = [each for each, _ in error.failures.values()]
    return min(failures, key=lambda each: (not _is_misfit(each), faults.is_passing(each)))


def _sendable(error: Exception) -> Exception:
    """The same, without what it holds."""
    kind = UnreachableError if faults.is_passing(error) else OSError
    return kind(faults.text(error))


def _is_misfit(error: BaseException) -> bool:
    """True if a checkpoint is damaged, does not fit the model, or must not be unpickled."""
    return isinstance(error, DamagedError | pickle.UnpicklingError) or str(error).startswith(
        _MISFITS
    )
