"""Proves what each call to S3 does, and that none of them hides an error."""

from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from store.bucket import Bucket
from tests.aws.calls import refused
from tests.aws.s3 import S3


@pytest.fixture
def bucket() -> Bucket:
    return Bucket("s3://bucket/team/", S3())


def test_objects_are_named_below_the_prefix(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    assert bucket.create("a/1", b"one")
    assert not bucket.create("a/1", b"two"), "it is there"
    for number in range(2, 9):  # more than a page
        bucket.put(f"a/{number}", b"")
    address = bucket.upload(tmp_path / "file", "b/c/4", sha256="hash")
    assert address == "s3://bucket/team/b/c/4"
    bucket.download("b/c/4", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == b"four"
    assert (bucket.sha256("b/c/4"), bucket.sha256("a/1")) == ("hash", "")
    assert (bucket.get("a/1"), bucket.get("1")) == (b"one", None)
    assert bucket.keys("a/") == [f"a/{number}" for number in range(1, 9)]
    found, folders = bucket.listed("")
    assert (found, folders) == ([], ["a", "b"])
    bucket.delete([*bucket.keys("a/"), "none"])
    assert [(each.key, each.size) for each in bucket.stored("")] == [("b/c/4", 4)]


@pytest.mark.parametrize(
    "error", [refused("NoSuchBucket"), EndpointConnectionError(endpoint_url="")]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda bucket, _: bucket.get("a"),
        lambda bucket, _: bucket.put("a", b""),
        lambda bucket, _: bucket.create("a", b""),
        lambda bucket, _: bucket.keys("a"),
        lambda bucket, _: bucket.delete(["a"]),
        lambda bucket, file: bucket.upload(file, "a"),
        lambda bucket, file: bucket.download("a", file),
        lambda bucket, _: bucket.sha256("a"),
    ],
)
def test_a_bucket_in_trouble_is_an_error(
    call: Callable[[Bucket, Path], object], error: Exception, bucket: Bucket, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    bucket.client.is_down, bucket.client.trouble = True, error
    with pytest.raises(type(error)):
        call(bucket, tmp_path / "file")


def test_an_object_that_may_not_be_removed_is_an_error(bucket: Bucket) -> None:
    bucket.put("a", b"")
    bucket.client.kept = {"team/a"}
    with pytest.raises(ClientError, match="AccessDenied"):
        bucket.delete(["a"])
