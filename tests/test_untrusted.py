"""Whatever a file, an order or a record from others says, its reader takes it or refuses it.

Each sample is read as it is, and damaged at random (``make fuzz`` tries more).

Objects that cross a seam have a strategy each; they also survive the way through JSON.
"""

import dataclasses
import gzip
import io
import json
import os
import resource
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args, get_origin, get_type_hints

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from transformers import AutoModelForCausalLM

from containers import spot
from containers.node import NodeConfig
from containers.program.start.code import unpack
from containers.ray_head import JobConfig
from contract import nodes
from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from contract.files import Claim, FileList, SavedFile, base_from_json, base_to_json
from contract.instance_types import HostPrice, Prices
from contract.job import Hold, JobSpec, JobStatus, Life, Outcome
from contract.nodes import ClusterSize, Range
from contract.runs import check_relative, check_run_name, checkpoint_key
from contract.typed_json import loads
from stacks.settings import load
from store.storage import runs_root
from tests.conftest import ROOT
from tests.heads import head
from tests.stacks.conftest import keeper as keeper
from tests.stacks.test_job_keeper import Aws, ended
from tests.trainctl.account import SHAPE
from trainctl.__main__ import app
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import JobExecution
from trainctl.jobs import job_file
from trainctl.jobs.data_sets import StoredSet
from training.checkpoint.dcp import parse_metadata
from training.checkpoint.manifest import DamagedError, File, Manifest
from training.checkpoint.sharded_checkpoints import ShardedCheckpoint
from training.command import Recorded
from training.data import idx, vocabulary
from training.data.contents import Contents
from training.data.documents import Rows, documents
from training.data.pictures.index import Entry, Index, StoredFile
from training.models import model_weights
from training.models.conversion import convert
from training.models.model_shapes import ModelShape, read_config
from training.models.pretrained import config_of
from training.models.serving import stops_of
from training.models.weight_files import PICKLED, PICKLED_INDEX, SAFETENSORS_INDEX
from training.record import events
from training.record.fields import Named, Rate
from training.record.goodput import Activity
from training.record.progress import Progress
from training.record.result import Result, Table
from training.system.lease import Holder

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:Detected pickle protocol"
)
#: Damaged forms of each sample; with ``FUZZ_EXAMPLES`` they are others in each run.
EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "0"))
#: More memory than a reader needs for what is a few kilobytes.
MEMORY: Final = 4 * 2**30
tried = settings(
    max_examples=EXAMPLES or 100,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=[*HealthCheck],
)


