"""What a node's files rely on in S3, with boto3's own calls against a real server.

``test_files.py`` has the behavior in all its cases, with a bucket in memory. Here is what only the
calls themselves can show: conditional writes, uploads in parts, copies within S3, calls that break
off, and keys that a request has to quote. The server is the session's; each test has its bucket.
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError

from containers.program import bucket as store
from containers.program.bucket import NodeBucket, ReplacedError
from containers.program.files import Mirror
from contract import times
from contract.errors import InputError
from contract.runs import MANIFEST, OUTPUT, OUTPUT_LIMIT_BYTES, WORK, Manifest, output_prefix
from trainctl import downloads
from trainctl.aws.clients import Clients
from trainctl.aws.files import Bucket

pytestmark = pytest.mark.slow

MIB = 2**20
AGO_S = 100
"""Older than what is waited for."""


@dataclass
class Node:
    """A node at one start: new folders and a client of its own."""

    place: Path
    bucket: str
    number: int = 0
    run: str = "r"
    limit_bytes: int = OUTPUT_LIMIT_BYTES
    said: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """Operations of S3 that were begun."""
    sent: list[str] = field(default_factory=list)
    """Addresses of the requests, one for each time that it was tried."""
    on_call: Callable[[str, str], None] = lambda _operation, _key: None
    """Called before each of them; what it raises is what the network would raise."""

    def __post_init__(self) -> None:
        for folder in (WORK, OUTPUT):
            (self.place / folder).mkdir(parents=True)
        client = store._client()
        client.meta.events.register("before-call.s3", self._note)
        client.meta.events.register(
            "before-send.s3", lambda request, **_: self.sent.append(request.url)
        )
        self.mirror = Mirror(
            {WORK: self.place / WORK, OUTPUT: self.place / OUTPUT},
            self.address,
            every_s=0.05,
            limit_bytes=self.limit_bytes,
            say=self.said.append,
            client=client,
        )

    def _note(self, *, model: Any, params: dict[str, Any], **_: Any) -> None:
        self.calls.append(model.name)
        self.on_call(model.name, params["url_path"])

    @property
    def address(self) -> str:
        return f"s3://{self.bucket}/{self.prefix.rstrip('/')}"

    @property
    def prefix(self) -> str:
        return output_prefix(self.run, self.number)

    def restored(self, fallback: str = "") -> "Node":
        self.mirror.restore(fallback)
        return self

    def write(self, name: str, content: bytes) -> Path:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (time.time() - AGO_S,) * 2)
        return path

    def found(self) -> dict[str, bytes]:
        """What lies in the folders, links left out."""
        return {
            path.relative_to(self.place).as_posix(): path.read_bytes()
            for path in sorted(self.place.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }

    def objects(self) -> dict[str, bytes]:
        """What lies in the bucket below the node's prefix."""
        client = store._client()
        listed = client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix)
        return {
            each["Key"].removeprefix(self.prefix): client.get_object(
                Bucket=self.bucket, Key=each["Key"]
            )["Body"].read()
            for each in listed.get("Contents", [])
        }

    def put(self, name: str, content: bytes) -> None:
        """Write an object below the prefix, as any other job could."""
        store._client().put_object(Bucket=self.bucket, Key=self.prefix + name, Body=content)


Start = Callable[..., Node]


@pytest.fixture
def start(s3_endpoint: str, tmp_path: Path) -> Start:
    """Makes nodes whose bucket is the test's."""
    assert s3_endpoint.startswith("http://127.0.0.1:")
    bucket = "files-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    store._client().create_bucket(Bucket=bucket)
    starts: list[Node] = []

    def start(number: int = 0, **given: Any) -> Node:
        starts.append(Node(tmp_path / f"start-{len(starts)}", bucket, number, **given))
        return starts[-1]

    return start


def cut_at(num_calls: int) -> Callable[[str, str], None]:
    """So many calls are answered, and none after them."""
    left = [None] * num_calls

    def cut(_operation: str, _key: str) -> None:
        if not left:
            raise EndpointConnectionError(endpoint_url="s3")
        left.pop()

    return cut


