"""Proves that forked processes are what Ray would have started, that anything else goes the usual
way, and that nothing is left behind whichever process is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchmarks import meter
from benchmarks.soak import TARGETS, Soak, kind_of
from contract.errors import InputError
from tests.conftest import ROOT, write_wheel
from training import recipes
from training.recipes.recipe import Model
from training.runtime import forkserver, local_ray
from training.runtime.forkserver import client, fitness

if TYPE_CHECKING:
    from training.runtime.forkserver.client import Request

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

# --- what fits, and what does not -----------------------------------------------------------------
ARGV = ["setup_worker.py", "--language=PYTHON", "default_worker.py", "--node-id=1"]


def request(
    argv: list[str] = ARGV, *, context: dict[str, Any] | None = None, **environment: str
) -> "Request":
    return {"argv": argv, "context": context or {}, "environment": environment}


def test_a_worker_of_pythons_is_forked() -> None:
    context: dict[str, Any] = {"env_vars": {"RAY_TRAIN_X": "1", "COLOUR": "green"}}
    context["env_vars"]["OMP_NUM_THREADS"] = "4"
    context |= {"py_executable": sys.executable, "command_prefix": [], "java_jars": []}
    given = {"PYTHONPATH": "/a", "RAY_AUTH_TOKEN": "of the command"}
    wanted = request(context=context, PYTHONPATH="/a", RAY_JOB_ID="01000000")
    assert fitness.why_not_forked(wanted, given) == ""


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (request(["setup_worker.py", "--language=JAVA"]), "not a worker of Python"),
        (request(context={"command_prefix": ["nice"]}), "a command of its own"),
        (request(context={"override_worker_entrypoint": "/w.py"}), "a command of its own"),
        (request(context={"py_executable": "/tmp/pip/bin/python"}), "a Python of its own"),
        (request(context={"env_vars": {"PYTHONPATH": "/code"}}), "another PYTHONPATH"),
        (request(context={"env_vars": {"LD_PRELOAD": "x.so"}}), "another LD_PRELOAD"),
        (request(context={"env_vars": {"TORCH_LOGS": "all"}}), "another TORCH_LOGS"),
        (request(context={"env_vars": {"RAY_event_stats": "1"}}), "another RAY_event_stats"),
        (request(MKL_NUM_THREADS="2"), "another MKL_NUM_THREADS"),
    ],
)
def test_what_a_fork_could_not_be_is_started_the_usual_way(wanted: "Request", reason: str) -> None:
    assert reason in fitness.why_not_forked(wanted, {})


def test_a_variable_that_the_server_has_and_the_worker_has_not_counts_too() -> None:
    assert "another LD_LIBRARY_PATH" in fitness.why_not_forked(
        request(), {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}
    )


@pytest.mark.parametrize(
    ("threads", "files", "reason"),
    [
        (["1"], ["/dev/null", "socket:[1]"], ""),
        (["1", "2"], [], "2 threads run"),
        (["1"], ["/dev/nvidiactl"], "opened a GPU"),
        (["1"], ["/dev/nvidia0"], "opened a GPU"),
    ],
)
def test_a_server_with_threads_or_a_gpu_does_not_fork(
    threads: list[str], files: list[str], reason: str
) -> None:
    assert reason in fitness.why_not_to_fork(threads, files)
    assert bool(reason) == bool(fitness.why_not_to_fork(threads, files))


def test_servers_are_told_apart_by_what_rays_core_reads_and_by_what_they_import() -> None:
    common = {"RAY_JOB_ID": "01000000", "RAY_TRAIN_X": "1", "HOME": "/tmp"}
    (of_ray,) = forkserver.steps(common)
    assert of_ray["environment"] == {"RAY_JOB_ID": "01000000"}
    assert forkserver.steps({**common, forkserver.PRELOAD: "a,b"}) == [
        of_ray,
        {"environment": {}, "modules": ["a", "b"]},
    ]
    assert forkserver.steps({**common, "RAY_JOB_ID": "02000000"}) != [of_ray]


def test_the_path_of_python_is_quoted_where_a_shell_would_split_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["setup_worker.py", '--serialized-runtime-env-context={"env_vars": {"A": "1"}}', "w"]
    assert client.quoted(argv) == argv
    monkeypatch.setattr(sys, "executable", "/home/my project (é)/bin/python")
    first, context, last = client.quoted(argv)
    assert (first, last) == ("setup_worker.py", "w")
    assert client.context_of([context]) == {
        "env_vars": {"A": "1"},
        "py_executable": "'/home/my project (é)/bin/python'",
    }
    # Another Python's path is what the one who gave it has made of it.
    argv[1] = '--serialized-runtime-env-context={"py_executable": "/other/python -X dev"}'
    assert client.quoted(argv) == argv


def test_every_recipe_names_what_its_workers_import() -> None:
    for recipe in recipes.ALL:
        assert recipe.preloads.split(",")[0] == recipe.loop
        # torch's optimizers import it.
        assert ("torch._dynamo" in recipe.preloads) == (recipe.model is not Model.NONE)


# --- Ray on one machine ---------------------------------------------------------------------------
def logs(folder: Path, *, pid: int, own: str = "", raylet: str = "") -> Path:
    """A session's logs, in which one worker was started."""
    (folder / "raylet.out").write_text(
        f"[2026 I 1 1] worker_pool.cc:564: Started worker process with pid {pid} worker_id=c0ffee\n"
    )
    (folder / "raylet.err").write_text(raylet)
    if own:
        (folder / f"worker-c0ffee-01000000-{pid}.err").write_text(own)
    return folder


