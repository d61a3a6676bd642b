"""The buffers of checkpoints are made while the first steps run: the first save does not wait for
them, and a run of a single save makes none ahead."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager

from tests import forks
from tests.training import test_checkpoint_faults
from tests.training.local_runs import trained
from tests.training.test_compiled_blocks import TEXT, config_of
from training.checkpoint import dcp, sharded_checkpoints
from training.checkpoint.checkpoints import Position
from training.checkpoint.dcp import Share
from training.checkpoint.sharded_checkpoints import ShardedSaver

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def said() -> list[str]:
    """Warnings."""
    return []


@pytest.fixture
def saver(tmp_path: Path, group: dist.ProcessGroup, said: list[str]) -> ShardedSaver:
    del group
    worker = test_checkpoint_faults.one_rank(str(tmp_path), warn=said.append)
    made = test_checkpoint_faults.trained()
    return ShardedSaver(worker, *made, files={}, settings={}, keep=2)


class Copies(list[set[int]]):
    """Addresses of the buffers of each copy; all stay in use."""

    ahead: Callable[[], object] = staticmethod(lambda: None)
    """Called before each copy that makes buffers ahead."""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    found, kept, real = Copies(), [], DefaultStager.stage

    def stage(stager: Any, state: Any) -> Any:
        if threading.current_thread().name == "buffers":
            found.ahead()
        copied: Any = real(stager, state)
        kept.append(copied)
        tensors = [each for each in copied.values() if isinstance(each, torch.Tensor)]
        found.append({each.untyped_storage().data_ptr() for each in tensors})
        return copied

    monkeypatch.setattr(DefaultStager, "stage", stage)
    return found


def save(saver: ShardedSaver, step: int) -> None:
    saver.save(Position(step=step))
    saver._worker.saves.finish()


def wait(share: Share) -> None:
    """Until all buffers are made."""
    assert share._making is not None
    share._making.join()


def test_the_first_save_uses_the_buffers_that_are_there(
    saver: ShardedSaver, copies: Copies, said: list[str]
) -> None:
    saver.prepare()
    wait(saver._share)
    ahead = set().union(*copies)
    assert len(ahead) == 2 * 4, "of each parameter: itself, two moments, the count of steps"
    weight: Any = saver._model.weight
    weight.detach().add_(1)
    save(saver, 2)
    save(saver, 3)
    assert copies[-2:] == [ahead, ahead]
    saved = sharded_checkpoints.newest_of(saver._worker.run_uri, step=2)
    assert torch.equal(saved.read_weights(["weight"])["weight"], weight)
    assert not said


def test_the_recipe_makes_them_after_its_first_step(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real: Any = Share.prepare

    def prepare(share: Share, *arguments: Any) -> None:
        real(share, *arguments)
        wait(share)

    monkeypatch.setattr(Share, "prepare", prepare)
    words = "--max-steps 3 --checkpoint-every 2 --eval-sequences 2 --sample-tokens 0"
    trained(config_of(f"{TEXT} {words}", tmp_path, monkeypatch))
    *ahead, first, last = copies
    assert set().union(*ahead) == first == last


def test_what_a_save_needs_at_once_is_made_by_it(
    saver: ShardedSaver, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_AT_ONCE", 1)
    copies.ahead = lambda: saver._share._stops.wait(10)
    saver.prepare()
    save(saver, 1)
    first, last = copies
    assert len(first) == 1, "the thread has ended"
    assert first < last


def test_without_memory_ahead_the_save_makes_its_buffers(
    saver: ShardedSaver, copies: Copies, said: list[str]
) -> None:
    copies.ahead = test_checkpoint_faults.raising(test_checkpoint_faults.NO_MEMORY)
    saver.prepare()
    wait(saver._share)
    save(saver, 1)
    save(saver, 2)
    assert copies[0] == copies[1]
    (warning,) = said
    assert "no buffers for checkpoints could be made ahead ([enforce fail" in warning
    assert warning.endswith("the save of step 1 makes them")


def test_only_buffers_for_several_saves_of_a_gpu_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: list[bool] = []
    real = dcp._stager

    def stager(*, pinned: bool) -> DefaultStager:
        kinds.append(pinned)
        return real(pinned=False)

    monkeypatch.setattr(dcp, "_stager", stager)
    share = Share()
    share.copy({"w": torch.ones(3)})
    share.prepare([torch.ones(3)], GPU)
    assert kinds == [False], "what a save has made is used"
    for device in (CPU, GPU):
        share = Share()
        share.prepare([], device)
        share.stop()
    assert kinds[1:] == [False, False, False, True]


class EightBits(torch.Tensor):
    """As torchao 0.18's ``OptimState8bit``: made of other tensors, with few operations."""

    def __new__(cls, codes: torch.Tensor) -> "EightBits":
        make: Any = torch.Tensor._make_wrapper_subclass
        found: EightBits = make(cls, codes.shape, dtype=torch.float32)
        return found

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, *_: object) -> "EightBits":
        return EightBits(tensors["codes"])

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: object) -> Any:
        if operation is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(operation)


def test_moments_in_8_bits_are_copied_to_buffers_too() -> None:
    codes, share = torch.arange(4, dtype=torch.uint8), Share()
    state = {"moments": EightBits(codes)}
    share.prepare([*state.values()], CPU)
    wait(share)
    assert share.stop() is None
    share.copy(state)
    codes += 1
    copied = share.entries["moments"]
    assert isinstance(copied, EightBits)
    assert copied.codes.tolist() == [0, 1, 2, 3]


def fail_beside(made: Path) -> None:
    """Fail while buffers are made, each of which takes until then."""

    def stage(*_: object) -> None:
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        with made.open("a") as file:
            file.write(".")

    DefaultStager.stage = stage  # type: ignore[assignment, method-assign]
    Share().prepare([torch.ones(1)] * 3 * dcp._AT_ONCE, CPU)
    raise SystemExit(3)


def test_a_process_that_fails_meanwhile_ends_with_the_buffer_at_hand(tmp_path: Path) -> None:
    process = forks.FORKS.Process(target=fail_beside, args=(tmp_path / "made",))
    process.start()
    process.join()
    assert process.exitcode == 3
    assert (tmp_path / "made").read_text() == "."
