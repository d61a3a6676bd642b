"""S3 does what a program's files rely on: boto3's own calls against a real server.

``test_files.py`` and ``test_files_simulated.py`` have the behavior in all its cases, with a bucket
in memory. Here is what only the calls themselves can show: conditional writes, lists of several
pages, keys that a request has to quote. The server is the session's; each test has its bucket.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest

from containers.program.files import s3_files as store
from containers.program.files.program_files import Mirror, open_mirror
from containers.program.files.starts import begin
from contract import files
from contract.files import OUTPUT, WORK
from store.bucket import Bucket
from trainctl.aws.deployment_bucket import DeploymentBucket as Deployed
from trainctl.runs import downloads

pytestmark = pytest.mark.slow

ODD = ("a b+c.txt", "50%.txt", "what?#1.txt", "<&'\">.txt", "é ü/中.txt", "a=b;c:d@e!$*(),.txt")
"""Names that a request or an answer has to quote."""


@pytest.fixture
def name(s3_endpoint: str, tmp_path: Path) -> str:
    """Of the test's bucket."""
    assert s3_endpoint.startswith("http://127.0.0.1:")
    name = "files-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    store._client().create_bucket(Bucket=name)
    return name


@pytest.fixture
def bucket(name: str) -> Bucket:
    return store.open_bucket(f"s3://{name}/runs/r/output")


@pytest.fixture
def open_node(tmp_path: Path, bucket: Bucket) -> Callable[[int], tuple[Path, Mirror]]:
    """A node's new folders, and their mirror."""
    num = 0

    def open_node(number: int) -> tuple[Path, Mirror]:
        nonlocal num
        num += 1
        place = tmp_path / f"start-{num}"
        for folder in (WORK, OUTPUT):
            (place / folder).mkdir(parents=True)
        folders = {WORK: place / WORK, OUTPUT: place / OUTPUT}
        return place, open_mirror(folders, bucket.uri, node=number)

    return open_node


def test_what_two_nodes_save_is_restored_and_downloaded(
    open_node: Callable[[int], tuple[Path, Mirror]],
    bucket: Bucket,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "PIECE", 5_000)
    both = begin(bucket, [0, 1])
    large, contents = os.urandom(12_345), {f"work/{each}": each.encode() for each in ODD}
    for number in (0, 1):
        place, mirror = open_node(number)
        mirror.restore(both)
        for each, content in {**contents, f"output/shard-{number}": large}.items():
            (place / each).parent.mkdir(parents=True, exist_ok=True)
            (place / each).write_bytes(content)
        assert mirror.save()
    expected = {**contents, "output/shard-0": large, "output/shard-1": large}

    place, mirror = open_node(0)
    mirror.restore(begin(bucket, [0]))
    found = {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }
    assert found == expected

    deployed = Deployed(f"s3://{name}", boto3.client("s3"))
    fetched = downloads.download(deployed, "r", tmp_path / "here")
    assert len(fetched) == 2 * (len(ODD) + 1)
    assert (tmp_path / "here/node-1/output/shard-1").read_bytes() == large


def test_of_starts_at_the_same_moment_each_has_its_number(bucket: Bucket) -> None:
    with ThreadPoolExecutor(8) as pool:
        starts = [*pool.map(lambda each: begin(bucket, [0], writer=str(each)), range(8))]
    assert sorted(start.number for start in starts) == [*range(1, 9)]


def test_what_a_list_of_several_pages_names_is_removed_by_the_next_start(
    open_node: Callable[[int], tuple[Path, Mirror]], bucket: Bucket
) -> None:
    place, mirror = open_node(0)
    mirror.restore()
    for number in range(1_100):
        (place / "work" / str(number)).write_text(str(number))
    assert mirror.save()
    _, again = open_node(0)
    again.restore()
    for number in range(1_100):
        (place.parent / "start-2" / "work" / str(number)).unlink()
    assert again.save()
    begin(bucket, [0], writer="third")
    assert len(bucket.keys(files.OBJECTS)) == 1, "the list that names no file"