def lost_worker(folder: Path) -> str | None:
    return local_ray.LostWorkers().look(folder)


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_a_worker_that_has_ended_before_it_joined_is_told_with_its_last_words(
    tmp_path: Path,
) -> None:
    said = "bash: line 1: /home/my: No such file or directory"
    assert lost_worker(logs(tmp_path, pid=ended_process(), raylet=said)) == said
    crash = "Check failed: WarmupStore()"
    assert lost_worker(logs(tmp_path, pid=ended_process(), own=crash)) == crash


def test_a_worker_that_runs_or_had_joined_is_not_lost(tmp_path: Path) -> None:
    assert lost_worker(tmp_path) is None
    assert lost_worker(logs(tmp_path, pid=os.getpid())) is None
    joined = logs(tmp_path, pid=ended_process(), own=":job_id:01000000\n")
    assert lost_worker(joined) is None


def test_a_worker_that_ray_had_no_use_for_is_not_lost(tmp_path: Path) -> None:
    surplus = logs(tmp_path, pid=ended_process())
    assert lost_worker(surplus) is not None
    with (surplus / "raylet.out").open("a") as file:
        file.write(
            "[2026 I 1 1] (raylet) node_manager.cc:1477: Disconnecting worker, graceful=true, "
            "disconnect_type=1, has_creation_task_exception=false worker_id=c0ffee job_id=01\n"
        )
    assert lost_worker(surplus) is None


def test_a_second_look_reads_on_where_the_first_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = local_ray.LostWorkers()
    raylet = logs(tmp_path, pid=os.getpid()) / "raylet.out"
    assert lost.look(tmp_path) is None
    raylet.write_bytes(b"?" * raylet.stat().st_size)  # what was read is not read again
    line = f"[1] Started worker process with pid {ended_process()} worker_id=facade\n"
    with raylet.open("a") as file:
        file.write(line[:30])
        file.flush()
        assert lost.look(tmp_path) is None
        file.write(line[30:])
    assert "ended, and said nothing" in (lost.look(tmp_path) or "")
    # The worker of the first look is still known: it is lost as soon as its process has ended.
    monkeypatch.setattr(local_ray, "_is_running", lambda _pid: False)
    (tmp_path / "worker-c0ffee-1.err").write_text("killed")
    assert lost.look(tmp_path) == "killed"


def test_a_session_of_its_own_is_read_from_its_beginning(tmp_path: Path) -> None:
    lost = local_ray.LostWorkers()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert lost.look(logs(tmp_path / name, pid=ended_process(), own=name)) == name


def test_without_ids_of_users_rays_usual_folder_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.delattr(os, "getuid")
    try:
        assert local_ray.folder() == Path(os.environ["RAY_TMPDIR"], "ray")
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"])


def test_ray_is_as_it_was_once_the_hook_is_gone() -> None:
    from ray._private import services

    before = services.start_ray_process
    with forkserver.hook_ray(forkserver.NONE) as reason:
        assert reason is None
        assert services.start_ray_process is not before
    assert services.start_ray_process is before


def test_the_raylet_is_told_to_start_the_client_and_nothing_else_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import services

    asked: list[list[str]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, *_: asked.append(command))
    setup = Path(services.__file__).parent / "workers" / "setup_worker.py"
    usual = f"--python_worker_command={sys.executable} {setup}"
    with forkserver.hook_ray(forkserver.NONE):
        start: Callable[[list[str], str], None] = vars(services)["start_ray_process"]
        start([f"{usual} default_worker.py", "--other=1"], "raylet")
        start([f"{usual} default_worker.py"], "log_monitor")
    raylet, monitor = asked
    assert raylet[1] == "--other=1"
    assert raylet[0] == (
        f"--python_worker_command={sys.executable} -ISE {client.__file__} - {setup} "
        "default_worker.py"
    )
    assert monitor == [f"{usual} default_worker.py"]