ODD = ("a b+c.txt", "50%.txt", "what?#1.txt", "<&'\">.txt", "é ü/中.txt", "a=b;c:d@e!$*(),.txt")
"""Names that a request or an answer has to quote."""


def test_a_tree_comes_back_as_it_was(start: Start) -> None:
    node = start().restored()
    files = {f"work/{name}": name.encode() for name in ODD} | {"output/empty": b""}
    for name, content in files.items():
        node.write(name, content)
    script = node.write("work/step-1/run.sh", b"#!/bin/sh\n")
    files["work/step-1/run.sh"] = b"#!/bin/sh\n"
    script.chmod(0o755)
    (node.place / "work/latest").symlink_to("step-1")
    (node.place / "work/logs").mkdir()
    assert node.mirror.save(), node.said
    objects = node.objects()
    manifest = Manifest.from_json(objects.pop(MANIFEST))
    assert manifest.generation == 1
    listed = {each.name: objects[each.object] for each in manifest.files if not each.link}
    assert listed == files
    assert objects.keys() == {each.object for each in manifest.files if not each.link}

    again = start().restored()
    assert again.found() == files
    assert again.said == [f"files: {len(files) + 1} restored from {again.address}"]
    assert os.access(again.place / "work/step-1/run.sh", os.X_OK)
    assert not os.access(again.place / "work/50%.txt", os.X_OK)
    assert os.readlink(again.place / "work/latest") == "step-1"
    assert (again.place / "work/logs").is_dir()
    modified = (again.place / "work/step-1/run.sh").stat().st_mtime_ns
    assert modified == script.stat().st_mtime_ns

    for name in ODD:
        (again.place / "work" / name).unlink()
    assert again.mirror.save(), again.said
    left = again.objects()
    assert left.pop(MANIFEST)
    assert sorted(left.values()) == [b"", b"#!/bin/sh\n"]


def test_content_is_sent_once(start: Start) -> None:
    node = start().restored()
    node.calls.clear()
    node.write("work/a", b"one")
    node.write("work/b", b"two")
    assert node.mirror.save()
    assert Counter(node.calls) == {"PutObject": 3}, "two files and the list"
    node.calls.clear()
    assert node.mirror.save()
    assert node.calls == [], "nothing has changed"


