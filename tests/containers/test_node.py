"""A node tells Ray the right things, refuses bad input and bad GPUs, and says why it ended."""

import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest.mock import Mock

import pytest

from containers import health, node
from containers.host import hardware, machine
from containers.node import NodeConfig
from containers.program.start import host_cache
from contract import exits, host_check, nodes, times
from contract.errors import InputError
from contract.nodes import ClusterSize
from tests.conftest import ROOT
from tests.eventually import eventually
from tests.loopback import answering

TOKEN = "0123456789abcdef0123"
WORKER = {"RAY_AUTH_TOKEN": TOKEN, "TRAIN_HEAD_ADDRESS": "head.training.internal"}


def worker(**changed: str) -> NodeConfig:
    return NodeConfig.from_environment("worker", WORKER | changed)


def test_a_coordinating_head_offers_no_cpus_and_does_not_wait_for_itself() -> None:
    config = NodeConfig.from_environment(
        "head", {"RAY_AUTH_TOKEN": TOKEN, "TRAIN_ON_THIS_NODE": "0", "TRAIN_NUM_CPUS": "4"}
    )
    assert config.num_cpus == 0
    assert "--num-cpus=0" in node.ray_command(config, "10.0.0.1")
    assert node.ray_environment(config, "eth0")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "1"