@pytest.fixture(autouse=True)
def _limited_memory() -> Iterator[None]:
    """A blow-up of memory is an error here, and no end of the machine."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (before, most))


# --- damage ---------------------------------------------------------------------------------------
ODD: Final[st.SearchStrategy[Any]] = st.sampled_from(
    [
        *(None, True, -1, 0, 2**70, 1e400, float("nan"), 0.5),
        *("", "../../x", "/etc/passwd", "\0", "[/b]", "é\ud800"),
        *([], {}, [[]], {"a": 1}, [None], {"a": {"a": []}}),
    ]
)


@st.composite
def damaged_values(draw: st.DrawFn, value: Any) -> Any:
    """JSON in which one value, somewhere, is another one or missing."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(ODD)
    whole = value if isinstance(value, dict) else dict(enumerate(value))
    key = draw(st.sampled_from([*whole]))
    rest = {name: each for name, each in whole.items() if name != key}
    if draw(st.integers(0, 4)):
        rest = {**whole, key: draw(damaged_values(whole[key]))}
    return rest if isinstance(value, dict) else [*rest.values()]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes changed, left out or repeated; of JSON, maybe a value in place of another."""
    if draw(st.booleans()):
        try:
            return json.dumps(draw(damaged_values(json.loads(content)))).encode()
        except ValueError:
            pass
    for _ in range(draw(st.integers(1, 4))):
        place = st.integers(0, len(content))
        start, end = sorted((draw(place), draw(place)))
        part = content[start:end]
        long = st.sampled_from([b"", part[:64] * 2, b"9" * 5000, b"[" * 3000, b"e999", b"-"])
        content = content[:start] + draw(long | st.binary(max_size=2)) + content[end:]
    return content


# --- objects that cross a seam --------------------------------------------------------------------
st.register_type_strategy(str, st.text(max_size=5))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(
    Rate,
    st.builds(Rate, items=st.sampled_from(["images", "tokens"]), per_s=st.floats(allow_nan=False)),
)
st.register_type_strategy(
    Table,
    st.integers(1, 3).flatmap(
        lambda num: st.builds(
            Table,
            title=st.text(),
            heads=st.lists(st.text(), min_size=num, max_size=num).map(tuple),
            rows=st.tuples(*[st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * num)]),
            names=st.sampled_from([(), ("one",)]),
        )
    ),
)
#: The last name ends as a rate does.
NUMBERS: Final = st.dictionaries(
    st.sampled_from(["accuracy", "decode", "bus_gb_per_s"]), st.floats(allow_nan=False)
)
PATHS: Final = st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3})?", fullmatch=True)
DIGESTS: Final = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
KEYS: Final = DIGESTS.map("objects/000001-0/1/{}".format)


def objects_of(kind: type[Any], **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a dataclass, with any values that its fields may have."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        found = st.from_type(hint)
        if get_origin(hint) is Mapping:
            found = st.dictionaries(*map(st.from_type, get_args(hint)), max_size=2)
        values.setdefault(field.name, NUMBERS if hint == Named else found)
    return st.builds(kind, **values)


RANGES: Final = (
    st.tuples(st.integers(0, 99), st.integers(0, 99)).map(sorted).map(lambda each: Range(*each))
)
HOST: Final = HostPrice(type="g5.xlarge", disk_gib=200, usd_per_hour=1.0)
SPECS: Final = st.builds(
    JobSpec,
    run=st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True),
    command=st.lists(st.text(min_size=1), min_size=1).map(tuple),
    nodes=RANGES,
    variables=st.dictionaries(st.from_regex(r"A[A-Z_]{1,4}", fullmatch=True), st.text()),
    secrets=st.just({"KEY": "training/key"}),
    keep_files=st.lists(PATHS).map(tuple),
    code=st.just("s3://bucket/code.zip"),
    code_sha256=DIGESTS,
    prices=st.just(
        Prices(region="us-east-1", spot=False, nat_usd_per_hour=0.045, head=HOST, worker=HOST)
    ),
)
SAVED: Final = st.builds(
    SavedFile,
    name=PATHS.map("work/{}".format),
    size=st.integers(0, 2**40),
    pieces=st.lists(KEYS, max_size=2).map(tuple),
    mode=st.integers(0, 0o777),
) | st.just(SavedFile(name="work/b", link="a"))
UNIQUE = st.lists(SAVED, unique_by=lambda each: each.name, max_size=3).map(tuple)


def record(kind: Any, objects: st.SearchStrategy[Any]) -> tuple[Any, Any, Any]:
    """Of a run, whose readers take what was JSON."""

    def write(value: Any) -> str:
        return json.dumps(events.to_json(value) if kind is events else value.to_json())

    def of_record(text: str) -> Any:
        return kind.from_json(loads(text, what="it"))

    return objects, write, of_record


SIZES = ("num_nodes", "num_cpus", "num_gpus")
#: Objects, how they are written, and how they are read.
SEAMS: Final[dict[str, tuple[st.SearchStrategy[Any], Callable[..., Any], Callable[..., Any]]]] = {
    "order": (SPECS, JobSpec.to_json, JobSpec.from_json),
    "outcome": (objects_of(Outcome), Outcome.to_json, Outcome.from_json),
    "life": (objects_of(Life), Life.to_json, Life.from_json),
    "hold": (objects_of(Hold, code=st.just(1)), Hold.to_json, Hold.from_json),
    "claim": (objects_of(Claim), Claim.to_json, Claim.from_json),
    "files": (st.builds(FileList, files=UNIQUE), FileList.to_json, FileList.from_json),
    "base": (st.dictionaries(st.integers(0, 9), KEYS), base_to_json, base_from_json),
    "range": (RANGES, str, lambda text: Range.parse(text, option="nodes")),
    "size of a cluster": (
        objects_of(
            ClusterSize,
            **dict.fromkeys(SIZES, st.integers(0, 10**6)),
        ),
        ClusterSize.line,
        ClusterSize.from_line,
    ),
    "manifest": (
        st.builds(Manifest, files=st.dictionaries(PATHS, st.from_type(File))),
        Manifest.to_json,
        Manifest.from_json,
    ),
    "lease": (objects_of(Holder), Holder.as_json, Holder.from_json),
    "activity": record(Activity, objects_of(Activity)),
    "progress": record(Progress, objects_of(Progress)),
    "result": record(Result, objects_of(Result)),
    "event": record(events, st.one_of(*map(objects_of, events.TYPES.values()))),
    "picture": (objects_of(Entry, name=PATHS, file=PATHS), Entry.to_line, Entry.from_line),
    "pictures": (
        objects_of(
            Index,
            files=st.dictionaries(PATHS, st.from_type(StoredFile)),
            format=st.just(Index.__dataclass_fields__["format"].default),
        ),
        Index.to_json,
        lambda text: Index.from_json(text, where="s3://x"),
    ),
    "data set": (
        objects_of(StoredSet, contents=st.none() | objects_of(Contents)),
        StoredSet.to_json,
        lambda text: StoredSet.from_json(text.encode()),
    ),
}


@pytest.mark.parametrize("name", SEAMS)
@tried
@given(data=st.data())
def test_what_crosses_a_seam_is_read_as_it_was_written_or_refused(
    name: str, data: st.DataObject
) -> None:
    objects, write, read = SEAMS[name]
    value = data.draw(objects)
    text = write(value)
    assert read(text) == value
    content = data.draw(damaged(text if isinstance(text, bytes) else text.encode()))
    given = content if isinstance(text, bytes) else content.decode(errors="replace")
    of_record = read.__name__ == "of_record"
    with suppress(ValueError if of_record else InputError, DamagedError):
        read(given)


# --- files and texts ------------------------------------------------------------------------------
def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def table() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two", None]}), file)
    return file.getvalue()


def archive() -> bytes:
    """As ``trainctl`` packs a folder: two files, one that runs, and a link."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as code:
        code.writestr("main.py", "print('hello')\n" * 20)
        for name, mode, text in (("bin/run.sh", 0o755, "#!/bin/sh\n"), ("link.py", 0, "main.py")):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = ((stat.S_IFREG if mode else stat.S_IFLNK) | mode) << 16
            code.writestr(entry, text)
    return content.getvalue()


