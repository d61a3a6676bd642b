"""Data sets are fetched by name from a mirror on loopback: whole, verified, and from where a
download broke off."""

import errno
import gzip
import hashlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import HfHubHTTPError

from contract.errors import AdvisedError, InputError, UnreachableError
from contract.nodes import ENV_JOB
from tests.training.mirror import Mirror, served
from training.data import catalog, documents, download, hub, small_images
from training.data.catalog import DataSet

pytestmark = pytest.mark.usefixtures("cache")

PLAIN: Final = bytes(range(256)) * 4000
PACKED: Final = b"a label\n" * 1000


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Mirror]]:
    packed = gzip.compress(PACKED, compresslevel=1)
    with served({"/set/plain.bin": PLAIN, "/set/packed.gz": packed}) as (address, handler):
        monkeypatch.setenv(catalog.MIRROR_VARIABLE, f"{address}/")
        yield handler


DATA: Final = DataSet(
    name="set",
    kind=catalog.TEXT,
    about="a set",
    license="none",
    address="https://nowhere.invalid/set",
    files={
        "plain.bin": hashlib.sha256(PLAIN).hexdigest(),
        "packed.gz": hashlib.sha256(PACKED).hexdigest(),
    },
    num_bytes=len(PLAIN) + 1000,
)


def test_files_are_fetched_once_and_progress_is_reported(
    mirror: type[Mirror], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    paths = download.fetch(DATA, tmp_path / "d", report=lambda *each: seen.append(each))
    assert paths[0].read_bytes() == PLAIN
    assert gzip.decompress(paths[1].read_bytes()) == PACKED
    assert {*(tmp_path / "d").iterdir()} == {*paths}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done <= total == DATA.num_bytes for done, total in seen)
    assert download.fetch(DATA, tmp_path / "d") == paths
    assert len(mirror.asked) == 2


@pytest.mark.parametrize("has_ranges", [True, False], ids=["of the rest", "of all of it"])
def test_what_a_killed_download_left_is_not_taken_for_complete(
    has_ranges: bool, mirror: type[Mirror], tmp_path: Path
) -> None:
    mirror.has_ranges = has_ranges
    (tmp_path / ".plain.bin.part").write_bytes(PLAIN[:777])
    (path, _) = download.fetch(DATA, tmp_path)
    assert path.read_bytes() == PLAIN
    assert mirror.asked[0] == ("/set/plain.bin", "bytes=777-")
    # Complete, but the process ended before its content was verified.
    path.rename(tmp_path / ".plain.bin.part")
    (path, _) = download.fetch(DATA, tmp_path)
    assert path.read_bytes() == PLAIN


def answered(status: int) -> Exception:
    """What the Hub's client raises of an answer."""
    error: Any = HfHubHTTPError.__new__(HfHubHTTPError)
    error.args, error.response = (f"status {status}",), SimpleNamespace(status_code=status)
    return cast(Exception, error)


