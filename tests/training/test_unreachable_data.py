"""Proves that an S3 that does not answer fails only an attempt, and that its words are printed."""

import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ReadTimeoutError

from contract import exits
from contract.errors import InputError, UnreachableError
from contract.nodes import ENV_JOB, Range
from store import storage
from tests.training.bucket import install
from training import command, launch, recipes
from training.data import documents, sources
from training.ddp.settings import DdpConfig
from training.record.events import Failed
from training.runtime import torchrun

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (FileNotFoundError("no such key"), InputError, "may not read it"),
        (PermissionError("Forbidden"), InputError, "cannot be read: Forbidden"),
        (ReadTimeoutError(endpoint_url="https://s3"), UnreachableError, "Read timeout"),
    ],
)
def test_a_file_that_s3_refuses_is_no_mistake_of_the_user_and_one_that_is_not_there_is(
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    kind: type[Exception],
    words: str,
) -> None:
    def info(_: str) -> Any:
        raise fault

    monkeypatch.setattr(storage, "filesystem", lambda _: SimpleNamespace(info=info))
    with pytest.raises(kind, match=f"^s3://bucket/data/a.gz .*{words}"):
        sources.local_files("s3://bucket/data", ["a.gz"])


@pytest.mark.parametrize("request_", ["pipe_file", "cat_file", "ls"])
def test_a_start_that_s3_does_not_answer_is_tried_again(
    request_: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = SimpleNamespace(run=lambda: exits.OK)
    monkeypatch.setattr("training.runtime.driver.Driver", lambda *_, **__: complete)
    bucket = install(monkeypatch)
    words = ["ddp", "--workers", "2", "--storage", "s3://bucket", "--run", "r"]
    with monkeypatch.context() as patch:
        patch.setattr(bucket, request_, Mock(side_effect=ReadTimeoutError(endpoint_url="s3")))
        assert launch.main(words) == exits.STORAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert launch.main(words) == exits.OK


@pytest.mark.parametrize(
    ("recipe", "preset", "data"),
    [("ddp", "fast", "fashion-mnist"), ("fsdp", "tiny", "tiny-shakespeare")],
)
def test_without_a_way_to_published_data_a_command_ends_before_pytorch_is_loaded(
    recipe: str, preset: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("TRAINING_DATA_MIRROR", address)
        monkeypatch.setattr("urllib.request.getproxies", dict)
        look_at = recipes.by_name(recipe).look_at
        words = [recipe, "--preset", preset, "--data", data]
        config = command.read_command(words, run="r", workers=Range(1, 1))
        look_at(config)
    with pytest.raises(
        UnreachableError, match=r"cannot reach 127.0.0.1 .*: no network\? Try again"
    ):
        look_at(config)
    monkeypatch.setenv(ENV_JOB, "a-job")  # which tries again while it fetches
    look_at(config)


def test_a_disk_that_is_full_is_named_and_not_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(_: str, to: str) -> None:
        Path(to).write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    s3 = SimpleNamespace(info=lambda _: {"ETag": "1"}, get_file=get_file)
    monkeypatch.setattr(storage, "filesystem", lambda _: s3)
    with pytest.raises(InputError, match=r"cache folder .* \(No space left on device\): set TRAIN"):
        sources.local_files("s3://bucket/data", ["a.gz"])
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == [".lock"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (InputError("train.bin is damaged"), exits.BAD_INPUT),
        (UnreachableError("a.jsonl cannot be read"), exits.STORAGE),
    ],
)
def test_torchrun_prints_what_stops_any_of_its_processes_and_records_it(
    fault: Exception,
    expected: int,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe: Any = SimpleNamespace(prepare=lambda each: each, variables={}, measures=())
    recipe.train = lambda: Mock(side_effect=fault)
    monkeypatch.setattr(recipes, "by_name", lambda _: recipe)
    worker = SimpleNamespace(rank=rank, close=lambda: None)
    monkeypatch.setattr(torchrun, "TorchrunWorker", lambda **_: worker)
    kept = Mock(result=None, is_finished=False, error=None)
    monkeypatch.setattr(torchrun, "opened_record", lambda *_, **__: kept)
    config = DdpConfig(recipe="ddp", run="r", storage="s3://bucket/runs", data="")
    given: Any = SimpleNamespace(verbose=False)
    code = torchrun.run_torchrun(config, given, lease=None)
    if rank:
        assert code == expected
        assert capsys.readouterr().err == f"error: {fault}\n"
    else:
        kept.handle.assert_called_once_with(Failed(message=str(fault), code=expected))


def test_a_text_without_an_end_of_documents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 20)
    path = tmp_path / "a.txt"
    path.write_text("twelve signs\n\ntwelve signs\n")
    assert [*documents.documents([path], documents.Rows(), None)] == ["twelve signs"] * 2
    for content, what in (("twelve signs\n" * 2, "document"), ("no line feed " * 2, "line")):
        path.write_text(content)
        with pytest.raises(InputError, match=rf"has a {what} of more than .* or give .jsonl"):
            [*documents.documents([path], documents.Rows(), None)]