def unpacked(file: Path) -> None:
    place = file.parent / "below" / "code"
    shutil.rmtree(place.parent, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        unpack(file, place)
    finally:
        assert {each.name for each in file.parent.iterdir()} <= {file.name, "below"}
        assert {each.name for each in place.parent.iterdir()} <= {"code"}


def saved(weights: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


def words() -> str:
    tokenizer = Tokenizer(tokenizer_models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str()


def metadata() -> bytes:
    """Of a checkpoint as torch writes it."""
    with tempfile.TemporaryDirectory() as folder:
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            save_sharded({"w": torch.ones(2)}, storage_writer=FsspecWriter(folder), no_dist=True)
        return Path(folder, ".metadata").read_bytes()


CONVERSATION = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "weight": 1,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
    ],
    "tools": [{"name": "f"}],
    "system": "s",
}
METADATA = metadata()
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 8,
}
MODEL: Any = AutoModelForCausalLM.from_config(config_of(LLAMA))  # type: ignore[no-untyped-call]
PLACES = dict.fromkeys(MODEL.state_dict(), "part.safetensors")
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
ROWS = "".join(json.dumps({"text": each}) + "\n" for each in ("one", "two", "")).encode()
CHATS = (json.dumps(CONVERSATION) + "\n").encode() * 2
TEXT = "one\ntwo\n\nthree é\n".encode()
INDEX = b'{"metadata": {}, "weight_map": {"a": "part.bin"}}'


