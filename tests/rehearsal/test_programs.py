"""Other programs as users bring them, unchanged, on two containers; some lose a node. By night.

``test_first_hour`` has one of them in CI, ``tests/containers/program`` the launcher's details.
"""

import gzip
import importlib.util
import json
import os
import pydoc_data.topics
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from contract import exits
from contract import outputs as stack_outputs
from contract.job import JobSpec
from contract.nodes import ENV_RESIZE, HEAD, WORKER, Range
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from tests.conftest import ROOT
from tests.eventually import eventually
from tests.rehearsal.conftest import gateway, served, show, succeeded, trainctl
from tests.rehearsal.test_jobs import hosts, nothing_is_left, variables
from tests.rehearsal.watch import Watch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.night,
    pytest.mark.usefixtures("log_of_a_failure"),
]

#: The worker node of a job below is released after so long; others after a minute.
IDLE_S = 10
#: In that job's head: its program goes on once this is there.
GO = "/tmp/go"


@pytest.fixture(autouse=True)
def _none_waits(deployment: Rehearsal) -> Iterator[None]:
    """A job that a failed test has left would keep the others in the queue."""
    yield
    for job in json.loads(trainctl(deployment, "ls", "--running", "--json").stdout):
        trainctl(deployment, "stop", job["id"], "--yes", timeout_s=400)


def submit(
    rehearsal: Rehearsal,
    code: Path,
    run: str,
    *words: str,
    on: int | str = 2,
    more: Sequence[str] = (),
) -> str:
    """Start a program on so many nodes, with more options; return the job's id."""
    options = ("--code", str(code), "--nodes", str(on), "--run", run, "--env", "OMP_NUM_THREADS=1")
    given = ("submit", *options, *more, "--yes", "--", *words)
    return succeeded(rehearsal, *given).stdout.strip()


def ended(rehearsal: Rehearsal, job: str) -> tuple[int, str]:
    """Wait for a job; return its exit code and its log."""
    try:
        done = trainctl(rehearsal, "wait", job, "--json", timeout_s=400)
    except subprocess.TimeoutExpired:
        trainctl(rehearsal, "stop", job, "--yes")  # it must not be in the way of other tests
        raise
    return done.returncode, trainctl(rehearsal, "logs", job).stdout


