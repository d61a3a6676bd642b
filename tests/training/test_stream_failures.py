"""Proves that a store that does not answer fails only an attempt; text or shards that are damaged
end the run."""

import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import ProfileNotFound, ReadTimeoutError

from contract import exits
from contract.errors import InputError
from tests.training.test_streams import built, config, corpus, opened
from training import launch, recipes, storage
from training.data import documents, sources
from training.data.documents import RemoteFile
from training.runtime import torchrun
from training.storage import UnreachableError


class Refusing:
    """A file system whose files end in a refusal of S3."""

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        file = io.BytesIO(Path(path).read_bytes())
        half = len(file.getvalue()) // 2

        def readinto(buffer: Any) -> int:
            if file.tell() + len(buffer) > half:
                self.cat_file(path)
            return io.BytesIO.readinto(file, buffer)

        file.readinto = readinto  # type: ignore[method-assign]
        return file

    def cat_file(self, path: str, **_: Any) -> bytes:
        raise OSError(errno.EBUSY, f"Please reduce your request rate: {path}")


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "c.txt.gz"])
def test_that_s3_refuses_is_no_mistake_of_the_user_and_a_damaged_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = corpus(tmp_path / "text") / name
    file = RemoteFile(address=str(path), size=path.stat().st_size, etag="")
    assert len([*documents.documents([file], "text", None)]) == 30
    with monkeypatch.context() as patch:
        patch.setattr(storage, "filesystem", lambda _: Refusing())
        with pytest.raises(UnreachableError, match=rf"{name} cannot be read: .*reduce your"):
            [*documents.documents([file], "text", None)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=name):
        [*documents.documents([file], "text", None)]


def test_blocks_that_s3_refuses_are_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "cache"))
    built(corpus(tmp_path / "text"), tmp_path / "bucket")
    found = opened(tmp_path / "bucket")
    monkeypatch.setattr(storage, "filesystem", lambda _: Refusing())
    with pytest.raises(UnreachableError, match=r"train-00000.bin cannot be read: .*reduce your"):
        found.windows(np.arange(1), 16)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (FileNotFoundError("no such key"), InputError, "may not read it"),
        (PermissionError("Forbidden"), InputError, "cannot be read: Forbidden"),
        (ProfileNotFound(profile="mine"), InputError, "profile .mine. could not be found"),
        (OSError(errno.EINVAL, "the region is wrong"), InputError, "the region is wrong"),
        (ReadTimeoutError(endpoint_url="https://s3"), UnreachableError, "Read timeout"),
        (OSError(errno.EBUSY, "Please reduce your request rate"), UnreachableError, "reduce your"),
    ],
)
def test_a_file_that_s3_refuses_is_no_mistake_of_the_user_and_one_that_is_not_there_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    kind: type[Exception],
    words: str,
) -> None:
    def info(_: str) -> Any:
        raise fault

    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(storage, "filesystem", lambda _: SimpleNamespace(info=info))
    with pytest.raises(kind, match=f"^s3://bucket/data/a.gz .*{words}"):
        sources.local_files("s3://bucket/data", ["a.gz"])


def test_a_disk_that_is_full_is_named_and_not_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(_: str, to: str) -> None:
        Path(to).write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path))
    s3 = SimpleNamespace(info=lambda _: {"ETag": "1"}, get_file=get_file)
    monkeypatch.setattr(storage, "filesystem", lambda _: s3)
    with pytest.raises(InputError, match=r"cache folder .* \(No space left on device\): set TRAIN"):
        sources.local_files("s3://bucket/data", ["a.gz"])
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == [".lock"]


def test_a_command_whose_data_cannot_be_reached_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_: Any, **_options: Any) -> int:
        raise UnreachableError("s3://bucket/data cannot be read: slow down")

    monkeypatch.setattr(launch, "start", start)
    assert launch.main(["ddp", "--local"]) == exits.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: s3://bucket/data cannot be read: slow down; check the address, or try again later\n"
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (InputError("train-00001.bin is damaged"), exits.BAD_INPUT),
        (UnreachableError("train-00001.bin cannot be read"), exits.FAILED),
    ],
)
def test_torchrun_prints_what_stops_any_of_its_processes(
    fault: Exception,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(_worker: Any, _config: Any) -> None:
        raise fault

    recipe = SimpleNamespace(prepare=lambda each: each, variables={}, train=lambda: train)
    monkeypatch.setattr(recipes, "by_name", lambda _: recipe)
    worker = SimpleNamespace(rank=1, close=lambda: None)
    monkeypatch.setattr(torchrun, "TorchrunWorker", lambda **_: worker)
    code = torchrun.run_torchrun(config("s3://streams/text"), lease=None, as_json=False)
    assert code == expected
    assert capsys.readouterr().err == f"error: {fault}\n"


def test_a_text_without_an_end_of_documents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 20)
    path = tmp_path / "a.txt"
    path.write_text("twelve signs\n\ntwelve signs\n")
    assert [*documents.documents([path], "text", None)] == ["twelve signs"] * 2
    for content, what in (("twelve signs\n" * 2, "document"), ("no line feed " * 2, "line")):
        path.write_text(content)
        with pytest.raises(InputError, match=rf"has a {what} of more than .* or give .jsonl"):
            [*documents.documents([path], "text", None)]