def texts(file: Path) -> object:
    return [*documents([file], Rows(), None)]


def tokenizer(file: Path) -> None:
    if file.name != "tokenizer.json":
        file.with_name("tokenizer.json").write_text(words())
    vocabulary.read(file.parent)


def loaded(file: Path) -> None:
    (file.parent / "part.safetensors").write_bytes(save(MODEL.state_dict()))
    model_weights.load(MODEL, file.parent)


def sharded(file: Path) -> None:
    file.with_name(".metadata").write_bytes(METADATA)
    ShardedCheckpoint(str(file.parent))


def job(file: Path) -> None:
    command: Any = typer.main.get_command(app)
    job_file.expanded(file, [], [], command.commands["plan"].params[1:])


def converted(file: Path) -> None:
    (file.parent / "part.bin").write_bytes(saved({"a": torch.ones(1)}))
    into = file.parent / "into"
    into.mkdir(exist_ok=True)
    convert(file.parent, into)


#: Name of a file, how it begins, and how it is read.
FILES: Final[list[tuple[str, bytes, Callable[[Path], object]]]] = [
    ("a.gz", gzipped(b"\0\0\x08\x01\0\0\0\x04abcd"), idx.decompress),
    ("a.txt", TEXT, texts),
    ("b.jsonl", CHATS, texts),
    ("a.jsonl.gz", gzipped(ROWS), texts),
    ("a.json", json.dumps([CONVERSATION]).encode(), texts),
    ("a.csv", b'a,text\n1,"x, ""y"""\n', texts),
    ("a.parquet", table(), texts),
    ("tokenizer.json", words().encode(), tokenizer),
    ("tokenizer_config.json", b'{"eos_token": "</s>", "chat_template": "{{ 1 }}"}', tokenizer),
    ("config.json", json.dumps(LLAMA).encode(), lambda file: config_of(read_config(file))),
    (
        "config.json",
        json.dumps(LLAMA).encode(),
        lambda file: ModelShape.from_config(read_config(file)),
    ),
    ("model.safetensors", save(MODEL.state_dict()), loaded),
    (SAFETENSORS_INDEX, json.dumps({"weight_map": PLACES}).encode(), loaded),
    ("state.json", b'{"position": {"step": 1}, "config": {}}', sharded),
    (".metadata", METADATA, lambda file: parse_metadata(file.read_bytes())),
    ("job.toml", b'recipe = "ddp"\nnodes = "1:2"\nmax_hours = 1.5\n[env]\nA = "b"\n', job),
    (PICKLED, saved(WEIGHTS), converted),
    (PICKLED_INDEX, INDEX, converted),
    ("code.zip", archive(), unpacked),
]


@pytest.mark.parametrize(("name", "content", "read"), FILES, ids=[each[0] for each in FILES])
@tried
@given(data=st.data())
def test_files_are_read_or_refused(
    name: str,
    content: bytes,
    read: Callable[[Path], object],
    tmp_path: Path,
    data: st.DataObject,
) -> None:
    file = tmp_path / name
    for each in (content, data.draw(damaged(content))):
        file.write_bytes(each)
        errors = () if each is content else (InputError, DamagedError, UsageError)
        with suppress(*errors):
            read(file)


SPEC = JobSpec(run="r", command=("true",), nodes=Range(1, 1)).to_json()
OUTCOME = Outcome(status=JobStatus.FAILED, reason="x", exit_code=3, attempts=1).to_json()
SHAPED = {"deployment": "scratch", "capacity_gib": 1200, "mbps_per_tib": 200}


NOW = datetime.now(UTC)


def execution(**described: str) -> object:
    """One that may have been started by hand."""
    given: Any = {"name": "job", "status": "FAILED", "startDate": NOW, "stopDate": NOW, **described}
    found = JobExecution.from_execution(given)
    return found.run, found.status, found.reason, found.shell_code, found.is_over