def test_the_client_imports_nothing_of_this_project_and_nothing_heavy() -> None:
    """The raylet starts one for every worker, by itself and outside of any package."""
    shown = subprocess.run(
        [sys.executable, "-ISE", "-X", "importtime", client.__file__, "-", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "socket" in imported
    for name in ("training", "typing", "subprocess", "asyncio", "dataclasses", "numpy", "ray"):
        assert name not in imported


def test_ray_keeps_its_files_where_this_user_may_and_where_paths_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path("/tmp") / f"train-{os.getpid()}"
    short.mkdir()
    try:
        monkeypatch.setenv("RAY_TMPDIR", str(short))
        assert local_ray.folder() == short / "ray"
        (short / "ray").rmdir()
        (short / "ray").touch()  # as much in the way as another user's
        assert local_ray.folder() == short / f"ray-{os.getuid()}"
    finally:
        subprocess.run(["rm", "-r", str(short)], check=True)
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    assert deep not in local_ray.folder().parents


def test_without_any_folder_the_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("d" * 60)))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "ro")))
    with pytest.raises(InputError, match="RAY_TMPDIR"):
        local_ray.folder()


# --- real forks -----------------------------------------------------------------------------------
PROBE = """
import json, os, resource, signal, sys
from training.runtime import forkserver, local_ray
from training.runtime.forkserver import forked, parent
os.environ[forkserver.PRELOAD] = ""
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
if os.environ.get("BROKEN"):
    parent.WITHOUT_RAY = ("no_such_module",)
server = forkserver.ForkServer.start()
local_ray.start(num_cpus=2, verbose=False, server=server, expect=["", "this"])
import ray

def look():
    import time
    import numpy as np, psutil, torch
    from ray._raylet import JobID, ObjectRef, PlacementGroupID
    me = psutil.Process()
    time.sleep(1)  # so that the next one is another process
    return {
        "pid": me.pid,
        "parent": me.ppid(),
        "grandparent": me.parent().ppid(),
        "random": [np.random.random(), torch.initial_seed(), __import__("random").random()],
        "ids": [PlacementGroupID.of(JobID.from_int(1)).hex(), ObjectRef.from_random().hex()],
        "as_before": {
            "argv": [word.split("=")[0] for word in sys.argv],
            "arguments": os.path.basename(sys.argv[0]),
            "folder": os.getcwd(),
            "environment": sorted({*os.environ} - {"SPT_NOENV", "_", "BROKEN", "TRAIN_FORK"}),
            "nice": os.nice(0),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "interrupt": str(signal.getsignal(signal.SIGINT)),
            "terminate": str(signal.getsignal(signal.SIGTERM)).partition(" at ")[0],
            "group": os.getpgid(0) != os.getpgid(os.getppid()),
            "session": os.getsid(0) == os.getsid(os.getppid()),
            "main": __import__("__main__").__file__.rpartition("/")[2],
            "stdin": os.readlink("/proc/self/fd/0"),
            "memory": open("/proc/self/oom_score_adj").read(),
            "files_open": sum("memfd" in os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)),
            "logs": os.path.basename(os.readlink("/proc/self/fd/2")).partition("-")[0],
            "threads": torch.get_num_threads(),
            "imported": "torch._dynamo" in sys.modules,
        },
        "fork": "training.runtime.forkserver" in sys.modules and forked.is_fork,
    }

task = ray.remote(num_cpus=1)(look)
found = ray.get([task.remote(), task.remote()])
wheel = sys.argv[1] if len(sys.argv) > 1 else ""
if wheel:
    def greet():
        import greeting
        return greeting.WORDS, forked.is_fork
    other = ray.remote(num_cpus=1, runtime_env={"pip": [wheel]})(greet)
    found.append(ray.get(other.remote()))
logs = str(ray._private.worker._global_node.get_logs_dir_path())
print(json.dumps({"found": found, "server": server.pid if server else None, "logs": logs,
                  "complaint": server.complaint() if server else None}))
ray.shutdown()
if server:
    server.close()
"""