def test_a_busy_mirror_is_asked_again_with_a_line_and_in_the_end_no_longer(
    mirror: type[Mirror], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.answers = [503, 429]
    mirror.break_off_after = [1000, 5000]
    paused: list[float] = []
    (path, _) = download.fetch(DATA, tmp_path / "a", sleep=paused.append)
    assert path.read_bytes() == PLAIN
    ranges = [wanted for name, wanted in mirror.asked if name == "/set/plain.bin"]
    assert ranges == ["", "", "", "bytes=1000-", "bytes=6000-"], "from where it broke off"
    assert paused == [0.5, 2.0, 0.5, 0.5], "a try that brings something is not counted"
    busy, _, broken, _ = capsys.readouterr().err.splitlines()
    assert "503" in busy
    assert "1,000 of 1,024,000" in broken
    mirror.answers = [503] * 4
    with pytest.raises(AdvisedError, match=r"plain\.bin could not be fetched: .* 503"):
        download.fetch(DATA, tmp_path / "b", sleep=paused.append)
    assert mirror.answers == []
    mirror.answers = [404]
    with pytest.raises(InputError, match=r"/set/plain\.bin could not be fetched: .* 404"):
        download.fetch(DATA, tmp_path / "b", sleep=lambda _: pytest.fail("asked again"))


@pytest.mark.parametrize(
    "fault",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
    ],
    ids=["names", "refused", "network", "host"],
)
def test_without_a_network_a_person_is_told_at_once_and_a_job_tries_again(
    fault: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=fault))
    paused: list[float] = []
    sentence = (
        rf"^cannot reach nowhere\.invalid \(.*{fault.strerror}\): no network\? "
        r"Try again later, .* or put the 2 files of set into a folder and give --data FOLDER"
    )
    with pytest.raises(AdvisedError, match=sentence):
        download.fetch(DATA, tmp_path, sleep=paused.append)
    assert paused == []
    monkeypatch.setenv(ENV_JOB, "ddp-20260101-000000")
    with pytest.raises(AdvisedError, match=sentence):
        download.fetch(DATA, tmp_path, sleep=paused.append)
    assert paused == [0.5, 2.0, 8.0]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("/set/plain.bin", PLAIN[:-1] + b"x", "has another content"),
        ("/set/packed.gz", gzip.compress(PACKED)[:-30], "is damaged"),
        ("/set/packed.gz", gzip.compress(PACKED + b"more"), "has another content"),
    ],
    # Named, because a packed file holds the second in which it was packed, and all
    # processes of a test run must find tests of the same names.
    ids=["plain", "cut", "longer"],
)
def test_another_content_is_refused_and_not_kept(
    mirror: type[Mirror], tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    good = mirror.files[name]
    mirror.files = {**mirror.files, name: content}
    with pytest.raises(InputError, match=f"{sentence}.*of set, whose decompressed content has"):
        download.fetch(DATA, tmp_path)
    assert not (tmp_path / Path(name).name).exists()
    mirror.files = {**mirror.files, name: good}
    assert len(download.fetch(DATA, tmp_path)) == 2


def test_a_mirror_that_is_no_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(catalog.MIRROR_VARIABLE, "/mnt/mirror")
    with pytest.raises(InputError, match=r"TRAINING_DATA_MIRROR is '/mnt/mirror': .* https://"):
        download.fetch(DATA, tmp_path)


# --- real content ---------------------------------------------------------------------------------
def test_data_sets_by_name_are_the_real_ones(mirror: type[Mirror], data_dir: Path) -> None:
    names = [f"fashion-mnist/{name}" for name in catalog.IDX_FILES]
    text = "tiny-shakespeare/input.txt"
    mirror.files = {f"/{name}": (data_dir / name).read_bytes() for name in (*names, text)}
    found = small_images.load("fashion-mnist")
    assert (len(found.train_images), len(found.test_images)) == (60_000, 10_000)
    assert found.class_names[9] == "Ankle boot"
    assert small_images.load(str(data_dir / "fashion-mnist")).fingerprint == found.fingerprint
    (file,) = documents.text_files("tiny-shakespeare")
    assert file.read_bytes() == mirror.files[f"/{text}"]
    assert len(mirror.asked) == 5


# --- names ---------------------------------------------------------------------------------------
BUSY, LOST = answered(503), ConnectionError("refused")


@pytest.mark.parametrize(
    ("answers", "is_job", "paused"),
    [
        ([BUSY, answered(429), "here"], False, [0.5, 2.0]),
        ([BUSY] * 4, False, [0.5, 2.0, 8.0]),
        ([LOST, "here"], True, [0.5]),
        ([LOST], False, []),
    ],
)
def test_the_hub_is_asked_again_while_it_is_busy_and_by_a_job_while_it_is_lost(
    answers: list[Any], is_job: bool, paused: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Mock(side_effect=answers)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setenv(ENV_JOB, "a-job") if is_job else monkeypatch.delenv(ENV_JOB, raising=False)
    slept: list[float] = []
    fetch = partial(hub.fetch, "owner/name", ("*",), sleep=slept.append)
    if answers[-1] == "here":
        assert fetch() == Path("here")
    else:
        with pytest.raises(UnreachableError, match="owner/name"):
            fetch()
    assert slept == paused
    assert snapshot.call_count == len(answers)
