"""Proves that what is written appears whole, on disk and in S3, and that bad places are refused."""

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from s3fs import S3FileSystem

from contract import faults
from contract.errors import InputError
from contract.nodes import ENV_S3_TIMEOUT
from store import storage
from tests.training.bucket import install


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("s3://bucket", "s3://bucket/runs"),
        ("s3://bucket/", "s3://bucket/runs"),
        ("s3://bucket/team/a/", "s3://bucket/team/a"),
        ("/abs/folder", "/abs/folder"),
    ],
)
def test_the_root_of_the_runs_is_absolute(given: str, root: str) -> None:
    assert storage.runs_root(given) == root


def test_a_relative_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage.runs_root("runs") == str(tmp_path / "runs")


@pytest.mark.parametrize("given", ["", "s3://", "s3:///x", "gs://bucket/x", "http://host/x"])
def test_an_unusable_address_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="storage"):
        storage.runs_root(given)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written \(Not a directory\)"):
        storage.check_writable(str(tmp_path / "file" / "runs"))


def test_what_is_uploaded_is_counted_file_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    names: list[str] = []

    async def call(_self: S3FileSystem, method: str, **given: Any) -> dict[str, Any]:
        assert method == "put_object"
        names.append(given["Key"].rpartition("/")[2])
        counted.append(storage.Written.total - begun)
        return {}

    monkeypatch.setattr(S3FileSystem, "_call_s3", call)
    begun = storage.Written.total
    with storage.staged_folder("s3://b/runs/r/model", last="first") as staged:
        for name in ("a", "first", "z"):
            (staged / name).write_bytes(b"12345")
    assert (names, counted) == (["a", "z", "first"], [0, 5, 10])
    assert storage.Written.total == begun + 15


def exercise(root: str) -> None:
    """Everything that a run does to its storage, in one go."""
    storage.check_writable(root)
    assert storage.list_folders(root) == []
    assert storage.read_bytes(f"{root}/a/none") is None
    storage.write_bytes(f"{root}/a/file", b"1")
    storage.write_bytes(f"{root}/a/file", b"22")
    assert storage.read_bytes(f"{root}/a/file") == b"22"
    assert storage.exists(f"{root}/a/file")

    with storage.staged_folder(f"{root}/a/whole", last="last") as staged:
        (staged / "sub").mkdir()
        (staged / "sub" / "x").write_bytes(b"x")
        (staged / "last").write_bytes(b"l")
    assert not staged.exists()
    assert storage.list_folders(f"{root}/a") == ["whole"]
    with storage.staged_folder(f"{root}/a/whole") as staged:
        (staged / "new").write_bytes(b"n")
        (staged / "last").write_bytes(b"L")
    assert storage.read_bytes(f"{root}/a/whole/sub/x") == b"x", "only what is new is replaced"
    assert storage.read_bytes(f"{root}/a/whole/new") == b"n"
    assert storage.read_bytes(f"{root}/a/whole/last") == b"L"
    assert not staged.exists()
    with pytest.raises(FileNotFoundError), storage.staged_folder(f"{root}/a/whole") as staged:
        (staged / "no folder" / "last").write_bytes(b"torn")
    assert storage.read_bytes(f"{root}/a/whole/last") == b"L"
    assert not staged.exists()

    storage.rename_folder(f"{root}/a/whole", f"{root}/a/moved")
    assert storage.list_folders(f"{root}/a") == ["moved"]
    storage.write_bytes(f"{root}/a/again/b", b"B")
    storage.rename_folder(f"{root}/a/again", f"{root}/a/moved")
    assert storage.list_folders(f"{root}/a") == ["moved", "moved-2"], "what was set aside stays"
    storage.remove_file(f"{root}/a/file")
    storage.remove_file(f"{root}/a/file")
    storage.remove_folder(f"{root}/a")
    storage.remove_folder(f"{root}/a")
    assert not storage.exists(f"{root}/a/moved/new")


def test_a_folder_holds_runs(tmp_path: Path) -> None:
    exercise(str(tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a\0b", "link/out"])
def test_a_key_made_to_escape_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch).objects = {f"f/{name}": b""}
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="is refused"):
        storage.fetch_folder("s3://bucket/f", inside)
    assert [path.name for path in tmp_path.rglob("*")] == ["inside", "link"]


