"""Pictures in S3: prepared there, verified there, and fetched from there for the same batches as
from a disk."""

from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from contract import exits
from contract.errors import InputError
from tests.training import sample_pictures
from training.data.pictures import __main__ as pictures
from training.data.pictures import library, mirror
from training.data.pictures.batches import PictureReader
from training.data.pictures.destination import Destination
from training.data.pictures.index import INDEX_FILE, SHARDS
from training.data.pictures.library import PictureSet
from training.data.pictures.prepare import Wish, prepare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache")]


def read(found: PictureSet) -> list[torch.Tensor]:
    device = torch.device("cpu")
    with PictureReader(found, found.train, size=448, batch=16, device=device, decoders=2) as reader:
        plan = torch.arange(len(found.train)).split(16)
        batches = [(batch.pictures.clone(), batch.labels) for batch in reader.batches(plan)]
        assert not reader.damaged
    return [torch.cat(each) for each in zip(*batches, strict=True)]


def test_a_set_in_s3_gives_the_batches_of_a_disk_and_is_fetched_once(
    s3_endpoint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del s3_endpoint  # the environment points at it
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
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="pictures")["Contents"]]
    assert not [key for key in keys if ".prepare" in key]

    expected = read(library.open_set(here))
    found = library.open_set(there)
    shards = [name for name in found.index.files if name.endswith(".tar")]
    shard = next(name for name in shards if name.startswith("train"))
    content = client.get_object(Bucket="pictures", Key=f"datasets/small/{shard}")["Body"].read()
    damaged = bytes([content[0] ^ 1]) + content[1:]
    client.put_object(Bucket="pictures", Key=f"datasets/small/{shard}", Body=damaged)
    with pytest.raises(InputError, match=rf"{shard} is not what was prepared: prepare"):
        mirror.on_disk(found)
    client.put_object(Bucket="pictures", Key=f"datasets/small/{shard}", Body=content)
    local = mirror.on_disk(found)
    assert all(map(torch.equal, read(local), expected))

    # The same as a job: the source is fetched from the bucket first.
    for path in source.rglob("*.*"):
        client.upload_file(str(path), "pictures", f"raw/{path.relative_to(source).as_posix()}")
    job = ["s3://pictures/raw", "--to", str(tmp_path / "job"), "--form", SHARDS]
    assert pictures.main(job) == exits.OK
    assert library.open_set(str(tmp_path / "job")).fingerprint == found.fingerprint

    client.delete_object(Bucket="pictures", Key=f"datasets/small/{shard}")
    assert mirror.on_disk(found) == local, "nothing is fetched again"
    assert sorted(path.name for path in Path(local.root).glob("*.tar")) == sorted(shards)
    nowhere = "s3://no-such-pictures/set"
    assert pictures.main([str(source), "--to", nowhere]) == exits.BAD_INPUT
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {nowhere}/{INDEX_FILE} cannot be read: ")
    assert "(NoSuchBucket)" in said
