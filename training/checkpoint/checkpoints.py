"""Checkpoints: one folder per step, used only if it is whole.

    <run>/checkpoints/step-00000470/     step-00000470-lease2 under the run's second lease, ...
        model.safetensors, config.json   the model in its standard shapes (Hugging Face layout)
        state.pt                         optimizer, position, random state, settings
        manifest.json                    size and SHA-256 of the others; written last

A whole checkpoint is never written to again: the manifest is created, which succeeds once, and a
writer that has lost the run has other names than its successor. Sharded checkpoints are begun,
completed, verified and pruned by the same functions.

They are written in the background (``training.loop.saving``), and Ray Train knows nothing of
them. The schedule is a function of the step, so the position restores it. Only rank 0 reads; the
others get the state from it, so all agree on what was chosen.
"""

import contextlib
import json
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from contract import faults, runs
from contract.errors import InputError
from contract.runs import MANIFEST_FILE, OVERWRITES_FILE, RunPaths, checkpoint_key
from store import storage
from training.checkpoint import unfinished
from training.checkpoint.manifest import CLOSED, DamagedError, File, Manifest
from training.checkpoint.soundness import refuse_unsound, unsound
from training.loop.metrics import StepMetrics
from training.loop.worker import Worker
from training.record import reader
from training.record.events import Saved, Warned
from training.settings import most_kept
from training.system import lease

MODEL_FILE: Final = "model.safetensors"
MODEL_CONFIG_FILE: Final = "config.json"
STATE_FILE: Final = "state.pt"
_DAMAGED: Final = "damaged-"
#: Names what torch says of an archive that it cannot read; its other RuntimeErrors are of memory.
_NO_ARCHIVE: Final = "PytorchStreamReader"

T = TypeVar("T")


@dataclass(kw_only=True)
class Position:
    """How far a run has come. ``epoch_*`` let an epoch that was cut in two report as one."""

    step: int = 0
    """Optimizer steps done."""
    epoch_loss_sum: float = 0.0
    """Summed over the images of the current epoch."""
    epoch_items: int = 0
    seconds: float = 0.0
    """Spent training, over all attempts."""

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> "Position":
        """From a checkpoint, which others may have written.

        Raises:
            TypeError, ValueError: it is none.
        """
        found = cls(**values)  # type: ignore[arg-type]
        if found.step < 0 or not all(isinstance(each, int | float) for each in values.values()):
            raise ValueError(f"{values} is no position")
        return found

    def advance(self, step: int, steps: Sequence[StepMetrics]) -> None:
        """Note the steps that end with ``step``; those that were skipped have no loss."""
        self.step = step
        self.epoch_loss_sum += sum(each.loss * each.size for each in steps if each.is_finite)
        self.epoch_items += sum(each.size for each in steps if each.is_finite)

    def take_train_loss(self) -> float | None:
        """Mean training loss since the last call, per image or token; None without a step."""
        mean = self.epoch_loss_sum / self.epoch_items if self.epoch_items else None
        self.epoch_loss_sum, self.epoch_items = 0.0, 0
        return mean


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of all that a checkpoint holds, in host memory; training continues meanwhile."""

    model: dict[str, torch.Tensor]
    """State dict, in standard shapes."""
    model_config: str
    """Hugging Face ``config.json``."""
    optimizer: dict[str, dict[str, torch.Tensor]]
    """Moments and step count by parameter name, in the shapes that are trained."""
    rng: torch.Tensor
    """State of torch's CPU generator, uint8; all ranks hold the same."""
    position: Position
    config: Mapping[str, Any]
    """The run's settings."""
    data: str
    """Fingerprint of the data set."""
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    """The running average of the model's weights, where a recipe keeps one: it becomes the model
    in the end."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that training changes, each with a readable name."""
        yield from self.model.items()
        yield from self.average.items()
        for name, moments in self.optimizer.items():
            yield from ((f"{name}.{key}", value) for key, value in moments.items())


