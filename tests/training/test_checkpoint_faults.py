"""Proves that a lack of memory or a failing storage is not taken for damage, and that a run which
cannot use any of its checkpoints does not start again by itself."""

import errno
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from contract import faults
from contract.errors import InputError, UnreachableError
from contract.runs import OVERWRITES_FILE
from store import storage
from tests import forks
from tests.training.bucket import RUN, Bucket, install
from training.checkpoint import checkpoints, dcp, divergence, sharded_checkpoints, soundness
from training.checkpoint.checkpoints import Position, Snapshot
from training.checkpoint.dcp import Share
from training.checkpoint.manifest import DamagedError
from training.loop.metrics import StepMetrics
from training.loop.saving import Saves
from training.runtime.torchrun import TorchrunWorker

SLOW_DOWN = OSError(errno.EBUSY, "Please reduce your request rate.")
NO_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"
)


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


def one_rank(run_uri: str, fence: int = 0, *, warn: Callable[[str], Any] = lambda _: None) -> Any:
    """The only worker of a run, which tells no one what happens but warnings."""
    return SimpleNamespace(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        run_uri=run_uri,
        fence=fence,
        emit=lambda event: warn(event.message),
        saves=Saves(lambda *_: None),
    )


def newest(
    run: str, warn: Callable[[str], Any] = pytest.fail, *, from_scratch: bool = False
) -> Snapshot | None:
    return checkpoints.newest(one_rank(run, warn=warn), from_scratch=from_scratch)


def newest_step(run: str) -> int | None:
    found = newest(run)
    return found.position.step if found else None


def test_a_run_that_is_begun_anew_takes_no_checkpoint_of_the_earlier_one(tmp_path: Path) -> None:
    run = str(tmp_path / "runs" / "r")
    save(run, 5, fence=1)
    mark = Path(run, OVERWRITES_FILE)
    mark.write_text("2")
    assert newest_step(run) is None
    save(run, 3, fence=2)
    assert newest_step(run) == 3, "its own counts when its workers start again"
    mark.unlink()
    storage.remove_folder(f"{run}/checkpoints/step-00000003-lease2")
    save(run, 5, fence=1)
    assert newest_step(run) == 5


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
        ("store.storage.sha256", OSError(errno.EIO, "Input/output error")),
        ("store.storage.read_bytes", OSError(errno.ESTALE, "Stale file handle")),
    ],
)
def test_a_lack_of_memory_or_a_failing_disk_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    run = str(tmp_path)
    save(run, 100, 200)
    with monkeypatch.context() as patch:
        patch.setattr(where, raising(error))
        seen = UnreachableError if faults.is_passing(error) else type(error)
        with pytest.raises(seen):
            newest(run)
    assert newest_step(run) == 200


def test_what_a_second_look_finds_whole_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), 100)
    hashed, answers = storage.sha256, iter(["0" * 64])
    monkeypatch.setattr(storage, "sha256", lambda path: next(answers, None) or hashed(path))
    assert newest_step(str(tmp_path)) == 100


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
        Share().copy(sharded_checkpoints.state_of(*made)),
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


def found_in(run: str) -> sharded_checkpoints.ShardedCheckpoint:
    found = sharded_checkpoints.newest(one_rank(run))
    assert found is not None
    return found


