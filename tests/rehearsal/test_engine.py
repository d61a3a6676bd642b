"""A missing, stopped or too old Docker Engine is named, and child processes end when they must.

The docker command here is a script that answers as the real one does; the real one is the business
of ``test_in_containers``.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from containers import publish
from rehearsal import children, cycle, image_builds
from rehearsal.children import CommandError
from rehearsal.engine import Engine, EngineError, check_space, find_engine
from tests.conftest import ROOT
from tests.eventually import eventually

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts scripts called ``docker`` on the PATH, one folder each, and nothing else."""
    folders: list[Path] = []
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))

    def add(*, version: str = "20.10.24", buildx: bool = False, answers: bool = True) -> None:
        folder = tmp_path / f"bin{len(folders)}"
        folder.mkdir()
        script = folder / "docker"
        script.write_text(
            "#!/bin/sh\ncase $1 in\n"
            f"buildx) exit {0 if buildx else 1} ;;\n"
            "context) echo unix:///var/run/docker.sock ;;\n"
            "version) "
            + (f"echo {version} 20.10.24" if answers else "echo no daemon >&2; exit 1")
            + " ;;\ninfo) echo /var/lib/docker-of-another-machine ;;\nesac\n"
        )
        script.chmod(0o755)
        folders.append(folder)
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))

    return add


@pytest.mark.parametrize(
    ("docker", "missing"),
    [
        (None, "no docker command"),
        ({"answers": False}, "unix://"),
        ({"version": "28.2.2"}, "BuildKit"),
    ],
)
def test_what_an_engine_lacks_is_named(
    docker: dict[str, Any] | None, missing: str, install: Install
) -> None:
    if docker is not None:
        install(**docker)
    with pytest.raises(EngineError, match=missing):
        find_engine()


@pytest.mark.parametrize(
    "client",
    [{"version": "20.10.24"}, {"version": "28.2.2", "buildx": True}],
    ids=["builds by itself", "has buildx"],
)
def test_a_client_that_can_build_is_taken_also_behind_one_that_cannot(
    client: dict[str, object], install: Install, tmp_path: Path
) -> None:
    install(version="28.2.2")
    install(**client)
    assert find_engine().client == str(tmp_path / "bin1" / "docker")


def test_a_full_disk_is_found_before_anything_is_built(
    tmp_path: Path,
) -> None:
    script = tmp_path / "docker"
    script.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    script.chmod(0o755)
    engine = Engine(client=str(script), address="unix:///nowhere")
    check_space(engine, needed_gb=0.001, what="the images need")
    with pytest.raises(EngineError, match=r"too little space: .* has .* GB free.*system prune"):
        check_space(engine, needed_gb=10**6, what="the images need")


def test_elsewhere_than_on_linux_it_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rehearsal.cycle.sys.platform", "darwin")
    with pytest.raises(cycle.RehearsalError, match="runs on Linux"):
        cycle.Rehearsal.here()


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One that nothing may be asked of."""
    monkeypatch.setattr(image_builds, "check_space", lambda *_, **__: None)
    return Engine(client="docker", address="unix:///nowhere")


def test_images_are_built_unless_the_engine_has_them_of_this_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_engine: Engine
) -> None:
    built: list[str] = []
    label: dict[str, str] = {}

    def build(_docker: publish.Docker, *, git_sha: str, **_options: object) -> None:
        built.append(git_sha)
        label[image_builds.REVISION_LABEL] = git_sha

    monkeypatch.setenv("TORCH_INDEX", "https://index.example")
    monkeypatch.setattr(publish, "build", build)
    monkeypatch.setattr(
        Engine, "inspect", lambda *_: {"Config": {"Labels": label}} if label else None
    )
    monkeypatch.setattr(image_builds, "_reachable", lambda _engine, image: image)
    monkeypatch.setattr(Engine, "__call__", lambda *_, **__: "")  # it has no older images
    docker = image_builds.QuietDocker(
        client="docker", environment={}, name="n", log=tmp_path / "log"
    )
    # Another base makes other images, which the tag does not tell.
    for commit, base in (("a", ""), ("a", ""), ("b", ""), ("b", "another")):
        monkeypatch.setenv("BASE_IMAGE", base)
        monkeypatch.setattr(image_builds, "_git_sha", lambda sha=commit: sha)
        found = image_builds.build(no_engine, docker, image_tag="t", say=print)
        assert found == {node: f"ecs-train-{node}:t" for node in ("head", "worker")}
    assert built == ["a", "b", "b"]


DOCKER = """\
#!/bin/sh
# An engine with a folder per checkout and a file per image, its name without the colon; "used" in
# it: by a container.
cd "$(dirname "$0")/images"
label=$(echo "$4" | sed 's/label=ecs-train.built-by=//')
case "$*" in
*dangling=true*) ls "$label" | grep '^unnamed' ;;
*reference=*)
    name=$(echo "$6" | sed 's/.*=//; s/:.*//')
    ls -t "$label" | grep "^$name-content" | sed 's/-content/:content/' ;;
"image rm "*)
    file=$(ls -d */"$(echo "$3" | sed 's/:/-/')")
    ! grep -q used "$file" && rm "$file" && echo "$3" ;;