#: What of a snapshot is in ``STATE_FILE`` as it is, beside the position.
_IN_STATE_FILE: Final = ("optimizer", "rng", "config", "data", "average")


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    position: Position,
    config: Mapping[str, Any],
    data: str,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot:
    """Copy the state to host memory: the only part of a save that training waits for."""
    state = {name: _to_host(tensor) for name, tensor in model.state_dict().items()}
    moments = {
        name: {key: _to_host(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    model_config: Any = model.config
    return Snapshot(
        model=state,
        model_config=model_config.to_json_string(),
        optimizer=moments,
        rng=torch.get_rng_state(),
        position=replace(position),
        config=dict(config),
        data=data,
        average={name: _to_host(tensor) for name, tensor in (average or {}).items()},
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # A GPU's convolutions keep their weights channels last; files keep them as anyone reads them.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write_model(snapshot: Snapshot, folder: Path) -> None:
    """Write only the model, as ``from_pretrained`` reads it."""
    from safetensors.torch import save_file

    save_file(snapshot.model, folder / MODEL_FILE, metadata={"format": "pt"})
    (folder / MODEL_CONFIG_FILE).write_text(snapshot.model_config, encoding="utf-8")


def write(snapshot: Snapshot, folder: Path) -> dict[str, File]:
    """Write all files of a checkpoint but its manifest into a folder; return what they are."""
    write_model(snapshot, folder)
    state = {name: getattr(snapshot, name) for name in _IN_STATE_FILE}
    # Opened here: torch reports a full disk as a wrong position in a file that it opens itself.
    with (folder / STATE_FILE).open("wb") as file:
        torch.save({**state, "position": asdict(snapshot.position)}, file)
    return {
        path.name: File(path.stat().st_size, storage.sha256(str(path)))
        for path in sorted(folder.iterdir())
    }


def begin(uri: str) -> str:
    """Return where the files of a checkpoint are written: at ``uri`` in S3, where the manifest is
    what makes them one, and in an empty hidden folder on disk, which then gets its name."""
    if storage.is_s3(uri):
        return uri
    place = Path(uri)
    unfinished.discard(place.parent, unfinished.lease_of(place.name))
    hidden = place.with_name(f".{place.name}.part")
    hidden.mkdir(parents=True)
    return str(hidden)


def complete(place: str, uri: str, files: Mapping[str, File], *, check: Callable[[], None]) -> None:
    """Make a checkpoint whole, whose files are at ``place``.

    Args:
        check: called right before it counts; what it raises prevents that.

    Raises:
        OSError: there is another one of its name, among other reasons.
    """
    content = Manifest(files=files).to_json()
    if place != uri:
        storage.write_bytes(storage.join(place, MANIFEST_FILE), content)
        storage.show_folder(place, uri, check=check)
        return
    check()
    manifest = storage.join(uri, MANIFEST_FILE)
    is_new = storage.create_bytes(manifest, content)
    # It is ours where the answer to an earlier request was lost.
    if not is_new and storage.read_bytes(manifest) != content:
        raise FileExistsError(f"{uri} was written by another process")


def save(run_uri: str, snapshot: Snapshot, *, keep: int, fence: int = 0, best: int = 0) -> str:
    """Write a checkpoint and remove all that ``prune`` does not keep; return its address.

    Args:
        fence: number of the lease that the writer holds; 0 without one.

    Raises:
        LostError: another process has taken the run over.
    """
    check = partial(lease.check, run_uri, fence)
    check()
    step = snapshot.position.step
    refuse_unsound(partial(continues, run_uri), step, [unsound(snapshot.tensors())])
    uri = RunPaths(run_uri).checkpoint(step, fence)
    place = begin(uri)
    if place == uri:
        with tempfile.TemporaryDirectory(prefix="training-") as folder:
            files = write(snapshot, Path(folder))
            storage.upload_folder(Path(folder), uri)
    else:
        files = write(snapshot, Path(place))
    complete(place, uri, files, check=check)
    prune(run_uri, keep=keep, step=step, fence=fence, best=best)
    return uri


def continues(run_uri: str) -> str:
    """Where a run that diverged continues."""
    saved = names(run_uri)
    if not saved:
        return "no checkpoint is left, so it starts at step 0"
    return f"it resumes from checkpoint {saved[-1]}, which is kept"


def prune(run_uri: str, *, keep: int, step: int, fence: int = 0, best: int = 0) -> None:
    """Remove all checkpoints but the newest ``keep`` whole ones and that of step ``best``; where
    storage fails, the next save does.

    Torn ones do not count, and those older than the newest whole one are removed. What a later
    lease's holder writes is left alone. Of those that were found damaged, ``keep`` stay.

    Args:
        step: of the checkpoint that was just written. Those of it and of later steps under an
            earlier lease are removed: their writer had lost the run and did not know it yet.
    """
    own = max(fence, 1)  # a writer without a lease names its checkpoints as the first holder does
    with contextlib.suppress(Exception):  # a save that is done has not failed
        # No look at the lease: who takes the run after this finds the checkpoint that was just
        # written, and those that go are no longer read.
        found = _keys(run_uri)
        late = [name for name, (at, number) in found.items() if at >= step and number < own]
        mine = [name for name, (_, number) in found.items() if number <= own and name not in late]
        whole = [name for name in mine if _is_whole(run_uri, name)]
        torn = [name for name in mine[: mine.index(whole[-1])] if name not in whole]
        old = [name for name in whole[:-keep] if found[name][0] != best]
        for name in [*late, *torn, *old, *_damaged(run_uri)[:-keep]]:
            uri = place_of(run_uri, name)
            # First what makes it whole: this process may end before all is removed.
            storage.remove_file(storage.join(uri, MANIFEST_FILE))
            storage.remove_folder(uri)


def _is_whole(run_uri: str, name: str) -> bool:
    """True if all files of a checkpoint exist with the sizes in its manifest."""
    try:
        verify(place_of(run_uri, name), num_parts=0)
    except DamagedError:
        return False
    return True


def _damaged(run_uri: str) -> list[str]:
    """Names of the checkpoints that were set aside, oldest first."""
    names = storage.list_folders(RunPaths(run_uri).checkpoints)
    return [name for name in names if name.startswith(f"{_DAMAGED}step-")]


def newest_usable(worker: Worker, read: Callable[[str], T], *, from_scratch: bool) -> T | None:
    """The newest checkpoint that every rank can use, as this rank has read it; None without one.

    Rank 0 sets damaged ones aside, so that they are not counted nor read again, and emits a warning
    of each. One that was whole once becomes ``damaged-step-...``; one whose upload was cut off, or
    may still go on, is removed once there is a later one.

    Args:
        read: reads, or checks, the checkpoint at an address, or this rank's part of it. One that it
            finds damaged is read once more: bytes can also change on their way here.
        from_scratch: where a run has checkpoints and none of them is usable, return None.

    Raises:
        InputError: it would start at step 0 without having been told to; nothing is changed.
    """
    rank, run_uri = worker.rank, worker.run_uri
    on_all_ranks(partial(unfinished.close, worker, names))
    here: T | None = None

    def fault_of(name: str) -> str:
        """Fault that this rank finds in a checkpoint; "" if it is intact."""
        nonlocal here
        fault = ""
        for _ in range(2):
            try:
                here = read(place_of(run_uri, name))
                return ""
            except DamagedError as error:
                fault = str(error)
        return fault

    damaged: dict[str, str] = {}
    is_one_usable = False

    def counting() -> tuple[int, list[str]]:
        """On rank 0, the names of the checkpoints that count, and the lease since which they do: a
        run that is begun anew is removed only once the new one has made a step."""
        if rank:
            return 0, []
        mark = storage.read_bytes(RunPaths(run_uri).file(OVERWRITES_FILE)) or b"0"
        since = int(mark.split()[0])
        return since, [name for name in names(run_uri) if unfinished.lease_of(name) >= since]

    since, saved = on_all_ranks(counting)[0]
    from_scratch |= since > 0
    for name in reversed(saved):
        fault = next(filter(None, on_all_ranks(partial(fault_of, name))), "")
        if not fault:
            is_one_usable = True
            break
        damaged[name], here = fault, None

    def pass_over() -> None:
        if rank:
            return
        # Read, because "does it exist?" is answered with no where a disk fails.
        whole = [
            name
            for name in damaged
            if storage.read_bytes(storage.join(place_of(run_uri, name), MANIFEST_FILE))
            not in (None, CLOSED)
        ]
        faults = [f"{name}: {damaged[name]}" for name in whole]
        if not (is_one_usable or from_scratch or whole):
            recorded = reader.read_metrics(run_uri).of(Saved)[-1:]
            faults = [f"that of step {each.step} is gone or was set aside" for each in recorded]
        if faults and not (is_one_usable or from_scratch):
            raise InputError(
                f"run {run_uri.rpartition('/')[2]!r} has checkpoints, but none of them can be used "
                f"({'; '.join(faults)}): restore their files, or give --from-scratch to set them "
                "aside and start at step 0"
            )
        then = "the one before it is used" if is_one_usable else "training starts at step 0"
        for name, fault in damaged.items():
            said = f"checkpoint {name} is damaged ({fault}): {then}"
            worker.emit(Warned(message=said))
            if name in whole:
                storage.rename_folder(place_of(run_uri, name), place_of(run_uri, _DAMAGED + name))

    on_all_ranks(pass_over)
    return here


class Saver:
    """Saves the replicated model of one run; every rank has one and calls it at the same steps."""

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        settings: Mapping[str, Any],
        data: str,
        keep: int,
        processor: Mapping[str, Any],
        average: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            settings: the run's, kept with its position.
            data: fingerprint of what it is trained on.
            keep: newest checkpoints that stay.
            processor: what evaluation makes of a picture (``classifiers.processor``).
            average: of the weights, updated in place.
        """
        self._worker, self._model, self._optimizer = worker, model, optimizer
        self._settings, self._data, self._keep = settings, data, keep
        self._average, self._processor = average or {}, processor
        self._newest: Snapshot | None = None
        self._size = self._best = 0
        self.recorded: Mapping[str, Any] = {}  # settings, as the checkpoint has them

    def resume(self, *, from_scratch: bool) -> Position:
        """Continue from the newest usable checkpoint; return its position, 0 where there is none.

        Args:
            from_scratch: start at step 0 where the run has checkpoints and none of them is usable.

        Raises:
            InputError: the run was trained on other data, or none of its checkpoints is usable.
        """
        found = self._newest = newest(self._worker, from_scratch=from_scratch)
        saved = [*self._model.state_dict().values(), *self._average.values()]
        most = most_kept(self._keep, self._settings)
        self._size = check_room(self._worker, self._optimizer, saved, keep=most)
        if found is None:
            return Position()
        if found.data != self._data:
            raise InputError(
                f"run {self._settings['run']!r} was trained on other images than those in "
                f"{self._settings['data']}: give the same --data, or another --run"
            )
        self.recorded = found.config
        self._apply(found)
        return found.position

    def _apply(self, found: Snapshot) -> None:
        apply(found, self._model, self._optimizer)
        for name, value in self._average.items():
            value.copy_(found.average[name])

    def keep(self, step: int) -> None:
        """Keep the checkpoint of a step, which has been saved, in place of another one."""
        self._best = step

    def restore(self, step: int) -> None:
        """Go back to the checkpoint of a step, on every rank. Raises InputError without it."""
        rank, uri = self._worker.rank, self._worker.run_uri
        (found, *_) = on_all_ranks(lambda: None if rank else _read_step(uri, step))
        assert found is not None
        self._newest = found
        self._apply(found)

    def save(self, position: Position) -> None:
        """Copy the state and write it in the background, on rank 0."""
        worker = self._worker
        if worker.rank:
            return
        self._newest = take_snapshot(
            self._model,
            self._optimizer,
            position=position,
            config=self._settings,
            data=self._data,
            average=self._average,
        )
        write = partial(
            save,
            worker.run_uri,
            self._newest,
            keep=self._keep,
            fence=worker.fence,
            best=self._best,
        )
        worker.saves.start(position.step, storage.room(worker.run_uri, self._size)(write))

    def publish(self) -> None:
        """Publish the model of the newest snapshot, on rank 0."""
        if self._worker.rank == 0:
            assert self._newest is not None
            with storage.room(self._worker.run_uri, self._size):
                publish_model(
                    self._worker.run_uri,
                    self._newest,
                    processor=self._processor,
                    fence=self._worker.fence,
                )


def name_of(run_uri: str, step: int) -> str:
    """Name of the newest checkpoint of a step. Raises InputError without one."""
    found = [name for name, (at, _) in _keys(run_uri).items() if at == step]
    if not found:
        raise InputError(f"{run_uri} has no checkpoint of step {step:,} any more: use the newest")
    return found[-1]


def _read_step(run_uri: str, step: int) -> Snapshot:
    try:
        return _fetch(place_of(run_uri, name_of(run_uri, step)))
    except DamagedError as error:
        fault = f"the best checkpoint, of step {step:,}, is damaged ({error})"
        raise InputError(f"{fault}: --keep-best none publishes the newest") from None


def check_room(
    worker: Worker, optimizer: torch.optim.Optimizer, saved: Iterable[torch.Tensor], *, keep: int
) -> int:
    """Make sure before the first step that a disk has room for the checkpoints to come: ``keep``,
    and the one that is written before the oldest is removed. Return the bytes of one.

    Args:
        saved: what it holds beside the optimizer's moments.

    Raises:
        FullError: there is none; on every rank.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_moments = 2 if "betas" in optimizer.defaults else 1
    size: int = sum(each.numel() * each.element_size() for each in [*saved, *num_moments * trained])
    if "8bit" in type(optimizer).__name__:  # torchao's AdamW8bit: a byte for each number
        size -= num_moments * sum(each.numel() * (each.element_size() - 1) for each in trained)

    def check() -> None:
        if worker.rank == 0:
            with storage.room(worker.run_uri, size, num=keep + 1 - len(names(worker.run_uri))):
                pass

    on_all_ranks(check)
    return size


def publish_model(
    run_uri: str, snapshot: Snapshot, *, processor: Mapping[str, Any], fence: int = 0
) -> str:
    """Write the snapshot's model, its average where it has one, as ``<run>/model``, with what makes
    its input of a picture; return its address.

    Raises:
        LostError: another process has taken the run over.
    """
    uri = RunPaths(run_uri).model
    best = replace(snapshot, model=snapshot.average or snapshot.model)
    with storage.staged_folder(uri) as folder:
        write_model(best, folder)
        (folder / runs.PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", "utf-8")
        lease.check(run_uri, fence)
    return uri


def place_of(run_uri: str, name: str) -> str:
    """Address of a checkpoint, from one of ``names``."""
    return storage.join(RunPaths(run_uri).checkpoints, name)


def names(run_uri: str) -> list[str]:
    """Names of the checkpoints of a run, oldest first, the unusable among them included."""
    return [*_keys(run_uri)]


def _keys(run_uri: str) -> dict[str, tuple[int, int]]:
    """Step and lease of each checkpoint of a run by its name, in the order of ``names``."""
    found = [
        (key, name)
        for name in storage.list_folders(RunPaths(run_uri).checkpoints)
        if (key := checkpoint_key(name)) is not None
    ]
    return {name: key for key, name in sorted(found)}


def out_of_memory(error: torch.OutOfMemoryError, worker: Worker, *, advice: str) -> InputError:
    """Error that ends a run which ran out of GPU memory; ``advice`` is a full sentence."""
    saved, first_line = names(worker.run_uri), str(error).splitlines()[0]
    kept = f"checkpoint {saved[-1]} is kept" if saved else "nothing was saved before it"
    rank = worker.rank
    return InputError(f"out of GPU memory on rank {rank}; {kept}. {advice} ({first_line})")


def verify(uri: str, *, part: int = 0, num_parts: int = 1) -> None:
    """Check sizes of all files of a checkpoint, and the content of one part of them in so many.

    Args:
        num_parts: 0 checks no content.

    Raises:
        DamagedError: one is missing, has another size or another content.
    """
    manifest = Manifest.from_json(storage.read_bytes(storage.join(uri, MANIFEST_FILE)))
    sizes = storage.sizes(uri)
    for number, (name, file) in enumerate(sorted(manifest.files.items())):
        if name not in sizes:
            raise DamagedError(f"{name} is missing")
        if sizes[name] != file.size:
            raise DamagedError(f"{name} has {sizes[name]:,} bytes instead of {file.size:,}")
        is_own = num_parts and number % num_parts == part
        if is_own and storage.sha256(storage.join(uri, name)) != file.sha256:
            raise DamagedError(f"{name} does not match its checksum")


def read(folder: Path) -> Snapshot:
    """Read a checkpoint after checking it.

    Raises:
        DamagedError: It must not be used.
        OSError, RuntimeError: It cannot be read here and now: a disk fails, or memory is short.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    verify(str(folder))
    try:
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        return Snapshot(
            model=load_file(folder / MODEL_FILE),
            model_config=(folder / MODEL_CONFIG_FILE).read_text(encoding="utf-8"),
            position=Position.from_values(state["position"]),
            **{name: state[name] for name in _IN_STATE_FILE},
        )
    except RuntimeError as error:
        if _NO_ARCHIVE not in str(error):
            raise
        raise DamagedError(f"it cannot be read: {error}") from None
    except (
        KeyError,
        TypeError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
        SafetensorError,
    ) as error:
        raise DamagedError(f"it cannot be read: {error}") from None


def _fetch(uri: str) -> Snapshot:
    """
    Raises:
        DamagedError: The checkpoint must not be used.
    """
    with tempfile.TemporaryDirectory(prefix="training-") as scratch:
        try:
            return read(storage.fetch_folder(uri, Path(scratch)))
        except (InputError, FileNotFoundError) as error:  # a key leads out; a file is gone
            raise DamagedError(f"it cannot be read: {error}") from None


def newest(worker: Worker, *, from_scratch: bool = False) -> Snapshot | None:
    """Let rank 0 choose and read the newest usable checkpoint, so that all ranks continue from the
    same one; None where there is none.

    Raises:
        InputError: none of the run's checkpoints is usable, and ``from_scratch`` is not given.
    """
    read = (lambda _: None) if worker.rank else _fetch
    box = [newest_usable(worker, read, from_scratch=from_scratch)]
    if is_distributed():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def on_all_ranks(task: Callable[[], T]) -> list[T]:
    """Let each rank do ``task``; return their results, in the order of the ranks.

    Raises:
        InputError, UnreachableError: ``task`` raised that, or met with trouble of the storage, on
            one of them. It is raised on all, so that all end together.
    """
    own: T | Exception
    try:
        own = task()
    except Exception as error:
        if not isinstance(error, InputError) and not faults.is_passing(error):
            raise
        own = faults.explained(error, "a checkpoint cannot be read")
    found: list[Any] = [own]
    if is_distributed():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def apply(snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a snapshot into a model and its optimizer."""
    model.load_state_dict(snapshot.model)
    # torch numbers the parameters in the order of the groups.
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: snapshot.optimizer[by_parameter[parameter]]
        for number, parameter in enumerate(ordered)
        if by_parameter[parameter] in snapshot.optimizer
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # A fused optimizer goes through memory without regard to the order of dimensions: moments must
    # lie as their weight does, or each would be added to another one's.
    for parameter, moments in optimizer.state.items():
        for key, value in moments.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                moments[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    torch.set_rng_state(snapshot.rng)