def folder_of(package: str, *files: str, into: Path) -> Path:
    """A folder with a package's own examples or tests, unchanged."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    into.mkdir()
    for file in files:
        shutil.copy(Path(found.origin).parent / file, into)
    return into


def test_accelerates_own_test_passes_on_two_nodes(deployment: Rehearsal, tmp_path: Path) -> None:
    """It needs a folder that all processes share. The nodes of a deployment do not have one, but
    here both are on one host, and share its cache."""
    code = folder_of(
        "accelerate", "test_utils/scripts/test_script.py", into=tmp_path / "accelerate"
    )
    command = 'mkdir -p "$HF_HUB_CACHE" && cd "$HF_HUB_CACHE" && torchrun "$OLDPWD/test_script.py"'
    exit_code, log = ended(deployment, submit(deployment, code, "accelerate", "sh", "-c", command))
    assert exit_code == exits.OK, log
    for part in ("Training integration test", "Breakpoint trigger test"):
        nodes = [line[:8] for line in log.splitlines() if f"**{part}**" in line]
        assert sorted(nodes) == ["[node 0]", "[node 1]"], log


@pytest.mark.timeout(900)
def test_examples_of_ray_run_and_those_that_ask_for_too_much_end(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    """Ray's own examples, and after them a program that leaves its worker node idle.

    The first job has Tune queue twenty trials where four fit, trains, and then asks for a fifth
    worker, which it can never have. The idle one asks for GPUs in the end.
    """
    linear, search = "torch_linear_example.py", "async_hyperband_example.py"
    code = folder_of(
        "ray", f"train/examples/pytorch/{linear}", f"tune/examples/{search}", into=tmp_path / "ray"
    )
    examples = (f"{search} --smoke-test", f"{linear} -n 2", f"{linear} -n 5")
    words = " && ".join(f"python {each}" for each in examples)
    job = submit(deployment, code, "ray", "sh", "-c", words)
    exit_code, log = ended(deployment, job)
    assert exit_code == exits.ASKS_TOO_MUCH, log
    assert show(deployment, job)["reason"] == "failed: asks for more than the job can have"
    assert "Best hyperparameters found" in log
    assert "No available node types" not in log, "of trials that wait their turn"
    assert ranks(log) == ["0", "1"], log
    assert re.search(r"^\{'loss': [\d.e-]+\}$", log, re.MULTILINE), log
    assert "the program asks for 5 workers of 1 CPU each; this job has at most 4" in log

    asleep = start_sleeping(deployment, job, then=("python", linear, "-n", "2", "--use-gpu"))
    watch = Watch(deployment, asleep)
    head = watch.wait_for_node(HEAD)
    watch.wait_for_node(WORKER)
    watch.wait_for(f"1 worker node has had nothing to do for {IDLE_S} s and will be released")
    eventually(
        "it is released",
        lambda: not watch.containers(WORKER),
        timeout_s=90,
        every_s=0.5,
        over=watch.over,
    )
    deployment.engine("exec", head, "touch", GO)

    exit_code, log = ended(deployment, asleep)
    assert exit_code == exits.ASKS_TOO_MUCH, log
    assert "the program asks for 2 workers of 1 GPU each; this job has at most 0" in log


def ranks(log: str) -> list[str]:
    """Of the workers of Ray Train, from the list that it prints of each group."""
    return re.findall(r"\(ip=[\d.]+, pid=\d+\) world_rank=(\d+)", log)


def start_sleeping(rehearsal: Rehearsal, like: str, *, then: Sequence[str]) -> str:
    """Start a job with the code of another one, whose command leaves its worker node idle until
    the file ``GO`` is there on its head; return its id."""
    machine = rehearsal.outputs(stack_outputs.TRAINING_STACK)[stack_outputs.JOBS]
    states = account_at(rehearsal.state()["endpoint"]).client("stepfunctions")
    execution = f"{machine}:{like}".replace(":stateMachine:", ":execution:")
    order = states.describe_execution(executionArn=execution)["input"]
    spec = replace(
        JobSpec.from_json(order),
        run="asleep",
        command=("sh", "-c", f"until [ -e {GO} ]; do sleep 1; done; {' '.join(then)}"),
        nodes=Range(1, 1),
        idle_s=IDLE_S,
    )
    job = f"asleep-{like}"
    states.start_execution(stateMachineArn=machine, name=job, input=spec.to_json())
    return job


@pytest.mark.parametrize(
    ("name", "words", "file", "victim"),
    [
        pytest.param(
            "ddp",
            ("torchrun", "train.py", "--save-every", "200", "--steps", "60000"),
            "work/checkpoint.pt",
            WORKER,
            id="ddp",
        ),
        # Ray Train writes the file some seconds after a checkpoint, which counts only then.
        pytest.param(
            "posts",
            ("python", "fsdp.py", "--data", "text.py", "--save-every", "10", "--steps", "60"),
            "/checkpoint_manager_snapshot.json",
            HEAD,
            id="fsdp",
        ),
    ],
)
@pytest.mark.timeout(900)
def test_a_program_that_loses_a_node_resumes_from_what_it_has_saved(
    deployment: Rehearsal,
    name: str,
    words: tuple[str, ...],
    file: str,
    victim: str,
    tmp_path: Path,
) -> None:
    run = f"lost-{name}"
    code = shutil.copytree(ROOT / "examples" / name, tmp_path / name)
    shutil.copy(pydoc_data.topics.__file__, code / "text.py")  # half a megabyte of English
    job = submit(deployment, code, run, *words)
    watch = Watch(deployment, job)
    eventually(
        f"{file} is in the bucket",
        lambda: watch.is_saved(run, file),
        timeout_s=300,
        every_s=1,
        over=watch.over,
    )
    deployment.engine("kill", "--signal", "KILL", watch.wait_for_node(victim))
    exit_code, log = ended(deployment, job)
    assert exit_code == exits.OK, log
    starts = re.findall(r"rank (\d) of 2 starts at \D*(\d+)", log)
    assert sorted(rank for rank, _step in starts[-2:]) == ["0", "1"], log
    assert int(starts[-1][1]) > 0, log
    result = json.loads(re.findall(r"result (\{.*\})", log)[-1])
    assert result["world_size"] == 2
    assert str(max(result.get("steps", 0), result.get("step", 0))) == words[-1]


@pytest.mark.timeout(900)
def test_a_program_under_torchrun_with_a_range_of_nodes_grows_and_has_a_lost_one_replaced(
    deployment: Rehearsal,
) -> None:
    """It is stopped then: another test has a program that loses a node run to its end."""
    words = ("torchrun", "train.py", "--save-every", "200", "--steps", "100000000")
    nothing_is_left(deployment)  # a host of the job before would be the second one at once
    with hosts(deployment, 1) as have, variables(deployment, **{ENV_RESIZE: "2"}):
        job = submit(deployment, ROOT / "examples" / "ddp", "range", *words, on="1:2")
        watch = Watch(deployment, job)
        watch.wait_for("rank 0 of 1 starts at step 0")
        have(2)
        watch.wait_for("rank 1 of 2 starts at step")
        deployment.engine("kill", "--signal", "KILL", watch.wait_for_node(WORKER))
        watch.wait_for("rank 1 of 2 starts at step", times=2)
        succeeded(deployment, "stop", job, "--yes")
    starts = re.findall(r"rank 0 of (\d) starts at step (\d+)", watch.text())
    # Between the two it may have gone on with one node.
    assert [starts[0][0], starts[1][0], starts[-1][0]] == ["1", "2", "2"]
    steps = [int(step) for _world, step in starts]
    assert 0 == steps[0] < steps[1] <= steps[-1], "each start resumes from what was saved"


@pytest.mark.timeout(900)
def test_the_first_posts_job_trains_with_data_that_come_over_https(
    deployment: Rehearsal, fashion_mini: Path, tmp_path: Path
) -> None:
    code = shutil.copytree(ROOT / "examples" / "posts", tmp_path / "posts")
    with served_over_https(fashion_mini, gateway(deployment), code / "cert.pem") as address:
        words = ("python", "ddp.py", "--epochs", "2", "--data", address)
        trusted = ("--env", "SSL_CERT_FILE=cert.pem")
        job = submit(deployment, code, "first-post", *words, more=trusted)
        exit_code, log = ended(deployment, job)
    assert exit_code == exits.OK, log
    # Of lines that are alike, as those of two ranks, Ray prints one.
    epochs = re.findall(r"epoch (\d) \| rank \d \| cpu \| batch 128 \| 16 steps", log)
    assert {*epochs} == {"0", "1"}, log
    result = json.loads(re.findall(r"result (\{.*\})", log)[-1])
    assert result["world_size"] == 2
    assert result["accuracy"] > 0.5


def public_program(path: str, into: Path, of_gpu: Mapping[str, str]) -> Path:
    """A folder with a public program, unchanged but for what only a GPU has, and its modules.

    ``PUBLIC_SOURCES`` names a folder with checkouts of the repositories, as OWNER/NAME.
    """
    source = Path(os.environ.get("PUBLIC_SOURCES", "."), path)
    if not source.is_file():
        pytest.skip(f"no {path}: name a folder of checkouts, OWNER/NAME each, in PUBLIC_SOURCES")
    shutil.copytree(source.parent, into, ignore=lambda *_: {"docs"})
    text = source.read_text()
    for ours, here in of_gpu.items():
        assert text.count(ours) == 1, ours
        text = text.replace(ours, here)
    (into / source.name).write_text(text)
    return into


@pytest.mark.timeout(900)
def test_the_first_posts_own_script_runs_to_its_end(
    deployment: Rehearsal, fashion_mini: Path, tmp_path: Path
) -> None:
    code = public_program(
        "aws-ia/ecs-blueprints/terraform/ec2-examples/distributed-ml-training/training_example.py",
        tmp_path / "post",
        {"use_gpu=True": "use_gpu=False", "torch.cuda.current_device()": "0"},
    )
    # Where torchvision looks before it fetches them: the first 1,024 and 256 pictures.
    raw = code / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, num in (("train", 1024), ("t10k", 256)):
        for what, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = f"{part}-{what}-ubyte"
            body = gzip.decompress((fashion_mini / f"{name}.gz").read_bytes())
            count = num.to_bytes(4, "big")
            (raw / name).write_bytes(body[:4] + count + body[8 : header + num * size])
    bucket = deployment.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
    # The second: Ray's workers stay in the folder of the code, and find the data.
    given = ("--env", "RAY_DEDUP_LOGS=0", "--env", "RAY_CHDIR_TO_TRIAL_DIR=0")
    words = ("python", "training_example.py", bucket)
    job = submit(deployment, code, "post-script", *words, more=given)
    exit_code, log = ended(deployment, job)
    assert exit_code == exits.OK, log
    epochs = re.findall(r"\[Epoch (\d) \| GPU0: Process rank (\d) .* \| Steps: 4 \|", log)
    assert sorted(epochs) == [(str(epoch), rank) for epoch in range(10) for rank in "01"], log
    assert re.search(
        r"^Result\(metrics=\{'loss': [\d.]+, 'accuracy': 0\.[5-9]", log, re.MULTILINE
    ), log
    assert show(deployment, job)["reason"] == "succeeded"
    found = account_at(deployment.state()["endpoint"]).items(
        "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix="ecs_dt_results/checkpoint_2"
    )
    assert max(each["Size"] for each in found) > 4 * 11_000_000, "bytes of the weights"


def test_a_public_example_of_tensor_parallelism_runs_on_two_nodes(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    name = "tensor_parallel_example.py"
    code = public_program(
        f"pytorch/examples/distributed/tensor_parallelism/{name}",
        tmp_path / "parallel",
        {
            "not verify_min_gpu_count(min_gpus=_min_gpu_count)": "False",
            "torch.accelerator.current_accelerator().type": "'cpu'",
        },
    )
    exit_code, log = ended(deployment, submit(deployment, code, "parallel", "torchrun", name))
    assert exit_code == exits.OK, log
    started = re.findall(
        r"^\[node (\d)\] Starting PyTorch TP example on rank (\d)", log, re.MULTILINE
    )
    assert sorted(started) == [("0", "0"), ("1", "1")], log
    assert "Tensor Parallel iter 9 completed" in log


@contextmanager
def served_over_https(folder: Path, host: str, certificate: Path) -> Iterator[str]:
    """Serve a folder at an address whose certificate is written to a file."""
    key = certificate.with_name("key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=data"),
            *("-addext", f"subjectAltName=IP:{host}", "-keyout", str(key)),
            *("-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    key.unlink()
    with served(folder, host, tls=context) as address:
        yield address


@pytest.mark.timeout(900)
def test_a_sharded_program_that_loses_both_nodes_goes_on_with_two_others_and_then_with_one(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).with_name("sharded_program.py"), tmp_path / "train.py")
    job = submit(deployment, tmp_path, "sharded-own", "torchrun", "train.py", "12000")
    watch = Watch(deployment, job)
    eventually(
        "shards of both nodes are in the bucket",
        lambda: all(watch.is_saved("sharded-own", f"__{rank}_0.distcp") for rank in (0, 1)),
        timeout_s=300,
        every_s=1,
        over=watch.over,
    )
    for node in (HEAD, WORKER):
        deployment.engine("kill", "--signal", "KILL", watch.wait_for_node(node))
    exit_code, log = ended(deployment, job)
    assert exit_code == exits.OK, log
    told = r"rank (\d) of (\d) {} at step (\d+) with loss ([\d.]+)"
    starts = re.findall(told.format("starts"), log)
    assert sorted(rank for rank, *_ in starts[-2:]) == ["0", "1"], log
    assert 0 < int(starts[-1][2]) < 12000, log
    end = re.findall(told.format("ends"), log)[-1]

    # Another job of the same run, on one node.
    job = submit(deployment, tmp_path, "sharded-own", "torchrun", "train.py", "12500", on=1)
    exit_code, log = ended(deployment, job)
    assert exit_code == exits.OK, log
    assert re.findall(told.format("starts"), log) == [("0", "1", *end[2:])], log


@pytest.mark.timeout(900)
def test_a_program_that_is_stopped_has_the_time_that_it_was_given(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    """More than the 30 s after which ECS kills a container by default, and than ECS's 120 s less
    what copying the files may take."""
    (tmp_path / "train.sh").write_text(
        "trap 'sleep 75; echo done >late; exit 0' TERM; echo up; while :; do sleep 0.2; done"
    )
    job = submit(deployment, tmp_path, "late", "sh", "train.sh", more=("--grace", "90"))
    watch = Watch(deployment, job)
    watch.wait_for("up", times=2)
    succeeded(deployment, "stop", job, "--yes", timeout_s=400)
    assert watch.is_saved("late", "work/late")


#: Steps on two nodes, and then an error, or one of three ways to hang.
ENDS = """
import os, sys, threading, time
import torch
import torch.distributed as dist

