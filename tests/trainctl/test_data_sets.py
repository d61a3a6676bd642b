"""``trainctl data``: an upload is complete or no data set, and jobs find it by its name."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from contract import exits
from store.cache import CACHE_VARIABLE
from tests.aws.calls import refused
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.__main__ import main
from trainctl.aws.deployment_bucket import DeploymentBucket
from trainctl.jobs import data_sets
from training.data import catalog, download
from training.data.catalog import DataSet

SUBMIT = ["submit", "ddp", "--yes"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of two files, one in a folder of its own, and what is none of it."""
    found = tmp_path / "cats"
    (found / "more").mkdir(parents=True)
    (found / "one.txt").write_text("one")
    (found / "more" / "two.txt").write_text("two two")
    (found / ".DS_Store").write_text("")
    return found


def put(*words: str) -> int:
    return main(["data", "put", *words])


def command_of(account: Account) -> tuple[str, ...]:
    return account.orders[-1].command


def test_a_folder_is_uploaded_and_its_list_comes_last(
    account: Account, folder: Path, cli: Cli
) -> None:
    (folder / "three.txt").symlink_to(folder / "one.txt")
    cli("data put", str(folder))
    assert {*account.objects} == {
        "data/cats.json",
        *(f"data/cats/{name}" for name in ("one.txt", "three.txt", "more/two.txt")),
    }
    assert account.objects["data/cats/three.txt"] == b"one"
    assert account.sent("put_object")[-1]["Key"] == "data/cats.json"
    assert account.changes[-1] == "put_object"
    (stored,) = cli.json("data ls")["stored"]
    assert (stored["name"], stored["size"]) == ("cats", 13)
    assert stored["files"]["one.txt"] == {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}


def test_an_upload_that_was_interrupted_is_no_data_set_and_continues(
    account: Account, folder: Path, cli: Cli
) -> None:
    real = account.s3.upload_file

    def breaks(file: str, *rest: Any, **named: Any) -> None:
        if file.endswith("one.txt"):
            raise refused("SlowDown", "PutObject")
        real(file, *rest, **named)

    vars(account)["on_upload_file"] = breaks
    assert put(str(folder)) == exits.STORAGE
    assert {*account.objects} == {"data/cats/more/two.txt"}
    assert cli.json("data ls")["incomplete"] == ["cats"]
    cli.refuses("submit ddp --yes --data cats")

    del vars(account)["on_upload_file"]
    account.calls.clear()
    cli("data put", str(folder))
    assert account.changes.count("upload_file") == 1  # the other one is there
    assert cli.json("data ls")["incomplete"] == []


def test_a_data_set_is_replaced_as_a_whole(account: Account, folder: Path) -> None:
    put(str(folder), "--as", "pets")
    (folder / "more" / "two.txt").write_text("two TWO")
    (folder / "one.txt").unlink()
    account.calls.clear()
    assert put(str(folder), "--as", "pets", "--yes") == exits.OK
    assert account.changes == ["delete_objects", "upload_file", "delete_objects", "put_object"]
    assert account.sent("delete_objects")[0]["Delete"]["Objects"] == [{"Key": "data/pets.json"}]
    assert {*account.objects} == {"data/pets/more/two.txt", "data/pets.json"}
    assert account.objects["data/pets/more/two.txt"] == b"two TWO"
    account.calls.clear()
    assert put(str(folder), "--as", "pets") == exits.OK
    assert account.changes == []  # it is there already


def test_another_data_set_of_the_name_is_not_replaced_without_a_word(
    account: Account, folder: Path, cli: Cli
) -> None:
    # Of another upload, which is not complete.
    account.objects["data/cats/theirs.txt"] = b"theirs"
    account.objects["data/cats/one.txt"] = b"oneone"
    for _ in range(2):
        there = {**account.objects}
        cli.refuses("data put", str(folder))
        assert account.objects == there
        cli("data put", str(folder), "--yes")
        assert "data/cats/theirs.txt" not in account.objects
        assert account.objects["data/cats/one.txt"] == (folder / "one.txt").read_bytes()
        (folder / "one.txt").write_text("ONE")
        # As an earlier version has written it.
        stored = json.loads(account.objects["data/cats.json"])
        account.objects["data/cats.json"] = json.dumps(stored | {"by": ""}).encode()