#: Texts, and how they are read.
TEXTS: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "name of a run": ("my-run.1", check_run_name),
    "name of a checkpoint": ("step-00000010", checkpoint_key),
    "path": ("a/b/c.txt", check_relative),
    "storage": ("s3://bucket/prefix", runs_root),
    "spot notice": (
        '{"action": "terminate", "time": "2026-11-21T09:30:00Z"}',
        lambda text: spot.parse(text, now=0.0),
    ),
    "stops": ('{"eos_token_id": [2, 3]}', lambda text: stops_of(text.encode())),
    "settings of a run": (
        '{"recipe": "ddp", "run": "r", "storage": "/runs", "epochs": 3, "lr": 0.1}',
        lambda text: Recorded.of(text.encode(), text.encode()),
    ),
    "input": (SPEC, lambda text: execution(input=text)),
    "output": (OUTCOME, lambda text: execution(status="SUCCEEDED", input=SPEC, output=text)),
    "cause": (OUTCOME, lambda text: execution(input=SPEC, error="x", cause=text)),
    "deployment": (json.dumps(SHAPE | {"shared": SHAPED}), ClusterShape.from_json),
}


@pytest.mark.parametrize("name", TEXTS)
@tried
@given(data=st.data())
def test_texts_are_read_or_refused(name: str, data: st.DataObject) -> None:
    text, read = TEXTS[name]
    read(text)
    with suppress(InputError):
        read(data.draw(damaged(text.encode())).decode(errors="replace"))


def settings_of_a_deployment() -> dict[str, object]:
    """Those that are looked at, which those of the command line are not."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    own = {name: value for name, value in context.items() if not {*"/:"} & {*name}}
    return {**own, "image_tag": "x"}


def of_head(values: Mapping[str, object]) -> None:
    given = {name: str(value) for name, value in values.items()}
    for read in (partial(NodeConfig.from_environment, "worker"), JobConfig.from_environment):
        read(given)


VARIABLES = {
    "RAY_AUTH_TOKEN": "x" * 64,
    nodes.ENV_HEAD_ADDRESS: "10.0.0.1",
    nodes.ENV_NUM_CPUS: "4",
    nodes.ENV_NUM_GPUS: "1",
    nodes.ENV_HEAD_WAIT: "600",
    nodes.ENV_JOB: "job-1",
    nodes.ENV_DEADLINE: "1800000000",
    nodes.ENV_WORKER_TASK: "worker:1",
    nodes.ENV_WORKER_CPUS: "4",
    nodes.ENV_JOB_SPEC: SPEC,
}


@pytest.mark.parametrize(
    ("values", "read"),
    [(VARIABLES, of_head), (settings_of_a_deployment(), load)],
    ids=["variables", "settings"],
)
@tried
@given(data=st.data())
def test_variables_and_settings_are_read_or_refused(
    values: dict[str, object], read: Callable[[Any], object], data: st.DataObject
) -> None:
    read(values)
    found = data.draw(damaged_values(values))
    with suppress(InputError):
        read(found if isinstance(found, dict) else {})


FAILURES = {"Failures": [{"Arn": "a", "Reason": "RESOURCE:GPU"}], "Tasks": []}


@pytest.mark.parametrize(
    "cause",
    [head(3, reason="x", StoppedReason="y", ContainerInstanceArn="h1"), FAILURES],
    ids=["ended", "not started"],
)
@tried
@given(data=st.data())
def test_the_keeper_cleans_up_whatever_the_end_of_a_head_says(
    keeper: ModuleType, monkeypatch: pytest.MonkeyPatch, cause: object, data: st.DataObject
) -> None:
    account = Aws()
    account.add("head", family="head", group="job:j1", host="h1")
    account.add("worker", startedBy="j1", group="job:j1", host="h2")
    monkeypatch.setattr(keeper.boto3, "client", account.client)
    text = data.draw(damaged(json.dumps(cause).encode())).decode(errors="replace")
    outcome = Outcome.from_json(json.dumps(keeper.handler(ended({}) | {"Cause": text}, None)))
    assert not account.running(), "its tasks are ended"
    if not outcome.again:
        assert {*account.terminated} >= {"i-h1", "i-h2"}
        assert account.objects["ends/r1/j1.json"]["status"] == outcome.status