*) exit 2 ;;
esac
"""


def test_older_images_of_this_checkout_are_removed_unless_a_container_uses_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "docker"
    script.write_text(DOCKER)
    script.chmod(0o755)
    stored = tmp_path / "images"
    (stored / "this").mkdir(parents=True)
    (stored / "another").mkdir()
    for age, number in enumerate([5, 4, 3, 2, 1]):
        for node in ("head", "worker"):
            path = stored / "this" / f"ecs-train-{node}-content-{number}"
            path.write_text("used" if (node, number) == ("worker", 1) else "")
            os.utime(path, (0, 10**9 - age))
            (stored / "another" / f"ecs-train-{node}-content-{number + 10}").touch()
    (stored / "this" / "unnamed").touch()
    (stored / "another" / "unnamed-too").touch()
    engine = Engine(client=str(script), address="unix:///nowhere")
    # What is built may be old: the engine had it, and only its label was renewed.
    built = {node: f"ecs-train-{node}:content-2" for node in ("head", "worker")}
    assert image_builds._remove_older(engine, built, name="this") == 4
    kept = {path.name.removeprefix("ecs-train-") for path in (stored / "this").iterdir()}
    assert kept == {
        *("head-content-5", "head-content-4", "head-content-2"),
        *("worker-content-5", "worker-content-4", "worker-content-2", "worker-content-1"),
    }
    assert len([*(stored / "another").iterdir()]) == 11


def test_a_registry_that_ends_at_once_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "docker-registry"
    broken.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(image_builds, "registry_program", lambda: str(broken))
    with pytest.raises(image_builds.RegistryError, match="out of luck"):
        image_builds.start_registry(tmp_path / "registry", name=f"test-{os.getpid()}")


# --- other programs -------------------------------------------------------------------------------
def run(script: str, **arguments: object) -> str:
    command = [sys.executable, "-c", script]
    return children.run(command, environment=os.environ, folder=ROOT, **arguments)  # type: ignore[arg-type]


def test_what_a_program_prints_is_returned(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr)"
    assert run(script, log=tmp_path / "log") == "out\n"
    assert run(script, streams_together=True) in ("out\nerr\n", "err\nout\n")


def test_a_program_that_fails_or_hangs_is_an_error_with_its_words() -> None:
    with pytest.raises(CommandError, match=r"(?s)failed with exit code 3:.*no luck"):
        run("import sys; sys.exit('no luck') if 0 else print('no luck'); sys.exit(3)")
    with pytest.raises(CommandError, match="printed nothing for 0 s"):
        run("import time; time.sleep(60)", silent_s=0.3)
    # A line is a sign of life, however long it takes in all.
    printing = "import time\nfor _ in range(12): time.sleep(0.1); print(1, flush=True)"
    assert run(printing, silent_s=1.0) == "1\n" * 12


def test_an_interruption_ends_the_program_and_all_that_it_has_started(tmp_path: Path) -> None:
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    script = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60) # {mark}'])\n"
        f"open({str(tmp_path / 'up')!r}, 'w').close()\n"
        "time.sleep(60)\n"
    )

    def interrupt() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), children.interruptible():
        run(script)

    def is_gone() -> bool:
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        return mark not in shown.stdout

    # The system takes a moment to end what was killed.
    eventually("all has ended", is_gone, timeout_s=5)


def test_processes_are_found_by_their_mark_and_ended_even_if_they_do_not_want_to(
    tmp_path: Path,
) -> None:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    for role in ("a", "b"):
        children.start(
            [sys.executable, "-c", stubborn],
            name=name,
            role=role,
            environment={"PATH": os.environ["PATH"]},
            log=tmp_path / role,
        )
    assert len(children.find(name)) == 2
    assert len(children.find(name, "b")) == 1
    time.sleep(0.3)  # until it ignores the signal
    assert children.end(name, timeout_s=0.5) == 2
    assert children.find(name) == []
    assert children.end(name, timeout_s=0.5) == 0


# --- long steps -----------------------------------------------------------------------------------
def test_what_a_program_prints_is_in_the_log_while_it_runs(tmp_path: Path) -> None:
    log, seen = tmp_path / "log", tmp_path / "seen"
    script = (
        "import os, time\nprint('first', flush=True)\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\nprint('last')\n"
    )

    def look() -> None:
        while not log.exists() or "first\n" not in log.read_text():
            time.sleep(0.01)
        seen.touch()

    threading.Thread(target=look, daemon=True).start()
    assert run(script, log=log, silent_s=30) == "first\nlast\n"


@pytest.mark.parametrize(
    ("is_terminal", "printed", "shown"),
    [
        (
            True,
            ["#14 [worker 4/17] RUN pip install torch", "#14 12.3 Collecting torch"],
            "step 4 of 17",
        ),
        (False, ["Step 4/17 : RUN pip install torch"], "step 4 of 17"),
        (False, ["CoreStack |  3/40 | CREATE_COMPLETE", "513326ee: Pushed"], "3 of 40 resources"),
    ],
    ids=["buildkit", "legacy", "cdk"],
)
def test_a_long_step_shows_what_it_is_at_and_for_how_long(
    is_terminal: bool, printed: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "QUIET_S", 0.05)
    reader, writer = os.openpty() if is_terminal else os.pipe()
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with children.Steps(7).step("build the images"):
            run(f"import time; print({chr(10).join(printed)!r}, flush=True); time.sleep(0.4)")
        monkeypatch.undo()
    with os.fdopen(reader, "rb", buffering=0) as shown_there, contextlib.suppress(OSError):
        said = b""
        while part := shown_there.read(4096):  # of a terminal that is closed: an error at the end
            said += part
    # On a terminal each line takes the place of the one before it.
    lines = said.decode().split("\r\x1b[K" if is_terminal else "\n")
    moving = [
        each for each in lines if re.search(rf"1/7\] build the images: .*{shown}.*, \d s", each)
    ]
    assert len(moving) > 1
    assert re.search(r"1/7\] build the images \.\.\. \d s\s*$", said.decode())