# --- large files
@pytest.mark.parametrize("size", [9 * MIB, 12 * MIB])
def test_a_large_file_comes_back_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Read while it is sent: in one request, and in parts of the least size that S3 takes."""
    monkeypatch.setattr(store, "_PART_BYTES", 5 * MIB if size > 10 * MIB else 10 * MIB)
    node = start().restored()
    content = os.urandom(1 * MIB) * (size // MIB)
    node.write("work/model.pt", content)
    assert node.mirror.save(), node.said
    did = Counter(node.calls)
    assert did["UploadPart"] == (3 if size > 10 * MIB else 0)
    assert len(node.objects()) == 2
    assert start().restored().found() == {"work/model.pt": content}


def test_an_upload_in_parts_that_breaks_off_leaves_no_parts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PART_BYTES", 5 * MIB)
    node = start().restored()
    node.write("work/step", b"1")
    assert node.mirror.save()
    node.write("work/step", b"2")
    node.write("work/model.pt", bytes(12 * MIB))

    def cut(operation: str, _key: str) -> None:
        if operation == "UploadPart" and node.calls.count(operation) > 1:
            raise EndpointConnectionError(endpoint_url="s3")

    node.on_call = cut
    assert not node.mirror.copy()
    assert len(node.said) == 1
    assert node.said[0].startswith("files: not saved: EndpointConnectionError: ")
    client = store._client()
    assert not client.list_multipart_uploads(Bucket=node.bucket).get("Uploads")
    assert start().restored().found() == {"work/step": b"1"}


# --- two writers
def test_the_older_of_two_writers_loses(start: Start) -> None:
    stale = start().restored()
    stale.write("work/a", b"one")
    assert stale.mirror.save()
    newer = start().restored()
    newer.write("work/a", b"two")
    stale.write("work/a", b"late")
    assert not stale.mirror.save()
    assert "started again elsewhere" in stale.said[0]
    assert newer.mirror.save(), newer.said
    assert start().restored().found() == {"work/a": b"two"}


@pytest.mark.parametrize("is_first", [True, False])
def test_of_writers_at_the_same_moment_one_wins(start: Start, is_first: bool) -> None:
    address = start().address
    if not is_first:
        NodeBucket(address).commit(Manifest(generation=1, writer="before"))
    writers = {f"w{number}": NodeBucket(address) for number in range(6)}
    for each in writers.values():
        each.manifest()

    def commits(name: str) -> bool:
        try:
            writers[name].commit(Manifest(generation=2, writer=name))
        except ReplacedError:
            return False
        return True

    with ThreadPoolExecutor(len(writers)) as pool:
        won = [name for name, has in zip(writers, pool.map(commits, writers), strict=True) if has]
    now = NodeBucket(address).manifest()
    assert now is not None
    assert won == [now.writer]


def test_a_write_whose_answer_was_lost_counts_as_written(start: Start) -> None:
    node = start()
    bucket = NodeBucket(node.address)
    first = Manifest(generation=1, writer="w")
    node.put(MANIFEST, first.to_json().encode())  # has arrived; the client tries it again
    bucket.commit(first)
    second, third = replace(first, empty=("work/a",)), replace(first, empty=("work/b",))
    node.put(MANIFEST, second.to_json().encode())
    bucket.commit(third)
    assert NodeBucket(node.address).manifest() == third


# --- what breaks off
def test_wherever_a_copy_is_cut_off_a_restore_finds_one_state(start: Start) -> None:
    old = {"work/model": b"step 1", "work/step": b"1"}
    new = {"work/model": b"step 2", "work/step": b"2"}
    seen = []
    for num_calls in range(30):
        node = start(run=f"cut-{num_calls}").restored()
        for content in (old, new):
            for name, each in content.items():
                node.write(name, each)
            if content is old:
                assert node.mirror.save()
        node.on_call = cut_at(num_calls)
        is_done = node.mirror.save(within_s=0.05)
        after = start(run=node.run).restored()
        seen.append(after.found())
        assert seen[-1] in (old, new), num_calls
        assert after.mirror.save()
        assert len(after.objects()) == 3, "the next start clears up"
        if is_done:
            break
    else:
        pytest.fail("it never came to its end")
    assert seen.index(new) == 3, "two uploads and the list come first"
    assert seen[-1] == new


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_copy_that_must_end_ends_and_saves_what_fits(
    start: Start, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    monkeypatch.setattr(store, "_PART_BYTES", 5 * MIB if in_parts else 32 * MIB)
    node = start().restored()
    node.write("work/small", b"one")
    large = os.urandom(11 * MIB)
    node.write("work/large", large)
    slow = hashlib.sha256(large).hexdigest()

    def wait(operation: str, key: str) -> None:
        if operation in ("PutObject", "UploadPart") and slow in key:
            time.sleep(1.7)

    node.on_call = wait
    assert not node.mirror.save(within_s=1.5)
    tried = Counter(url for url in node.sent if "partNumber" in url or url.endswith(slow))
    assert tried, "it was being sent when the time was over"
    assert {*tried.values()} == {1}, "what takes too long is not tried again"
    assert node.said == ["files: not saved at the program's end: work/large"]
    assert start().restored().found() == {"work/small": b"one"}


# --- what others have written
@pytest.mark.parametrize(
    "entry",
    [
        {"name": "../x"},
        {"name": "work/../../x"},
        {"name": "/etc/x"},
        {"name": "elsewhere/x"},
        {"name": "work/x", "key": "../node-1/work/a"},
        {"name": "work/x", "key": "changed/../../node-1/work/a"},
        {"name": "work/x", "link": "../../secret"},
    ],
    ids=str,
)
def test_a_list_that_names_another_place_is_refused(start: Start, entry: dict[str, Any]) -> None:
    node = start().restored()
    node.write("work/a", b"one")
    assert node.mirror.save()
    manifest = Manifest.from_json(node.objects()[MANIFEST])
    changed: dict[str, Any] = {"key": "work/a", **entry}
    hostile = replace(manifest.files[0], **changed)
    node.put(MANIFEST, replace(manifest, files=(hostile,)).to_json().encode())
    again = start()
    with pytest.raises(InputError, match=r"cannot be restored: .*(refused|lies in none)"):
        again.mirror.restore()
    assert again.found() == {}
    assert {path.name for path in again.place.iterdir()} == {WORK, OUTPUT}


def test_keys_that_name_another_place_are_only_keys(start: Start) -> None:
    """A start removes what lies in its ``objects/``; a key there cannot make it remove others'."""
    other = start(1).restored()
    other.write("work/a", b"of node 1")
    assert other.mirror.save()
    node = start().restored()
    node.put("objects/left-over", b"x")
    node.put("objects/../../node-1/work/a", b"x")
    node.put("work/../../../x", b"x")
    again = start().restored()
    assert again.found() == {}
    assert again.said == []
    assert "objects/left-over" not in again.objects()
    assert b"of node 1" in other.objects().values()


