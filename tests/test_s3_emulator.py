"""The three S3 clients of this project reach one server by environment alone, and agree.

boto3 is the command line's, s3fs writes records and checkpoints, pyarrow is Ray Train's. If one of
them ignored AWS_ENDPOINT_URL, or built host names from buckets, the S3 tests would prove nothing.
"""

import boto3
import fsspec
import pyarrow.fs
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(s3_endpoint: str, request: pytest.FixtureRequest) -> str:
    assert s3_endpoint.startswith("http://127.0.0.1:")
    name: str = request.node.name.replace("_", "-")[:63].strip("-")
    boto3.client("s3").create_bucket(Bucket=name)
    return name


def keys(bucket: str) -> list[str]:
    listing = boto3.client("s3").list_objects_v2(Bucket=bucket)
    return [entry["Key"] for entry in listing.get("Contents", [])]


def test_s3fs_writes_what_boto3_reads(bucket: str) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).pipe(f"{bucket}/runs/a/config.json", b"{}")

    assert keys(bucket) == ["runs/a/config.json"]
    found = boto3.client("s3").get_object(Bucket=bucket, Key="runs/a/config.json")
    assert found["Body"].read() == b"{}"


def test_pyarrow_reads_what_s3fs_wrote(bucket: str) -> None:
    content = bytes(range(256)) * 4096  # 1 MiB
    fsspec.filesystem("s3", skip_instance_cache=True).pipe(f"{bucket}/model/weights", content)

    files, path = pyarrow.fs.FileSystem.from_uri(f"s3://{bucket}/model/weights")
    with files.open_input_stream(path) as stream:
        assert stream.read() == content


def test_pyarrow_writes_in_parts_and_s3fs_lists_and_removes(bucket: str) -> None:
    content = b"checkpoint" * 1_200_000  # 12 MB: more than one part of a multipart upload
    files, path = pyarrow.fs.FileSystem.from_uri(f"s3://{bucket}/checkpoints/step-1/optimizer")
    with files.open_output_stream(path) as stream:
        stream.write(content)

    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    assert s3.find(f"{bucket}/checkpoints") == [f"{bucket}/checkpoints/step-1/optimizer"]
    assert s3.cat(f"{bucket}/checkpoints/step-1/optimizer") == content
    s3.rm(f"{bucket}/checkpoints", recursive=True)
    assert keys(bucket) == []
