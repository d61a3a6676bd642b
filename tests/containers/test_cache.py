"""The cache stays within its disk: what was used least recently goes, what is in use stays."""

import os
from pathlib import Path

import pytest

from containers import node
from containers.program import cache
from containers.program.cache import Cache, Space
from contract.nodes import ENV_HEAD_ADDRESS, ENV_NUM_CPUS, HEAD, WORKER


def fill(root: Path, **used: int) -> None:
    """Make entries of 1,000 bytes, last used at these times (seconds); __ is /."""
    for name, at in used.items():
        file = root / name.replace("__", "/") / "content"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 1000)
        os.utime(file, (at, at))


def on_disk(root: Path, total: int) -> Cache:
    """A cache on a disk of ``total`` bytes that holds nothing else."""

    def space(folder: Path) -> Space:
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Space(total=total, free=total - used)

    return Cache(root, space=space)


ENTRIES = {
    "huggingface__hub__models--old": 100,
    "packages__aaaa": 200,
    "data__images": 300,
    "huggingface__hub__models--new": 400,
}


def test_what_was_used_least_recently_goes_until_a_fifth_of_the_disk_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, **ENTRIES)
    assert on_disk(tmp_path, 5000).trim() == []
    assert on_disk(tmp_path, 2600).trim() == ["huggingface/hub/models--old", "packages/aaaa"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("content")}
    assert left == {"data/images/content", "huggingface/hub/models--new/content"}
    assert "removed from the cache: huggingface/hub/models--old, packages/aaaa" in (
        capsys.readouterr().err
    )


def test_to_read_a_file_is_to_use_it_and_to_use_packages_is_written_down(tmp_path: Path) -> None:
    fill(tmp_path, **ENTRIES)
    os.utime(tmp_path / "huggingface/hub/models--old/content", (500, 100))
    os.utime(tmp_path / "packages/aaaa/content", (900, 900))
    (tmp_path / "packages/aaaa" / cache.USED).touch()
    os.utime(tmp_path / "packages/aaaa" / cache.USED, (200, 200))
    order = [entry.path.name for entry in Cache(tmp_path).entries()]
    assert order == ["aaaa", "images", "models--new", "models--old"]


def test_packages_that_a_container_uses_or_installs_stay(tmp_path: Path) -> None:
    fill(tmp_path, packages__used=100, packages__left=200)
    draft = Cache(tmp_path).draft("made")
    (draft / "content").write_bytes(b"x" * 1000)
    abandoned = Cache(tmp_path).draft("abandoned")
    (abandoned / "content").write_bytes(b"x" * 1000)
    with Cache(tmp_path).lock_file("used") as used, Cache(tmp_path).lock_file("made") as made:
        assert cache.try_lock(used, shared=True)
        assert cache.try_lock(made)
        assert set(on_disk(tmp_path, 1).trim()) == {
            "packages/left",
            f"packages/{abandoned.name}",
        }
    assert {each.name for each in (tmp_path / "packages").iterdir() if each.is_dir()} == {
        "used",
        draft.name,
    }
    assert on_disk(tmp_path, 1).trim()[0] == "packages/used"


def test_programs_are_sent_to_the_cache_where_there_is_one(tmp_path: Path) -> None:
    found = cache.variables(tmp_path)
    assert found["HF_HOME"] == f"{tmp_path}/huggingface"
    assert found["TORCH_HOME"] == f"{tmp_path}/torch"
    assert found["TRAINING_CACHE_DIR"] == f"{tmp_path}/data"
    assert not found["HF_TOKEN_PATH"].startswith(str(tmp_path)), "all jobs of a host read the cache"
    assert cache.variables(tmp_path / "none") == {}


def test_without_the_hosts_folder_a_cache_ends_with_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(cache, "FALLBACK", tmp_path / "own")
    assert Cache.of_node().root == tmp_path / "own"
    assert "none cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(cache, "CACHE_DIR", str(tmp_path))
    assert Cache.of_node().root == tmp_path


def test_a_node_trims_the_cache_at_its_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, **ENTRIES)
    disk = on_disk(tmp_path, 2600)
    monkeypatch.setattr(cache, "Cache", lambda root: Cache(root, space=disk._space))
    thread = cache.start_trimming(tmp_path)
    assert thread is not None
    thread.join(30)
    assert not (tmp_path / "huggingface/hub/models--old").exists()
    assert (tmp_path / "data/images").exists()
    assert "removed from the cache: huggingface/hub/models--old" in capsys.readouterr().err


def test_without_a_cache_of_the_host_nothing_is_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache.start_trimming(tmp_path / "missing") is None

    def fail(_folder: Path) -> Space:
        raise OSError("a disk that does not answer")

    monkeypatch.setattr(cache, "Cache", lambda root: Cache(root, space=fail))
    thread = cache.start_trimming(tmp_path)
    assert thread is not None
    thread.join(30)
    assert "the cache is not trimmed: a disk that does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [HEAD, WORKER])
def test_head_and_worker_begin_with_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):  # noqa: N818 - no error
        pass

    def begin() -> None:
        raise Begun

    monkeypatch.setattr(cache, "start_trimming", begin)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    environment = {node.TOKEN: "0" * 20, ENV_HEAD_ADDRESS: "127.0.0.1", ENV_NUM_CPUS: "1"}
    own = node.NodeConfig.from_environment(kind, environment)
    with pytest.raises(Begun):
        node.Node(own).run()
