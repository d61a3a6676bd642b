"""Pictures in S3: prepared there, verified there, and read from there with the same batches as from
a disk, before and after their shards are on this node."""

import time
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from contract import exits
from contract.errors import InputError
from tests.training import sample_pictures
from training.data.pictures import __main__ as pictures
from training.data.pictures import library, shard_cache
from training.data.pictures.destination import Destination
from training.data.pictures.index import INDEX_FILE, SHARDS
from training.data.pictures.library import PictureSet
from training.data.pictures.prepare import Wish, prepare
from training.data.pictures.reader import Reader
from training.data.pictures.verify import verify

pytestmark = pytest.mark.slow


def read(found: PictureSet) -> list[torch.Tensor]:
    device = torch.device("cpu")
    with Reader(found, found.train, size=448, batch=16, device=device, decoders=2) as reader:
        plan = torch.arange(len(found.train)).split(16)
        batches = [(batch.pictures.clone(), batch.labels) for batch in reader.batches(plan)]
        assert reader.damaged == ()
    return [torch.cat(each) for each in zip(*batches, strict=True)]


def test_a_set_in_s3_gives_the_batches_of_a_disk_and_is_fetched_once(
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del s3_endpoint  # the environment points at it
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "cache"))
    client: Any = boto3.client("s3")
    client.create_bucket(Bucket="pictures")
    source = sample_pictures.write_tree(tmp_path / "source", num_train=50, num_val=10)
    here, there = str(tmp_path / "set"), "s3://pictures/datasets/small"
    wish = Wish(form=SHARDS)
    indexes = [
        prepare(source, Destination(uri=uri), wish, processes=1, shard_bytes=200_000)
        for uri in (here, there)
    ]
    assert indexes[0] == indexes[1]
    assert verify(Destination(uri=there)).wrong == ()
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="pictures")["Contents"]]
    assert not [key for key in keys if ".prepare" in key]

    expected = read(library.open_set(here))
    found = library.open_set(there)
    paths = shard_cache.cached_paths(found)
    with monkeypatch.context() as patch:
        # Nothing is on the disk, and nothing comes: each picture is asked for.
        patch.setattr(shard_cache, "_missing", lambda _found: [])
        assert all(map(torch.equal, read(found), expected))
    assert not any(path.exists() for path in paths.values())
    with Reader(found, found.train, size=64, batch=2, device=torch.device("cpu"), decoders=1):
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in paths.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert all(path.exists() for path in paths.values())

    # The same as a job: the source is fetched from the bucket first.
    for path in source.rglob("*.*"):
        client.upload_file(str(path), "pictures", f"raw/{path.relative_to(source).as_posix()}")
    job = ["prepare", "s3://pictures/raw", "--to", str(tmp_path / "job"), "--form", SHARDS]
    assert pictures.main(job) == exits.OK
    assert library.open_set(str(tmp_path / "job")).fingerprint == found.fingerprint
    assert pictures.main(["verify", there]) == exits.OK

    shard = next(name for name in paths if name.startswith("train"))
    client.delete_object(Bucket="pictures", Key=f"datasets/small/{shard}")
    assert all(map(torch.equal, read(found), expected)), "it is read from this node's disk"
    assert [each for each in verify(Destination(uri=there)).wrong if shard in each]
    client.delete_object(Bucket="pictures", Key=f"datasets/small/{INDEX_FILE}")
    with pytest.raises(InputError, match="no prepared set"):
        verify(Destination(uri=there))

    nowhere = "s3://no-such-pictures/set"
    for words in (["verify", nowhere], ["prepare", str(source), "--to", nowhere]):
        assert pictures.main(words) == exits.BAD_INPUT
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: {nowhere}/{INDEX_FILE} cannot be read: ")
        assert "(NoSuchBucket)" in said

    def remove(what: str, _done: int, _total: int) -> None:
        if what == "packing":
            client.delete_bucket(Bucket="short-lived")

    client.create_bucket(Bucket="short-lived")
    with pytest.raises(InputError, match=r"broke off: .*NoSuchBucket.*Give the command again"):
        prepare(source, Destination(uri="s3://short-lived/x"), Wish(), processes=1, report=remove)