def test_a_published_data_set_is_fetched_verified_and_uploaded(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    content = gzip.compress(b"pixels")
    data = DataSet(
        name="small",
        kind=catalog.IMAGES,
        about="a set",
        license="none",
        address="https://nowhere.invalid/small",
        files={"train.gz": hashlib.sha256(b"pixels").hexdigest()},
        num_bytes=len(content),
    )
    monkeypatch.setattr(catalog, "_BY_NAME", {"small": data})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(
        download, "_receive", lambda _url, part, _before, _tell: part.write_bytes(content)
    )
    assert put("small") == exits.OK
    assert account.objects["data/small/train.gz"] == content
    cli("submit ddp --yes --data small")
    assert "s3://bucket/data/small/" in command_of(account)


@pytest.mark.parametrize("target", ["cats", "none"])
def test_a_link_to_a_folder_or_to_nothing_is_refused(
    account: Account, folder: Path, tmp_path: Path, cli: Cli, target: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "sub").symlink_to(folder.parent / target)
    (tmp_path / "set" / "a").write_text("a")
    assert "set/sub" in cli.refuses("data put", str(tmp_path / "set"))
    assert account.changes == []


CHAT = '{"messages": [{"role": "user", "content": "Why?"}]}\n'
NO_CONTENT = '{"messages": [{"role": "assistant", "content": null}]}\n'
PICTURES = ("a/1.jpg", "a/2.jpg", "b/1.JPG", "b/2.png")
FSDP = "fsdp --preset tiny"


@pytest.mark.parametrize(
    ("files", "kind", "words", "is_read"),
    [
        ({"a.jsonl": CHAT}, "conversations", FSDP, True),
        ({"a.jsonl": CHAT}, "conversations", "ddp", False),
        ({"a.jsonl": CHAT}, "conversations", "imagenet", False),
        ({"a.jsonl": CHAT + NO_CONTENT}, "text", FSDP, False),
        ({"a.jsonl": CHAT + NO_CONTENT}, "text", f"{FSDP} --skip-bad-rows", True),
        ({"a.csv": "q,a\nWhy?,So.\n"}, "text", FSDP, False),
        ({"a.csv": "q,a\nWhy?,So.\n"}, "text", f"{FSDP} --columns prompt=q,answer=a", True),
        ({"a.csv": "q,a\nWhy?,So.\n"}, "text", f"{FSDP} --columns prompt=q,answer=b", False),
        ({"a.jsonl": CHAT, "b.txt": "some text"}, "conversations", FSDP, True),
        ({"a.jsonl": CHAT, "b.jsonl": '{"text": "x"}\n'}, "text", FSDP, False),
        ({"train.parquet": "PAR1"}, "text", FSDP, True),
        ({"train.parquet": "PAR1"}, "text", "ddp", False),
        ({"a.zip": "PK"}, "", FSDP, False),
        (dict.fromkeys(PICTURES, "x"), "pictures", "imagenet", True),
        (dict.fromkeys(PICTURES, "x"), "pictures", FSDP, False),
    ],
)
def test_what_a_recipe_cannot_read_is_refused_before_a_host_is_asked_for(
    account: Account,
    tmp_path: Path,
    cli: Cli,
    files: dict[str, str],
    kind: str,
    words: str,
    is_read: bool,
) -> None:
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    put(str(tmp_path / "mine"))
    assert json.loads(account.objects["data/mine.json"])["contents"]["kind"] == kind
    for command in ("plan", "submit --yes"):
        code = exits.OK if is_read else exits.BAD_INPUT
        cli(*command.split(), *words.split(), "--data", "mine", code=code)


def test_a_job_prefers_the_copy_in_the_bucket_to_a_download(
    account: Account, folder: Path, cli: Cli
) -> None:
    cli("submit ddp --yes --run a --data fashion-mnist")
    assert command_of(account)[-2:] == ("--data", "fashion-mnist")
    for name in catalog.IDX_FILES:
        (folder / name).write_text("x")
    put(str(folder), "--as", "fashion-mnist")
    cli("submit ddp --yes --run b --data=fashion-mnist")
    assert command_of(account)[-1] == "--data=s3://bucket/data/fashion-mnist/"


@pytest.mark.slow
def test_in_s3_a_data_set_is_found_replaced_and_read_by_a_node(
    s3_endpoint: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3_endpoint  # the environment points at it
    import boto3

    from store import storage
    from training import recipes
    from training.data import documents

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    storage.filesystem("s3://").mkdir("s3://data-sets")
    bucket = DeploymentBucket("s3://data-sets", boto3.client("s3", region_name="us-east-1"))
    seen: list[tuple[int, int]] = []
    asked: list[str] = []

    def put_now(files: dict[str, Path]) -> None:
        seen.clear()
        report = lambda *each: seen.append(each)  # noqa: E731
        data_sets.put(bucket, "cats", files, by="", report=report, ask=asked.append)

    put_now(data_sets.files_of(folder))
    assert seen[-1] == (10, 10)
    assert data_sets.find(bucket, "cats") is not None
    texts = documents.text_files("s3://data-sets/data/cats")
    assert sorted(path.read_text() for path in texts) == ["one", "two two"]
    # The node's cache outlives the job: what was put again is fetched again, and nothing else.
    kept = {path: path.stat().st_mtime_ns for path in texts}
    (folder / "one.txt").write_text("ONE")
    put_now(data_sets.files_of(folder))
    texts = documents.text_files("s3://data-sets/data/cats")
    assert sorted(path.read_text() for path in texts) == ["ONE", "two two"]
    assert [path.name for path in texts if path.stat().st_mtime_ns == kept[path]] == ["two.txt"]
    (folder / "one.txt").write_text("one")
    # A set that is called like a file is a folder all the same.
    file = folder / "one.txt"
    found = data_sets.files_of(file)
    data_sets.put(bucket, "one.txt", found, by="", report=lambda *_: None, ask=asked.append)
    assert len(asked) == 1
    words = ["--validation=one.txt", "--data", "one.txt"]
    (other, _, address) = data_sets.resolve(words, recipes.by_name("fsdp"), bucket)
    assert other == f"--validation={address}"
    (text,) = documents.text_files(address)
    assert text.read_text() == "one"


def test_a_folder_that_cannot_be_read_is_not_left_out_of_a_set(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "set" / "part").mkdir(parents=True)
    (tmp_path / "set" / "a").touch()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read everything
    assert "set/part" in cli.refuses("data put", str(tmp_path / "set"))
    assert account.changes == []