def read():
    os.mkfifo("pipe")
    open("pipe").read()

def rest():
    time.sleep(3600)

dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
for _ in range(20):
    optimizer.step()
    dist.barrier()
how, is_second = sys.argv[1], dist.get_rank() == 1
if how == "asleep":
    rest()
elif how == "exit":
    dist.destroy_process_group()
    if is_second:
        threading.Thread(target=rest).start()  # the interpreter waits for it
elif is_second:
    read()
elif how == "fail":
    raise ValueError("shapes do not match")
else:
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "code", "ranks", "reason"),
    [
        ("fail", exits.FAILED, "", r"failed on node 0, rank 0: ValueError: .* \(train\.py:\d+\)"),
        ("read", exits.HUNG, "01", r"no step for .*; rank 1 on node 1 was in read \(train"),
        ("asleep", exits.HUNG, "01", r"rank 0 on node 0 was in rest .*, rank 1 on node 1 was in"),
        # At its end: node 0's torchrun waits five minutes for the other one.
        ("exit", exits.HUNG, "1", r"no step for .*; rank 1 on node 1 was in _shutdown \(threading"),
    ],
)
@pytest.mark.timeout(900)
def test_a_program_that_fails_or_hangs_ends_with_the_reason(
    deployment: Rehearsal, tmp_path: Path, how: str, code: int, ranks: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    words = ("torchrun", "train.py", how)
    job = submit(deployment, tmp_path, how, *words, more=("--hang-minutes", "1"))
    exit_code, log = ended(deployment, job)
    assert exit_code == code, log
    assert re.search(reason, show(deployment, job)["reason"]), log
    assert {*re.findall(r"(?m)^\[node \d\] rank (\d), process", log)} == {*ranks}, "stacks"
