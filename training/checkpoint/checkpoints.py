"""Checkpoints: a folder per step that is whole or is not used.

    <run>/checkpoints/step-00000470/
        model.safetensors, config.json   the model in its standard shapes (Hugging Face layout)
        state.pt                         optimizer, position, random state, settings
        manifest.json                    size and SHA-256 of the others; written last

They are written in the background (``training.runtime.saving``), and Ray Train knows nothing of
them. The schedule is a function of the step, so the position restores it. Only rank 0 reads; the
others get the state from it, so all agree on what was chosen.
"""

import contextlib
import hashlib
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from contract.errors import InputError
from contract.runs import MANIFEST_FILE, RunPaths, checkpoint_step
from training import storage
from training.checkpoint import lease
from training.checkpoint.manifest import DamagedError, File, Manifest
from training.metrics import StepMetrics
from training.models import classifiers as models
from training.models.classifiers import Window
from training.record.events import Warned
from training.worker import Worker

MODEL_FILE: Final = "model.safetensors"
MODEL_CONFIG_FILE: Final = "config.json"
STATE_FILE: Final = "state.pt"


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
    """State dict in standard shapes."""
    model_config: str
    """Hugging Face ``config.json``."""
    optimizer: dict[str, dict[str, torch.Tensor]]
    """Moments and step count by parameter name, in the shapes that were trained."""
    cut: dict[str, tuple[Window, int]]
    rng: torch.Tensor
    """State of torch's CPU generator, uint8; all ranks hold the same."""
    position: Position
    config: Mapping[str, Any]
    """The run's settings."""
    data: str
    """Fingerprint of the data set."""
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    """The running average of the model's weights in standard shapes, where a recipe keeps one: it
    is what becomes of the model in the end."""

    def check_data(self, fingerprint: str, *, run: str, data: str) -> None:
        """
        Raises:
            InputError: the run was trained on other data than that in ``data``.
        """
        if self.data != fingerprint:
            raise InputError(
                f"run {run!r} was trained on other images than those in {data}: give the same "
                "--data, or another --run"
            )


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    cut: dict[str, tuple[Window, int]],
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
        model=models.full_state(state, cut),
        model_config=model_config.to_json_string(),
        optimizer=moments,
        cut=cut,
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


def write(snapshot: Snapshot, folder: Path, *, fence: int = 0) -> None:
    """Write all files of a checkpoint into an empty folder, the manifest last.

    Args:
        fence: number of the lease that the writer holds; 0 without one.
    """
    write_model(snapshot, folder)
    state = {
        "optimizer": snapshot.optimizer,
        "cut": snapshot.cut,
        "rng": snapshot.rng,
        "position": asdict(snapshot.position),
        "config": snapshot.config,
        "data": snapshot.data,
        "average": snapshot.average,
    }
    torch.save(state, folder / STATE_FILE)
    files = {
        path.name: File(path.stat().st_size, _sha256(path)) for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST_FILE).write_bytes(Manifest(files=files, fence=fence).to_json())


