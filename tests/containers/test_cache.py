"""The cache stays within its disk: what was used least recently goes, what is in use stays."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from containers import node
from containers.program.start import host_cache
from contract.nodes import ENV_HEAD_ADDRESS, ENV_NUM_CPUS, HEAD, WORKER
from tests.clock import FakeClock


def fill(root: Path, **used: int) -> None:
    """Make entries of 1,000 bytes, last used at these times (seconds); __ is /."""
    for name, at in used.items():
        file = root / name.replace("__", "/") / "content"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 1000)
        os.utime(file, (at, at))


def disk(total: int) -> Callable[[Path], SimpleNamespace]:
    """A disk of ``total`` bytes that holds nothing else."""

    def space(folder: Path) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return SimpleNamespace(total=total, free=total - used)

    return space


ENTRIES = {
    "huggingface__hub__models--old": 100,
    "packages__uv": 200,
    "data__images": 300,
    "huggingface__hub__models--new": 400,
}


def test_what_was_used_least_recently_goes_until_a_fifth_of_the_disk_is_free(
    tmp_path: Path,
) -> None:
    fill(tmp_path, **ENTRIES)
    assert host_cache.trim(tmp_path, space=disk(5000)) == []
    assert host_cache.trim(tmp_path, space=disk(2600)) == [
        "huggingface/hub/models--old",
        "packages/uv",
    ]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("content")}
    assert left == {"data/images/content", "huggingface/hub/models--new/content"}


def test_to_read_a_file_is_to_use_it(tmp_path: Path) -> None:
    fill(tmp_path, **ENTRIES)
    os.utime(tmp_path / "huggingface/hub/models--old/content", (500, 100))
    order = [path.name for path in host_cache.entries(tmp_path)]
    assert order == ["uv", "images", "models--new", "models--old"]


def test_the_cache_of_uv_stays_while_a_container_installs(tmp_path: Path) -> None:
    fill(tmp_path, packages__uv=100, data__images=200)
    with host_cache.installing(tmp_path), host_cache.installing(tmp_path):
        assert host_cache.trim(tmp_path, space=disk(1)) == ["data/images"]
    assert host_cache.trim(tmp_path, space=disk(1)) == ["packages/uv"]
    with host_cache.installing(tmp_path / "none"):
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("is_busy", "stops", "waited"), [(False, False, 0), (True, False, 60), (True, True, 0)]
)
def test_nodes_of_a_host_start_one_after_the_other_but_do_not_wait_for_ever(
    tmp_path: Path, is_busy: bool, stops: bool, waited: int
) -> None:
    clock = FakeClock()

    def turn() -> AbstractContextManager[None]:
        return host_cache.turn(within_s=60, should_stop=lambda: stops, root=tmp_path, clock=clock)

    with turn() if is_busy else nullcontext():
        began = clock.now
        with turn():
            assert clock.now - began == waited


def test_programs_are_sent_to_the_cache_where_there_is_one(tmp_path: Path) -> None:
    found = host_cache.variables(tmp_path)
    assert found["HF_HUB_CACHE"] == f"{tmp_path}/huggingface/hub"
    assert found["HF_DATASETS_CACHE"] == f"{tmp_path}/huggingface/datasets"
    assert found["TORCH_HOME"] == f"{tmp_path}/torch"
    assert found["UV_CACHE_DIR"] == f"{tmp_path}/packages/uv"
    assert found["TRAINING_CACHE_DIR"] == f"{tmp_path}/data"
    assert "HF_HOME" not in found, "a token is below it, and all jobs of a host read the cache"
    assert host_cache.variables(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (disk(2600), "huggingface/hub/models--old, packages/uv"),
        (OSError("no answer"), "no answer"),
    ],
)
def test_a_node_trims_the_cache_where_there_is_one(
    answer: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    space = Mock(side_effect=answer)
    monkeypatch.setitem(host_cache.trim.__kwdefaults__ or {}, "space", space)
    host_cache.make_room(tmp_path / "missing")
    fill(tmp_path, **ENTRIES)
    host_cache.make_room(tmp_path)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", [HEAD, WORKER])
def test_head_and_worker_begin_with_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "make_room", Mock(side_effect=InterruptedError))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    environment = {node.TOKEN: "0" * 20, ENV_HEAD_ADDRESS: "127.0.0.1", ENV_NUM_CPUS: "1"}
    own = node.NodeConfig.from_environment(kind, environment)
    with pytest.raises(InterruptedError):
        node.NodeRunner(own).run()