def probe(*arguments: str, **environment: str) -> dict[str, Any]:
    """Two tasks of a Ray started as for a run, and what they see of themselves."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    # A copy of the whole environment, two gigabytes, which Ray leaves behind.
    shutil.rmtree(Path(found["logs"]).parent / "runtime_resources", ignore_errors=True)
    return found


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe(str(write_wheel(tmp_path_factory.mktemp("wheel"))))


@pytest.mark.slow
@linux
def test_processes_of_ray_are_forks_that_share_nothing_but_their_modules(
    forked: dict[str, Any],
) -> None:
    first, second, _ = forked["found"]
    assert first["fork"]
    assert second["fork"]
    assert first["pid"] != second["pid"]
    # One server of Ray's for the job, made from the first one: two would import everything twice.
    assert first["parent"] == second["parent"] != forked["server"]
    assert first["grandparent"] == second["grandparent"] == forked["server"]
    assert not {*first["random"]} & {*second["random"]}
    assert not {*first["ids"]} & {*second["ids"]}


@pytest.mark.slow
@pytest.mark.night
@linux
def test_a_fork_sees_what_a_process_of_rays_own_sees(forked: dict[str, Any]) -> None:
    usual = probe(TRAIN_FORK="0")
    assert usual["server"] is None
    mine, theirs = forked["found"][0]["as_before"], usual["found"][0]["as_before"]
    assert not usual["found"][0]["fork"]
    assert mine == theirs


@pytest.mark.slow
@linux
def test_a_runtime_environment_with_packages_goes_the_usual_way(forked: dict[str, Any]) -> None:
    assert forked["found"][2] == ["installed", False]
    assert "its runtime environment has a" in (Path(forked["logs"]) / "raylet.err").read_text()


@pytest.mark.long
@pytest.mark.slow
@linux
def test_a_server_that_cannot_import_says_so_and_ray_goes_the_usual_way() -> None:
    found = probe(BROKEN="1")
    assert not any(each["fork"] for each in found["found"])
    assert "cannot import no_such_module" in found["complaint"]


# --- starts and kills -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.night
@linux
def test_a_run_starts_every_time_and_whatever_is_killed_nothing_is_left(tmp_path: Path) -> None:
    """The short form of ``python -m benchmarks.soak``: 5 clean starts, 4 of them after a kill."""
    soak = Soak(folder=tmp_path, seed=int(time.time()))
    soak.start()
    for target in TARGETS:
        soak.kill(target, max(5.0, soak.start_s[0]))
    print(f"seed {soak.seed}: {soak.kills}, {soak.start_s}")
    assert soak.failures == []


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., tuple["subprocess.Popen[str]", str]]]:
    soak = Soak(folder=tmp_path)
    started = []

    def start(**environment: str) -> tuple["subprocess.Popen[str]", str]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            started.append(soak._command("one"))
        return started[-1]

    yield start
    for process, mark in started:
        process.kill()
        process.communicate()
        meter.kill(meter.marked(mark))


def first_of(kind: str, process: "subprocess.Popen[str]", mark: str) -> psutil.Process:
    deadline = time.monotonic() + 120
    while True:
        found = [each for each in meter.marked(mark) if kind_of(each, process.pid) == kind]
        if found:
            return min(found, key=lambda each: each.create_time())
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.night
@linux
def test_a_server_that_is_killed_in_mid_run_ends_the_run_or_not_but_leaves_nothing(
    command: Callable[..., tuple["subprocess.Popen[str]", str]],
) -> None:
    process, mark = command()
    first_of("worker", process, mark)
    first_of("server", process, mark).send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=240)
    assert process.returncode in (0, 1), said
    deadline = time.monotonic() + 30
    while meter.marked(mark):
        assert time.monotonic() < deadline, meter.marked(mark)
        time.sleep(0.1)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("moment", ["before they know each other", "before they are told to train"])
def test_a_worker_lost_while_they_start_is_replaced_at_once(
    command: Callable[..., tuple["subprocess.Popen[str]", str]], tmp_path: Path, moment: str
) -> None:
    """Ray Train alone waits ten minutes for what the others hold, or ends the run."""
    lost = tmp_path / "lost"
    process, _ = command(
        RAY_TRAIN_CALLBACKS="tests.training.lost_at_start.LosesAWorker",
        LOSE_A_WORKER=moment,
        LOST_A_WORKER=str(lost),
    )
    _, said = process.communicate(timeout=120)
    assert lost.exists()
    assert process.returncode == 0, said


@pytest.mark.slow
@linux
def test_a_worker_that_cannot_start_ends_the_command_with_what_it_said(
    command: Callable[..., tuple["subprocess.Popen[str]", str]], tmp_path: Path
) -> None:
    """As Python does where its path is wrong: it ends at once. Ray alone would wait for minutes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "if any('default_worker.py' in word for word in sys.orig_argv):\n"
        "    sys.exit('this worker cannot start')\n"
        "if 'training.launch' in sys.orig_argv:\n"
        "    heavy = ('torch', 'ray.train', 'pandas', 'transformers')\n"
        "    loaded = lambda: [name for name in heavy if name in sys.modules]\n"
        "    atexit.register(lambda: print('loaded:', loaded(), file=sys.stderr))\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    began = time.monotonic()
    process, _ = command(TRAIN_FORK="0", PYTHONPATH=path)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert "Ray could not start a worker process" in said
    assert "this worker cannot start" in said
    assert "driver.py" not in said, "no traceback of the command itself"
    assert "loaded: []" in said, "what only its tasks need"
    assert time.monotonic() - began < 120