def publish(uri: str, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a folder, then make it appear at ``uri`` in one step."""
    folder = storage.staging_folder(uri)
    try:
        fill(folder)
        storage.publish_folder(folder, uri, last=MANIFEST_FILE)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(run_uri: str, snapshot: Snapshot, *, keep: int, fence: int = 0) -> str:
    """Write a checkpoint and remove all but the newest ``keep``; return its address.

    Args:
        fence: number of the lease that the writer holds; 0 without one.

    Raises:
        LostError: another process has taken the run over.
    """
    lease.check(run_uri, fence)
    step = snapshot.position.step
    uri = RunPaths(run_uri).checkpoint(step)
    publish(uri, lambda folder: write(snapshot, folder, fence=fence))
    prune(run_uri, keep=keep, step=step, fence=fence)
    return uri


def prune(run_uri: str, *, keep: int, step: int | None = None, fence: int = 0) -> None:
    """Remove all checkpoints but the newest ``keep``; where storage fails, the next save does.

    Args:
        step: of the checkpoint that was just written. Later ones under an earlier lease than
            ``fence`` are removed first: their writer had lost the run and did not know it yet.
    """
    with contextlib.suppress(Exception):  # a save that is done has not failed
        for name in names(run_uri):
            later = step is not None and (checkpoint_step(name) or 0) > step
            if later and _fence_of(run_uri, name) < fence:
                storage.remove_folder(place_of(run_uri, name))
        for old in names(run_uri)[:-keep]:
            storage.remove_folder(place_of(run_uri, old))


def _fence_of(run_uri: str, name: str) -> int:
    content = storage.read_bytes(storage.join(place_of(run_uri, name), MANIFEST_FILE))
    with contextlib.suppress(DamagedError):
        return Manifest.from_json(content).fence
    return 0


def set_aside(run_uri: str, name: str) -> None:
    """Take a damaged checkpoint out of the way: training is about to write the same steps again.

    One whose upload was cut off is removed, one that was whole once becomes ``damaged-step-...``.
    """
    uri = place_of(run_uri, name)
    if storage.exists(storage.join(uri, MANIFEST_FILE)):
        storage.rename_folder(uri, place_of(run_uri, f"damaged-{name}"))
    else:
        storage.remove_folder(uri)


def save_in_background(worker: Worker, snapshot: Snapshot | None, *, keep: int) -> None:
    """Hand rank 0's snapshot to the worker for saving; every rank calls this at the same step."""
    if worker.rank:
        worker.save(None, None)
        return
    assert snapshot is not None
    write_it = partial(save, worker.run_uri, snapshot, keep=keep, fence=worker.fence)
    worker.save(snapshot.position.step, write_it)


def publish_model(run_uri: str, snapshot: Snapshot) -> str:
    """Write the snapshot's model, its average where it has one, as ``<run>/model``; return its
    address."""
    uri = RunPaths(run_uri).model
    best = replace(snapshot, model=snapshot.average or snapshot.model)
    publish(uri, lambda folder: write_model(best, folder))
    return uri


def place_of(run_uri: str, name: str) -> str:
    """Address of a checkpoint, from one of ``names``."""
    return storage.join(RunPaths(run_uri).checkpoints, name)


def names(run_uri: str) -> list[str]:
    """Names of the checkpoints of a run, oldest first, the unusable among them included."""
    folder = RunPaths(run_uri).checkpoints
    found = [
        (step, name)
        for name in storage.list_folders(folder)
        if (step := checkpoint_step(name)) is not None
    ]
    return [name for _, name in sorted(found)]


def out_of_memory(error: torch.OutOfMemoryError, worker: Worker, *, advice: str) -> InputError:
    """What a run that ran out of GPU memory ends with; ``advice`` is a sentence."""
    saved, first_line = names(worker.run_uri), str(error).splitlines()[0]
    kept = f"checkpoint {saved[-1]} is kept" if saved else "nothing was saved before it"
    rank = worker.rank
    return InputError(f"out of GPU memory on rank {rank}; {kept}. {advice} ({first_line})")


def stop_if_diverged(
    steps: Sequence[StepMetrics],
    first_step: int,
    *,
    lr: float,
    worker: Worker,
    in_a_row: int = 0,
    limit: int = 1,
) -> int:
    """End the run once so many steps in a row had a loss or gradient that is not a number.

    Called before each save, so a diverged model never becomes a checkpoint.

    Args:
        in_a_row: how many did before these steps.
        limit: so many in a row end the run. A recipe that allows more than one skips their updates.

    Returns:
        How many did at the end of these steps.

    Raises:
        InputError: the limit is reached.
    """
    for number, found in enumerate(steps, start=first_step):
        in_a_row = 0 if found.is_finite else in_a_row + 1
        if in_a_row >= limit:
            worker.finish_saves()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.barrier()  # the last save is whole once every rank has written its part
            saved = names(worker.run_uri)
            where = f"checkpoint {saved[-1]}, which is kept" if saved else "the beginning"
            before = f", the last of {limit}" if limit > 1 else ""
            raise InputError(
                f"training diverged at step {number}{before}: loss {found.loss}, gradient norm "
                f"{found.grad_norm}. Give the same --run a lower --lr (now {lr:g}): it resumes "
                f"from {where}"
            )
    return in_a_row


def remove_leftovers(run_uri: str) -> None:
    """Remove the unfinished folders of a process that was killed while it saved."""
    storage.remove_leftovers(RunPaths(run_uri).checkpoints)
    storage.remove_leftovers(run_uri)


def verify(folder: Path) -> None:
    """Check a checkpoint's files against its manifest.

    Raises:
        DamagedError: One is missing, has another size or another content.
    """
    own = folder / MANIFEST_FILE
    for name, file in Manifest.from_json(own.read_bytes() if own.exists() else None).files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{name} is missing")
        file.check_size(name, path.stat().st_size)
        file.check_hash(name, _sha256(path))


def read(folder: Path) -> Snapshot:
    """Read a checkpoint after checking it.

    Raises:
        DamagedError: It must not be used.
    """
    from safetensors.torch import load_file

    verify(folder)
    try:
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        return Snapshot(
            model=load_file(folder / MODEL_FILE),
            model_config=(folder / MODEL_CONFIG_FILE).read_text(encoding="utf-8"),
            optimizer=state["optimizer"],
            cut=state["cut"],
            rng=state["rng"],
            position=Position.from_values(state["position"]),
            config=state["config"],
            data=state["data"],
            average=state.get("average", {}),  # earlier versions had none
        )
    except (OSError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise DamagedError(f"it cannot be read: {error}") from None


def newest(run_uri: str, warn: Callable[[str], None]) -> Snapshot | None:
    """Return the newest usable checkpoint of a run, or None; ``warn`` of each one passed over.

    Those are set aside.
    """
    remove_leftovers(run_uri)
    for name in reversed(names(run_uri)):
        uri = place_of(run_uri, name)
        with tempfile.TemporaryDirectory(prefix="training-") as scratch:
            try:
                snapshot = read(storage.fetch_folder(uri, Path(scratch)))
            except (DamagedError, InputError) as damage:  # a key may lead out of the folder
                warn(f"checkpoint {name} is damaged ({damage}): the one before it is used")
                set_aside(run_uri, name)
            else:
                return snapshot
    return None


def shared_newest(worker: Worker) -> Snapshot | None:
    """Let rank 0 choose and read the newest usable checkpoint, so that all ranks continue from the
    same one; None where there is none."""
    snapshot = None
    if worker.rank == 0:
        snapshot = newest(worker.run_uri, lambda text: worker.emit(Warned(message=text)))
    return share(snapshot)


def share(snapshot: Snapshot | None) -> Snapshot | None:
    """Give rank 0's snapshot to every rank."""
    box = [snapshot]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def apply(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    cut: Mapping[str, tuple[Window, int]],
) -> None:
    """Put a snapshot into a model and its optimizer, whichever taps either of them keeps."""
    model.load_state_dict(models.live_state(snapshot.model, cut))

    fitted: dict[str, dict[str, torch.Tensor]] = {}
    for name, moments in snapshot.optimizer.items():
        # Moments have their weight's shape; the step count is a scalar and has no taps.
        fitted[name] = {
            key: value
            if value.ndim == 0
            else models.live_state(models.full_state({name: value}, snapshot.cut), cut)[name]
            for key, value in moments.items()
        }
    # torch numbers the parameters in the order of the groups.
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: fitted[by_parameter[parameter]]
        for number, parameter in enumerate(ordered)
        if by_parameter[parameter] in fitted
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