def test_the_agent_is_asked_without_the_proxies_of_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str]:
        assert request.path == "/v4/id/task"
        return 200, '{"TaskARN": "arn:task", "Cluster": "training"}'

    with answering(answer) as address:
        monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", f"{address}/v4/id")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        assert machine.own_task() == machine.OwnTask(arn="arn:task", cluster="training")


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("boss", {}, "'boss' is unknown: it must be head or worker"),
        ("worker", {"RAY_AUTH_TOKEN": ""}, "RAY_AUTH_TOKEN is missing"),
        ("head", {"RAY_AUTH_TOKEN": "short"}, "shorter than 16 characters"),
        ("worker", {"TRAIN_HEAD_ADDRESS": ""}, "TRAIN_HEAD_ADDRESS is missing"),
        ("worker", {"TRAIN_NUM_GPUS": "all"}, "TRAIN_NUM_GPUS is 'all'"),
        ("worker", {"TRAIN_HEAD_WAIT_S": "-1"}, "TRAIN_HEAD_WAIT_S is '-1'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    kind: str, changed: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        NodeConfig.from_environment(kind, WORKER | changed)


def test_ray_is_told_its_ports_and_no_two_are_the_same() -> None:
    head = NodeConfig.from_environment("head", {"RAY_AUTH_TOKEN": TOKEN})
    command = node.ray_command(head, "10.0.0.1")
    ports = [part.rpartition("=")[2] for part in command if "port=" in part]
    assert len(ports) == len({*ports}) == len(node.PORTS) + 2
    assert "--node-ip-address=10.0.0.1" in command
    assert TOKEN not in " ".join(command), "the token would be in the process list"
    assert "--address=head.training.internal:6379" in node.ray_command(worker(), "10.0.0.2")


def test_collectives_use_the_interface_that_leads_to_the_head() -> None:
    environment = node.ray_environment(worker(), "ens7")
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "ens7"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert (Path(environment["PYTHONPATH"]) / "sitecustomize.py").exists()


def test_a_stop_leaves_ray_its_time_to_drain() -> None:
    from contract.times import STOP_TIMEOUT_S

    drain = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    head = NodeConfig.from_environment("head", {"RAY_AUTH_TOKEN": TOKEN})
    for config in (worker(), head):
        assert 25 <= int(node.ray_environment(config, "eth0")[drain]) < STOP_TIMEOUT_S - 15


# --- the size of the cluster ---------------------------------------------------------------------
def test_the_size_that_the_head_says_is_what_the_command_line_reads() -> None:
    nodes = [
        {"state": "ALIVE", "resources_total": {"memory": 1e9}},
        {"state": "ALIVE", "resources_total": {"CPU": 4.0, "GPU": 1.0}},
        {"state": "ALIVE", "resources_total": {"CPU": 4.0, "GPU": 1.0}},
        {"state": "DEAD", "resources_total": {"CPU": 4.0, "GPU": 1.0}},
    ]
    size = node.counted(json.dumps({"data": {"result": {"result": nodes}}}))
    assert size == ClusterSize(num_nodes=3, num_cpus=8, num_gpus=2)
    assert ClusterSize.from_line(f"node: {size.line()}\n") == size
    assert ClusterSize.from_line("To connect to this Ray cluster:") is None


def test_another_answer_of_the_dashboard_is_no_size() -> None:
    for answer in ({}, {"data": None}, {"data": {"result": {"result": [{"state": "ALIVE"}]}}}):
        with pytest.raises(ValueError, match="nodes"):
            node.counted(json.dumps(answer))


# --- network -------------------------------------------------------------------------------------
def test_the_address_towards_a_host_and_its_interface_are_asked_of_the_kernel() -> None:
    address = machine.address_towards("127.0.0.1")
    assert address == "127.0.0.1"
    assert machine.interface_of(address) in {name for _, name in socket.if_nameindex()}
    with pytest.raises(OSError, match=r"203\.0\.113\.9"):
        machine.interface_of("203.0.113.9")


def test_a_node_has_an_address_of_its_own() -> None:
    assert machine.interface_of(machine.own_address())


def test_waiting_ends_when_somebody_listens_or_time_is_up_or_it_is_told_to() -> None:
    said: list[str] = []

    def wait(host: str, port: int, *, stop: bool = False) -> str | None:
        return machine.wait_for_port(
            host, port, timeout_s=0, should_stop=lambda: stop, say=said.append
        )

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert wait("127.0.0.1", port) is None
    assert "does not answer (Connection refused)" in str(wait("127.0.0.1", port))
    assert wait("head.invalid", 1) == "the name head.invalid has no address yet"
    assert wait("127.0.0.1", port, stop=True) == ""


# --- GPUs ----------------------------------------------------------------------------------------
@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the driver's command, first on PATH; a test writes what it does."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def answer(command: Path, output: str, code: int = 0) -> None:
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    command.chmod(0o755)


@pytest.mark.parametrize(
    ("output", "code", "fault"),
    [
        ("0, NVIDIA A10G, 0", 0, "1 GPUs are visible, 2 should be"),
        ("0, NVIDIA A10G, 0\n1, NVIDIA A10G, 3", 0, "GPU 1 (NVIDIA A10G) has 3 uncorrected"),
        ("No devices were found", 6, "nvidia-smi failed: No devices were found"),
        # As far as the driver is asked, these two are fit; this machine's torch has no GPU.
        ("0, Tesla T4, [N/A]\n1, Tesla T4, 0", 0, "torch sees 0 GPUs, 2 should be visible"),
    ],
)
def test_gpus_that_are_not_as_they_should_be_are_named(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, fault: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer(nvidia_smi, output, code)
    (found,) = hardware.gpu_faults(2)
    assert fault in found


def test_a_container_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware.gpu_faults(1) == [
        "nvidia-smi is not here: the container was started without GPUs"
    ]


def test_a_node_with_bad_gpus_does_not_join(nvidia_smi: Path) -> None:
    answer(nvidia_smi, "0, NVIDIA A10G, 7")
    run = subprocess.run(
        [sys.executable, "-m", "containers", "head"],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_TOKEN": TOKEN, "TRAIN_NUM_GPUS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == exits.BAD_HOST
    assert "node: not joining: GPU 0 (NVIDIA A10G) has 7 uncorrected memory errors" in run.stderr


@pytest.mark.parametrize(
    ("printed", "is_fault"),
    [
        ("GPU 0 cannot compute: CUDA error: out of memory", False),
        (
            "GPU 0 cannot compute: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`",
            False,
        ),
        ("GPU 0 cannot compute: CUDA error: uncorrectable ECC error encountered", True),
    ],
)
def test_memory_that_a_training_holds_is_no_fault_of_its_gpu(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, printed: str, is_fault: bool
) -> None:
    answer(nvidia_smi, "0, NVIDIA A100, 0")
    monkeypatch.setattr(hardware, "_in_a_child", lambda _: [printed])
    assert hardware.gpu_faults(1) == [printed], (
        "before a node joins, nothing else may hold its memory"
    )
    assert hardware.gpu_faults(1, is_in_use=True) == ([printed] if is_fault else [])


def test_a_hanging_driver_is_not_waited_for_though_its_process_stays(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi.write_text("#!/bin/sh\nexec sleep 20\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setattr(hardware, "_DRIVER_S", 0.2)
    started: list[subprocess.Popen[str]] = []

    def kill(process: subprocess.Popen[str]) -> None:
        started.append(process)

    with monkeypatch.context() as changed:
        changed.setattr(subprocess.Popen, "kill", kill)
        began = time.monotonic()
        (found,) = hardware.gpu_faults(1)
        assert time.monotonic() - began < 10
    assert found == "nvidia-smi did not answer within 0.2 s: the driver hangs"
    started[0].kill()
    started[0].communicate()


def ask(request: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Request a check in another thread; the list gets the answer."""
    monkeypatch.setenv(nodes.ENV_HOST_CHECK, str(request))
    answers: list[list[str]] = []
    threading.Thread(target=lambda: answers.append(host_check.ask(30)), daemon=True).start()
    return answers


def until(is_so: Callable[[], object]) -> None:
    eventually("it", is_so, timeout_s=30, every_s=0.02)


def test_a_node_whose_gpu_fails_later_leaves_with_the_code_of_a_bad_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    faults: list[str] = []

    def host_faults(_config: NodeConfig, *, is_in_use: bool) -> list[str]:
        assert is_in_use
        return list(faults)

    monkeypatch.setattr(node, "host_faults", host_faults)
    own = node.NodeRunner(NodeConfig.from_environment("worker", WORKER))
    request = tmp_path / "check"
    codes: list[int] = []
    ray = [sys.executable, "-c", "import time; time.sleep(60)"]
    environment = {**os.environ, nodes.ENV_HOST_CHECK: str(request)}
    # A program runs beside its Ray.
    monkeypatch.setenv(nodes.ENV_WATCHED, "10.0.0.5:6379")
    popen = subprocess.Popen
    start = Mock(side_effect=lambda words, **more: popen(words, **more) if words == ray else Mock())
    monkeypatch.setattr(subprocess, "Popen", start)
    thread = threading.Thread(
        target=lambda: codes.append(own._run_ray(ray, environment, "127.0.0.1")), daemon=True
    )
    thread.start()
    first = ask(request, monkeypatch)
    until(lambda: first)
    assert (first, codes) == ([[]], []), "a failure of the program's own changes nothing"
    faults.append("GPU 1 (NVIDIA A100) has 4 uncorrected memory errors")
    second = ask(request, monkeypatch)
    thread.join(30)
    until(lambda: second)
    assert (second, codes) == ([faults], [exits.BAD_HOST])
    assert faults[0] in capfd.readouterr().err
    assert start.call_args_list[0][0][0][-2:] == ("10.0.0.5:6379", "127.0.0.1")


@pytest.mark.parametrize(
    ("comes_up", "code", "starts", "said"),
    [
        # Ray's agent dies each time: the raylet ends before the agent listens.
        (9, exits.RAY_FAILED, "xxxx", " 4 s (4 of 4)"),
        (2, exits.FAILED, "xx", "(exit code 1)"),
        # The agent never listens, and never ends.
        (0, exits.RAY_FAILED, "x", " 2 s"),
    ],
)
def test_ray_that_does_not_come_up_is_started_again_and_one_that_did_is_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    comes_up: int,
    code: int,
    starts: str,
    said: str,
) -> None:
    ray = f"""
import pathlib, socket, sys, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) == {comes_up}:
    listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    time.sleep(3)
time.sleep(0 if {comes_up} else 600)
sys.exit(1)
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(nodes, "AGENT_PORT", port)
    monkeypatch.setattr(times, "AGENT_START_S", 600 if comes_up else 2)
    paused, turns = list[float](), list[float]()

    @contextlib.contextmanager
    def turn(*, within_s: float, should_stop: Callable[[], bool]) -> Iterator[None]:
        assert not should_stop()
        turns.append(within_s)
        yield

    monkeypatch.setattr(host_cache, "turn", turn)
    monkeypatch.setattr(node, "_PAUSE_S", 1.0)
    monkeypatch.setattr(time, "sleep", paused.append)
    own = node.NodeRunner(NodeConfig.from_environment("head", WORKER))
    environment = {**os.environ, nodes.ENV_HOST_CHECK: str(tmp_path / "check")}
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert code == own._run_ray([sys.executable, "-c", ray, str(port)], environment, "127.0.0.1")
    assert (tmp_path / "starts").read_text() == starts
    assert len(turns) == len(starts), "no two nodes of a host start at a time"
    assert [each for each in paused if each >= 1] == [1.0, 2.0, 4.0][: len(starts) - 1]
    assert said in capfd.readouterr().err


def test_nodes_join_while_the_dashboard_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, services
    from ray.scripts import scripts

    from containers import ray_start

    started: list[object] = []

    class Node(node.Node):
        def __init__(self, *, head: bool) -> None:
            self.head = head

        def start_api_server(self, **how: object) -> None:
            started.append(how)

        def start_ray_processes(self) -> None:
            started.append("raylet")

    monkeypatch.setattr(node, "Node", Node)
    monkeypatch.setattr(services, "start_raylet", services.start_raylet)
    monkeypatch.setattr(scripts, "main", bool)
    ray_start.main()
    head = Node(head=True)
    head.start_api_server(include_dashboard=None)
    for each in (head, Node(head=False)):
        each.start_ray_processes()
    assert started == ["raylet", {"include_dashboard": None}, "raylet"]


def test_a_raylet_does_not_wait_for_an_agent_that_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ray._private import services

    from containers import ray_start

    monkeypatch.setattr(ray_start, "LATE_S", 0.0)
    named = {"session_dir": str(tmp_path), "node_id": "ab" * 28}
    ports = dict(zip(ray_start.PORT_FILES, (0, 6384, 6383), strict=True))
    # The first one's agent is not late.
    ray_start._raylet.persist_port(*named.values(), next(iter(ports)), 7001)
    signature = inspect.signature(services.start_raylet)
    values = dict.fromkeys(signature.parameters) | named
    values |= {ray_start.PORT_FILES[name]: port for name, port in ports.items()}

    class Raylet:
        __signature__ = signature

        def __call__(self, **given: object) -> object:
            assert given == values
            return "started"

    assert ray_start.without_the_wait(Raylet())(**values) == "started"
    eventually("the ports are written down", lambda: len([*tmp_path.iterdir()]) == 3)
    for name, port in ports.items():
        assert ray_start._raylet.wait_for_persisted_port(*named.values(), name, 0, 1) == (
            port or 7001
        )
    assert "Ray's agent needs more than 0 s to start here" in capfd.readouterr().err


def test_ray_is_told_to_leave_before_an_unfit_host_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, ended = tmp_path / "check", threading.Event()
    answers = ask(request, monkeypatch)
    until(request.exists)
    seen: list[bool] = []
    node.watch_host(request, lambda: ["bad"], lambda: seen.append(not answers), ended)
    until(lambda: answers)
    assert (seen, answers) == ([True], [["bad"]])


def test_a_check_that_cannot_be_made_ends_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, ended = tmp_path / "check", threading.Event()

    def check() -> list[str]:
        raise OSError("Cannot allocate memory")

    def leave() -> None:
        raise AssertionError("the host may be fit")

    answers = ask(request, monkeypatch)
    threading.Thread(
        target=node.watch_host, args=(request, check, leave, ended), daemon=True
    ).start()
    until(lambda: answers)
    ended.set()
    assert answers == [[]]


# --- health and token ----------------------------------------------------------------------------
class Ray:
    """Its two endpoints, as far as they are asked here."""

    healthy = True

    def answer(self, request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str]:
        if request.path == "/api/version":
            right = request.headers["Authorization"] == f"Bearer {TOKEN}"
            return 200 if right else 403, "{}"
        return (200, "success") if self.healthy else (503, "no")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    found = Ray()
    with answering(found.answer) as address:
        for name in ("DASHBOARD_PORT", "AGENT_PORT"):
            monkeypatch.setattr(nodes, name, int(address.rpartition(":")[2]))
        yield found


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_health_is_what_ray_says_of_this_node(
    ray: Ray, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_NODE", kind)
    assert health.main() == 0
    ray.healthy = False
    assert health.main() == 1


@pytest.mark.usefixtures("ray")
def test_a_node_without_ray_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = free.getsockname()[1]
    monkeypatch.setattr(nodes, "AGENT_PORT", unused)
    assert health.main() == 1
    assert "unhealthy: http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("lives", [True, False])
def test_a_head_without_dashboard_is_healthy_while_its_gcs_listens(
    monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    monkeypatch.setenv("TRAIN_NODE", nodes.HEAD)
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("", 0)) as control:
        monkeypatch.setattr(nodes, "DASHBOARD_PORT", free.getsockname()[1])
        free.close()
        monkeypatch.setattr(nodes, "GCS_PORT", control.getsockname()[1])
        if not lives:
            control.close()
        assert health.main() == (0 if lives else 1)


@pytest.mark.usefixtures("ray")
def test_a_wrong_token_is_known_before_ray_tries_it() -> None:
    assert node.token_refused("127.0.0.1", TOKEN) is None
    refusal = node.token_refused("127.0.0.1", "another")
    assert refusal == (
        "the head 127.0.0.1 refuses this node's token: RAY_AUTH_TOKEN differs from the head's"
    )


def test_efa_devices_that_are_missing_or_shut_are_named(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"uverbs{number}").touch()
    assert hardware.efa_faults(3, tmp_path) == []
    assert hardware.efa_faults(4, tmp_path) == [f"3 EFA devices are in {tmp_path}, 4 should be"]
    (tmp_path / "uverbs3").symlink_to("/nowhere")
    assert hardware.efa_faults(4, tmp_path) == [
        f"this user may not read and write {tmp_path / 'uverbs3'}"
    ]


def test_a_folder_that_is_not_the_shared_file_system_keeps_the_node_out(tmp_path: Path) -> None:
    root = "21 1 0:19 / / rw,relatime shared:1 - overlay overlay rw"
    disk = "30 21 259:1 /mnt/shared /mnt/shared rw,relatime - xfs /dev/nvme0n1p1 rw"
    files = "30 21 0:40 / /mnt/shared rw,relatime master:9 - lustre 10.0.1.2@tcp:/abcd rw,flock"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{root}\n{files}\n")
    assert hardware.mount_faults("/mnt/shared", mounts) == []
    mounts.write_text(f"{root}\n{disk}\n")
    assert hardware.mount_faults("/mnt/shared", mounts) == [
        "/mnt/shared is xfs and not lustre: the shared file system is not there"
    ]
    # As Linux writes it here.
    config = NodeConfig.from_environment("worker", WORKER | {"TRAIN_SHARED": str(tmp_path)})
    (found,) = node.host_faults(config)
    assert found == f"nothing is mounted at {tmp_path}: the shared file system is not there"