def test_a_folder_of_a_bucket_is_fetched_without_the_marks_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("f/sub/", "f/sub/x", "f/f/y")
    install(monkeypatch).objects = dict.fromkeys(keys, b"")
    storage.fetch_folder("s3://bucket/f/", tmp_path)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert found == {"sub", "sub/x", "f", "f/y"}


#: Calls with an address only.
PLAIN: Final = (
    *("age_s", "check_writable", "exists", "find", "list_files", "list_folders", "read_bytes"),
    *("remove_file", "remove_folder", "remove_run", "sha256"),
)
#: Every call to S3, for an address and a folder with a file ``a``.
CALLS: Final[Mapping[str, Callable[[str, Path], object]]] = {
    **{name: partial(lambda name, uri, _: getattr(storage, name)(uri), name) for name in PLAIN},
    "create_bytes": lambda uri, _: storage.create_bytes(uri, b""),
    "download": lambda uri, folder: storage.download(uri, folder / "b"),
    "fetch": lambda uri, folder: storage.fetch(uri, folder / "b"),
    "fetch_folder": lambda uri, folder: storage.fetch_folder(uri, folder),
    "rename_folder": lambda uri, _: storage.rename_folder(uri, f"{uri}-b"),
    "upload": lambda uri, folder: storage.upload(folder / "a", uri),
    "upload_folder": lambda uri, folder: storage.upload_folder(folder, uri),
    "write_bytes": lambda uri, _: storage.write_bytes(uri, b""),
    "write_bytes, checked": lambda uri, _: storage.write_bytes(uri, b"", check=lambda: None),
}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EBUSY, "Please reduce your rate"), ReadTimeoutError(endpoint_url="https://s3")],
)
@pytest.mark.parametrize("call", CALLS)
def test_an_s3_in_trouble_is_an_error_of_every_call_and_passes(
    call: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = install(monkeypatch)
    bucket.objects["a/b"] = b""
    bucket.is_down, bucket.trouble = True, error
    (tmp_path / "a").touch()
    with pytest.raises(Exception, match=r"Please reduce|Read timeout") as raised:
        CALLS[call]("s3://bucket/a", tmp_path)
    assert faults.is_passing(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
def test_a_bucket_holds_runs_and_a_folder_of_it_is_fetched_whole(
    s3_endpoint: str, tmp_path: Path
) -> None:
    del s3_endpoint  # the environment points at it
    fs = storage.filesystem("s3://")
    fs.mkdir("s3://storage-test")
    exercise("s3://storage-test/runs")
    storage.write_bytes("s3://storage-test/f/sub/x", b"x")
    storage.write_bytes("s3://storage-test/f/y", b"y")
    local = storage.fetch_folder("s3://storage-test/f", tmp_path)
    assert (local / "sub" / "x").read_bytes() == b"x"
    assert (local / "y").read_bytes() == b"y"


def test_an_s3_that_says_nothing_is_given_up_and_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        variables |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        variables |= {ENV_S3_TIMEOUT: "0.2", "AWS_MAX_ATTEMPTS": "1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        with pytest.raises(Exception, match="timeout") as raised:
            storage.read_bytes("s3://bucket/key")
    assert faults.is_passing(raised.value)
    assert time.monotonic() - began < 30, "botocore waits for 60 s"


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_refused_with_the_remedy(s3_endpoint: str) -> None:
    del s3_endpoint
    with pytest.raises(InputError, match="check the name, the region"):
        storage.check_writable("s3://there-is-no-such-bucket/runs")


def test_an_s3_that_does_not_answer_is_named_once_of_each_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(storage, "say", said.append)
    monkeypatch.setattr(storage, "_reported", set())
    emitter = storage.filesystem("s3://b/x").session.get_component("event_emitter")
    refused = EndpointConnectionError(endpoint_url="https://s3")
    silent = ReadTimeoutError(endpoint_url="https://s3")
    for attempts, error in ((1, None), (1, refused), (3, refused), (4, refused), (1, silent)):
        failed = {"attempts": attempts, "caught_exception": error, "response": None}
        asyncio.run(emitter.emit("needs-retry.s3.GetObject", **failed))
    assert len(said) == 2


def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "bytes_free", lambda _: 1000)
    with storage.room(str(tmp_path), 500, num=2):
        pass
    sentence = r"checkpoints need 1.5 kB, 1.0 kB are free"
    with pytest.raises(storage.FullError, match=sentence), storage.room(str(tmp_path), 500, num=3):
        pytest.fail("it has begun")