def test_what_is_not_the_saved_file_is_not_restored(start: Start) -> None:
    node = start().restored()
    for name in ("work/a", "work/b", "work/c"):
        node.write(name, name.encode())
    assert node.mirror.save()
    saved = {each.name: each.object for each in Manifest.from_json(node.objects()[MANIFEST]).files}
    node.put(saved["work/a"], b"something else")
    client = store._client()
    client.delete_object(Bucket=node.bucket, Key=node.prefix + saved["work/b"])
    again = start().restored()
    assert again.found() == {"work/c": b"work/c"}
    assert again.said[:2] == [
        f"files: {name} is damaged in {node.address}: it is not restored"
        for name in ("work/a", "work/b")
    ]


def test_a_file_above_the_limit_does_not_keep_the_others_from_the_bucket(start: Start) -> None:
    node = start(limit_bytes=MIB).restored()
    large = node.write("work/large", bytes(2 * MIB))
    node.write("work/small", b"two")
    assert not node.mirror.copy()
    assert not node.mirror.save()
    assert node.mirror.lost == ["work/large"]
    assert len(node.objects()) == 2
    assert "2.0 MiB in 2 files, and at most 1.0 MiB" in node.said[0]
    large.unlink()
    assert node.mirror.save()
    assert start().restored().found() == {"work/small": b"two"}


def test_a_bucket_that_does_not_exist_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "FILES_REFUSED_S", 0.1)
    node = start()
    address = "s3://no-such-bucket/runs/r"
    missing = Mirror({WORK: node.place / WORK}, address, every_s=0.05, say=node.said.append)
    with pytest.raises(InputError, match=r"NoSuchBucket.*is not started without them"):
        missing.restore()


def test_trainctl_download_fetches_what_nodes_have_saved(start: Start, tmp_path: Path) -> None:
    for number in (0, 1):
        node = start(number).restored()
        node.write("work/run.sh", f"echo {number}".encode()).chmod(0o755)
        node.write(f"output/{ODD[0]}", b"x")
        assert node.mirror.save()
    bucket = Bucket(Clients(boto3.Session()), name=start().bucket)
    found = downloads.download(bucket, "r", tmp_path / "here")
    assert {f"{each.source}/{each.name}" for each in found} == {
        f"node-{number}/{name}" for number in (0, 1) for name in ("work/run.sh", "output/a b+c.txt")
    }
    fetched = tmp_path / "here/node-1/work/run.sh"
    assert fetched.read_bytes() == b"echo 1"
    assert os.access(fetched, os.X_OK)
