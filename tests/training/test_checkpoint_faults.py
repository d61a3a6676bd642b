"""Proves that a lack of memory or a failing storage is not taken for damage, and that a run which
cannot use any of its checkpoints does not start again by itself."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import InputError, UnreachableError
from tests.training.bucket import Bucket, install
from training.checkpoint import checkpoints, dcp, sharded_checkpoints
from training.checkpoint.checkpoints import Position, Snapshot
from training.system import storage

SLOW_DOWN = OSError(errno.EBUSY, "Please reduce your request rate.")
NO_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"
)


def test_a_full_disk_is_trouble_of_the_storage_whichever_library_meets_it(tmp_path: Path) -> None:
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert storage.is_trouble(SafetensorError(said))  # as it was seen: it writes elsewhere first
    (tmp_path / checkpoints.STATE_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        checkpoints.write(snapshot(1), tmp_path)
    assert storage.is_trouble(raised.value)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return install(monkeypatch)


def snapshot(step: int, value: float | None = None) -> Snapshot:
    return Snapshot(
        model={"w": torch.full((8,), float(step) if value is None else value)},
        model_config="{}",
        optimizer={},
        rng=torch.get_rng_state(),
        position=Position(step=step),
        config={},
        data="x",
    )


def save(run: str, *steps: int, keep: int = 2, fence: int = 0) -> None:
    for step in steps:
        checkpoints.save(run, snapshot(step), keep=keep, fence=fence)


def newest_step(run: str) -> int | None:
    found = checkpoints.newest(run, pytest.fail)
    return found.position.step if found else None


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# --- what is damage, and what is not -------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("torch.load", NO_MEMORY),
        ("torch.load", MemoryError()),
        ("safetensors.torch.load_file", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("training.checkpoint.checkpoints._sha256", OSError(errno.EIO, "Input/output error")),
        ("training.system.storage.read_bytes", OSError(errno.ESTALE, "Stale file handle")),
    ],
)
def test_a_lack_of_memory_or_a_failing_disk_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    run = str(tmp_path)
    save(run, 100, 200)
    with monkeypatch.context() as patch:
        patch.setattr(where, raising(error))
        seen = UnreachableError if storage.is_trouble(error) else type(error)
        with pytest.raises(seen):
            checkpoints.newest(run, pytest.fail)
    assert newest_step(run) == 200


def test_what_a_second_look_finds_whole_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), 100)
    hashed, answers = checkpoints._sha256, iter(["0" * 64])
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: next(answers, None) or hashed(path))
    assert newest_step(str(tmp_path)) == 100


def test_a_process_that_stalls_and_loses_the_run_removes_nothing_of_its_successor(
    tmp_path: Path,
) -> None:
    """It had made sure of its lease, and now its successor is in the middle of a save."""
    folder = tmp_path / "checkpoints"
    save(str(tmp_path), 3, fence=2)
    being_saved = folder / ".step-00000004-lease2.part"
    being_saved.mkdir()
    save(str(tmp_path), 5, keep=1, fence=1)
    names = {each.name for each in folder.iterdir()}
    assert names == {being_saved.name, "step-00000003-lease2", "step-00000005"}


def damage(run: str, name: str) -> None:
    uri = f"{checkpoints.place_of(run, name)}/config.json"
    assert storage.exists(uri)
    storage.write_bytes(uri, b"[]")


def test_a_run_of_which_no_checkpoint_is_usable_refuses_to_start_unless_told_to(
    tmp_path: Path,
) -> None:
    run = str(tmp_path / "mine")
    save(run, 100, 200)
    for name in checkpoints.names(run):
        damage(run, name)
    for _ in range(2):  # nor the next time
        with pytest.raises(InputError, match=r"'mine' has .* none .*checksum.*--from-scratch"):
            checkpoints.newest(run, pytest.fail)
    assert checkpoints.names(run) == ["step-00000100", "step-00000200"]
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append, from_scratch=True) is None
    assert len(warnings) == 2
    assert "step-00000200 is damaged" in warnings[0]
    assert "training starts at step 0" in warnings[0]
    assert (tmp_path / "mine" / "checkpoints" / "damaged-step-00000200").is_dir()
    save(run, 100)
    assert checkpoints.newest(run, pytest.fail, from_scratch=True) is not None


def one_rank(run_uri: str) -> Any:
    """The only worker of a run, which tells no one what happens."""
    return SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), run_uri=run_uri, emit=lambda *_: None
    )


# --- checkpoints of a sharded model ---------------------------------------------------------------


Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained(width: int = 4) -> Trained:
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_sharded(run: str, step: int, made: Trained, group: dist.ProcessGroup) -> str:
    state = {"position": {"step": step}, "config": {}}
    return sharded_checkpoints.write_checkpoint(
        run,
        step,
        sharded_checkpoints.state_of(*made),
        files={sharded_checkpoints.STATE_FILE: json.dumps(state).encode()},
        group=group,
    )


def failing_shards(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> None:
    """Let shards be read once the errors have been raised."""
    real = dcp.StorageFiles.create_stream

    def create_stream(files: dcp.StorageFiles, path: Any, mode: str) -> Any:
        if str(path).endswith(".distcp") and errors:
            raise errors.pop(0)
        return real(files, path, mode)

    monkeypatch.setattr(dcp.StorageFiles, "create_stream", create_stream)


def found_in(run: str) -> sharded_checkpoints.Found:
    found = sharded_checkpoints.newest(one_rank(run))
    assert found is not None
    return found


@pytest.mark.parametrize("error", [SLOW_DOWN, NO_MEMORY])
def test_what_fails_while_shards_are_read_is_not_the_users_mistake(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    error: Exception,
) -> None:
    save_sharded(str(tmp_path), 5, trained(), group)
    found = found_in(str(tmp_path))
    failing_shards(monkeypatch, [error])
    with pytest.raises(type(error)) as raised:
        found.load(*trained())
    assert not isinstance(raised.value, InputError | CheckpointException)


def test_a_checkpoint_of_another_model_is_the_users_mistake(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    save_sharded(str(tmp_path), 5, trained(), group)
    with pytest.raises(InputError, match=r"does not fit the model: .*Size mismatch.*another --run"):
        found_in(str(tmp_path)).load(*trained(width=6))
    wider = nn.Linear(4, 4)
    wider.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(InputError, match=r"does not fit the model: .*Missing key.*another --run"):
        found_in(str(tmp_path)).load(wider, torch.optim.AdamW(wider.parameters()))


def test_what_no_loss_depends_on_has_no_moments_and_hinders_no_resume(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    model, _ = trained()
    model.register_parameter("idle", nn.Parameter(torch.zeros(1)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save_sharded(str(tmp_path), 5, (model, optimizer), group)
    optimizer.zero_grad()
    again = torch.optim.AdamW(model.parameters())
    found_in(str(tmp_path)).load(model, again)
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys() == {0, 1}


def test_a_sharded_run_of_which_no_checkpoint_is_usable_refuses_to_start_unless_told_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
) -> None:
    run = str(tmp_path / "mine")
    for step in (5, 6):
        save_sharded(run, step, trained(), group)
    worker = one_rank(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "verify", raising(NO_MEMORY))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            sharded_checkpoints.newest(worker)
        patch.undo()
        patch.setattr(dcp, "_check", raising(MemoryError()))
        with pytest.raises(MemoryError):
            sharded_checkpoints.newest(worker)
        patch.undo()
        patch.setattr(sharded_checkpoints, "Found", raising(SLOW_DOWN))
        with pytest.raises(UnreachableError, match="Please reduce"):
            sharded_checkpoints.newest(worker)
    found = sharded_checkpoints.newest(worker)
    assert found is not None
    assert found.position.step == 6
    for name in checkpoints.names(run):
        (tmp_path / "mine" / "checkpoints" / name / "state.json").write_bytes(b"{}")
    with pytest.raises(InputError, match=r"'mine' has .* none .*state.json.*--from-scratch"):
        sharded_checkpoints.newest(worker)
    assert len(checkpoints.names(run)) == 2
    assert sharded_checkpoints.newest(worker, from_scratch=True) is None
    assert checkpoints.names(run) == []