def test_torch_reads_shards_as_they_were_when_copied_also_with_a_new_entry(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    share, lr = Share(), 0.1
    weights = {
        "rows": torch.randn(3, 5),
        "columns": torch.randn(5, 3).t(),
        "bf16": torch.randn(7, dtype=torch.bfloat16),
        "step": torch.tensor(4),
        "none": torch.empty(0, 3),
        "large": torch.randn(300, 700)[100:],
    }
    for step in (1, 2, 3):
        if step == 3:
            weights["late"] = torch.ones(2, dtype=torch.bool)
        lr /= 2
        weights["rows"] += 1
        share.copy({"model": weights, "optimizer": {"lr": lr}})
        saved = {name: value.clone() for name, value in weights.items()}
        weights["rows"] += 1
        uri = sharded_checkpoints.write_checkpoint(
            str(tmp_path), step, share, files={}, group=group
        )
        checkpoints.verify(uri)
        empty = {name: torch.zeros_like(value) for name, value in weights.items()}
        found: dict[str, Any] = {"model": empty, "optimizer": {"lr": 0.0}}
        load(found, storage_reader=FileSystemReader(uri))
        torch.testing.assert_close(found, {"model": saved, "optimizer": {"lr": lr}}, rtol=0, atol=0)


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


@pytest.mark.parametrize("module", [checkpoints, sharded_checkpoints], ids=["whole", "sharded"])
def test_a_run_without_a_usable_checkpoint_refuses_to_start_unless_told_to(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    run, warnings = str(tmp_path / "mine"), list[str]()
    start = partial(module.newest, one_rank(run, warn=warnings.append))
    is_sharded = module is sharded_checkpoints
    for step in (5, 6):
        save_sharded(run, step, trained(), group) if is_sharded else save(run, step)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "verify", raising(NO_MEMORY))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            start()
    assert start().position.step == 6
    for name in checkpoints.names(run):
        file = "state.json" if is_sharded else "config.json"
        storage.write_bytes(f"{checkpoints.place_of(run, name)}/{file}", b"[]")
    for _ in range(2):  # nor the next time
        with pytest.raises(InputError, match="--from-scratch"):
            start()
    assert len(checkpoints.names(run)) == 2
    assert start(from_scratch=True) is None
    assert len(warnings) == 2
    assert (tmp_path / "mine" / "checkpoints" / "damaged-step-00000006").is_dir()


# --- what must not be saved, or trained on --------------------------------------------------------


@pytest.mark.parametrize("where", ["model", "average", "moment"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e35])
def test_a_snapshot_that_the_last_update_ruined_is_not_saved(
    tmp_path: Path, where: str, value: float
) -> None:
    run, bad = str(tmp_path), {"w": torch.tensor([1.0, value])}
    save(run, 100)
    changes: dict[str, dict[str, Any]] = {
        "model": {"model": bad},
        "average": {"average": bad},
        "moment": {"optimizer": {"w": {"step": torch.tensor(3.0), "exp_avg": bad["w"]}}},
    }
    with pytest.raises(InputError, match=r"step 200 left .* in w.*lower --lr.*step-00000100"):
        checkpoints.save(run, replace(snapshot(200), **changes[where]), keep=2)
    assert newest_step(run) == 100
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


class In8Bits(torch.Tensor):
    """As torchao.optim.subclass_8bit.OptimState8bit: of type float32, without most operators."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, _scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], []

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: Any) -> Any:
        return In8Bits(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"attempting to run unimplemented operator/function: {func}")


@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_moments_in_8_bits_are_looked_at_in_their_parts(scale: float) -> None:
    codes = torch.zeros(256, dtype=torch.uint8)
    moments = In8Bits(codes, torch.tensor([1.0, scale]))
    assert soundness.unsound([("w.exp_avg", moments)]) == ("w.exp_avg" if scale != 1 else "")


def save_on_two_ranks(run: str) -> None:
    """Rank 0 sees what only rank 1 holds."""
    worker = TorchrunWorker(run_uri=run)
    model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if worker.rank:
        moments: Any = next(iter(optimizer.state.values()))
        moments["exp_avg_sq"].to_local()[-1:] = math.nan
    with pytest.raises(InputError, match=r"step 7 left NaN.*weight.exp_avg_sq.*starts at step 0"):
        save_sharded(run, 7, (model, optimizer), dist.new_group(backend="gloo"))
    worker.close()


def test_ranks_agree_not_to_save_what_one_of_them_has_ruined(tmp_path: Path) -> None:
    forks.run(2, save_on_two_ranks, str(tmp_path))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("place", ["disk", "S3"])
def test_what_led_to_a_divergence_is_set_aside_and_the_advice_works(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUN if place == "S3" else str(tmp_path / "r")
    if place == "S3":
        install(monkeypatch)
    save(run, 100, 200, 300, keep=3)
    bad, good = (StepMetrics(loss=loss, grad_norm=1.0, size=1) for loss in (math.nan, 2.0))

    def diverge(*steps: StepMetrics, first: int) -> str:
        with pytest.raises(InputError, match="training diverged at step") as raised:
            divergence.stop_if_diverged(steps, first, lr=0.5, worker=one_rank(run), limit=2)
        return str(raised.value)

    # A step between was good: the weights of the checkpoint are not the ones that led there.
    said = diverge(good, bad, bad, first=301)
    assert "step-00000300" in said
    # The skipped steps changed nothing: those two checkpoints hold the same weights.
    said = diverge(bad, bad, first=200 + 1)
    assert "step-00000200, step-00000300" in said
    assert newest_step(run) == 100
    assert "--from-scratch" in diverge(bad, bad, first=101)
    save(run, 200, 300)
    there = storage.list_folders(f"{run}/checkpoints")
    assert [name for name in there if name.startswith("diverged-")] == [
        f"diverged-step-00000{number}" for number in (100, 200, 300)
    ], "never removed"


def test_a_run_whose_checkpoints_are_gone_does_not_start_at_step_0_by_itself(
    tmp_path: Path,
) -> None:
    lines = '{"type": "step", "step": 9, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert newest(str(tmp_path)) is None, "it never had one"
    (tmp_path / "metrics.jsonl").write_text(lines + '{"type": "saved", "step": 8}\n')
    with pytest.raises(
        InputError, match=r"that of step 8 is gone or was set aside.*--from-scratch"
    ):
        newest(str(tmp_path))
    assert newest(str(tmp_path), from_scratch=True) is None


def test_of_two_ranks_one_finds_the_damage_of_any_file(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    uri = save_sharded(str(tmp_path), 5, trained(), group)
    for file in sorted(Path(uri).iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = []
        for rank in (0, 1):
            worker = one_rank(str(tmp_path))
            worker.rank, worker.world_size = rank, 2
            try:
                sharded_checkpoints._checked(uri, worker)
            except DamagedError:
                found.append(rank)
        assert found, file.name
        assert len(found) == 1 or file.suffix != ".distcp", "each rank reads its part"
        file.write_bytes(content)


def test_a_snapshot_is_copied_once_the_save_before_needs_its_buffers_no_more(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    del group
    done: list[str] = []
    worker = one_rank(str(tmp_path))
    worker.saves = SimpleNamespace(
        finish=lambda: done.append("waited"), start=lambda *_: done.append("began")
    )
    saver = sharded_checkpoints.ShardedSaver(worker, *trained(), files={}, settings={}, keep=1)
    monkeypatch.setattr(saver._share, "copy", lambda _: done.append("copied"))
    saver.save(Position(step=1))
    assert done == ["waited", "copied", "began"]


# --- a full disk ----------------------------------------------------------------------------------


def test_room_for_the_checkpoints_to_come_is_looked_at_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()  # 20 numbers, and two moments of each
    size = 3 * 20 * 4
    worker = one_rank(str(tmp_path / "not" / "there"))
    for free, fits in ((3 * size, True), (3 * size - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with (
            nullcontext()
            if fits
            else pytest.raises(storage.FullError, match="need 720 B, 719 B are")
        ):
            assert checkpoints.check_room(worker, optimizer, model.parameters(), keep=2) == size
    save(worker.run_uri, 100)
    checkpoints.check_room(
        worker, optimizer, model.parameters(), keep=2
    )  # one of them is there already
    small: Any = type("AdamW8bit", (torch.optim.AdamW,), {})(model.parameters())
    assert checkpoints.check_room(worker, small, model.parameters(), keep=1) == 20 * (4 + 2)


def test_a_manifest_that_is_a_folder_is_damage(tmp_path: Path) -> None:
    save(str(tmp_path), 100, 200)
    manifest = tmp_path / "checkpoints" / "step-00000200" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    warnings: list[str] = []
    found = newest(str(tmp_path), warnings.append)
    assert found is not None
    assert found.position.step == 100
    assert "step-00000200 is damaged (manifest.json cannot be read)" in warnings[0]
