"""`make` explains itself to a newcomer, and a failed installation says why in plain words."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.conftest import ROOT
from training import command, launch

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without what an outer make passes on, which names targets and flags of its own.
    inherited = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_next_step_after_the_demo_takes_a_folder_of_pictures_for_each_class(
    tmp_path: Path,
) -> None:
    (words,) = re.findall(r"trainctl run (.*--data DIR)", run("make", "-n", "demo").stdout)
    for name in ("cats/1.jpg", "cats/2.jpg", "dogs/1.jpg", "dogs/2.jpg"):
        (tmp_path / "pics" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pics" / name).touch()
    given = words.replace("DIR", str(tmp_path / "pics")).split()
    config, _ = launch.configured(
        command.parse([*given, "--local", "--storage", str(tmp_path / "runs")])
    )
    assert (config.recipe, config.run) == ("imagenet", "mine")


@pytest.mark.parametrize("target", ["diff", "deploy", "destroy"])
def test_a_failure_of_the_cdk_names_the_command_that_finds_why(target: str) -> None:
    done = run("make", "-o", "venv-laptop", "-o", "node", target, "CDK=false", "PYTHON=true")
    assert done.returncode
    assert "trainctl doctor" in done.stderr


def fake_python(folder: Path, answer: str) -> str:
    """A program that answers, whatever it is asked, as a Python would describe itself."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {answer}\n")
    path.chmod(0o755)
    return str(path)


def node_project(folder: Path, *, node: str | None, npm: str | None) -> dict[str, str]:
    """A project in ``folder``, and a PATH on which Node and npm are these scripts, or lacking."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "node", folder / ".ci" / "node")
    (folder / "package-lock.json").write_text("{}")
    programs = folder / "bin"
    programs.mkdir()
    for name in ["sh", "dirname", "cmp", "cp", "date", "mkdir", "rm"]:
        (programs / name).symlink_to(shutil.which(name) or name)
    for name, script in {"node": node, "npm": npm}.items():
        if script is not None:
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
    return {"PATH": str(programs)}


@pytest.mark.parametrize(
    ("node", "npm", "message"),
    [
        (None, None, "no Node.js found"),
        ("echo v18.19.0", "exit 0", "Node.js v18.19.0 is too old: install Node.js 22 or 24"),
        ("echo v20.1.0", None, "no npm found beside Node.js v20.1.0"),
        ("echo v20.1.0", "exit 1", "npm could not install"),
    ],
)
def test_a_node_that_will_not_do_is_named_with_the_remedy(
    node: str | None, npm: str | None, message: str, tmp_path: Path
) -> None:
    attempt = run("sh", ".ci/node", cwd=tmp_path, **node_project(tmp_path, node=node, npm=npm))
    assert attempt.returncode == 1
    assert f"error: {message}" in attempt.stderr
    assert not (tmp_path / "node_modules" / ".installed-lock.json").exists()


def test_cleaning_removes_what_make_has_made(tmp_path: Path) -> None:
    ours = ["cdk.out/a", "build/site/a", ".venv-docs/install.log", "node_modules/a", ".uv/a"]
    ours += ["training/data/__pycache__/a", "ecs_train.egg-info/a", ".venv-aws/install.log"]
    users = [".venv/pyvenv.cfg", ".venv-aws/adopted", "build/results.csv", "dist/mine.whl"]
    users += ["runs/mine/config.json", "data/a", "own.egg-info/a", "mine/__pycache__/a"]
    users += [".venv-audit/pyvenv.cfg", "env/pyvenv.cfg"]
    for name in (
        "contract",
        "store",
        "trainctl",
        "stacks",
        "containers",
        "benchmarks",
        "rehearsal",
        "tests",
    ):
        (tmp_path / name).mkdir()
    for name in (*ours, *users, "Makefile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = run("make", "distclean", cwd=tmp_path)
    left = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert left == {*users, "Makefile", ".venv-aws/install.log"}, done.stderr


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("unsupported usable 3.10.13 /bin/p", "Python 3.11, 3.12 or 3.13 is needed"),
        ("unsupported usable 3.14.0 /bin/p", "is Python 3.14.0"),
        ("supported novenv 3.12.1 /bin/p", "apt-get install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_the_remedy(
    answer: str, message: str, tmp_path: Path
) -> None:
    environment = tmp_path / ".venv"
    python = fake_python(tmp_path, answer)
    attempt = run("sh", ".ci/venv", str(environment), PYTHON_BIN=python)
    assert attempt.returncode == 1
    assert message in attempt.stderr
    assert python in attempt.stderr
    assert not environment.exists()


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    attempt = run("sh", ".ci/venv", str(tmp_path / ".venv"), PYTHON_BIN="/no/such/python")
    assert attempt.returncode == 1
    assert "found none of /no/such/python" in attempt.stderr


# --- environments ---------------------------------------------------------------------------------
#: Notes how it was called and what it was told, and makes environments, but installs nothing.
#: ``$FAILS``: the arguments at which it fails.
UV = """\
#!/bin/sh
case "$1" in
    --version) exec echo uv 1.2.3 ;;
    cache) exec echo "${CACHE:-cache}" ;;
esac
echo "$@" >>calls
env | grep -E '^(UV_|SSL_CERT_FILE|ALL_PROXY)' | sort >told
case "$1" in venv) "$4" -m venv --without-pip "$5" ;; esac
case "$*" in *"${FAILS:-nothing}"*) echo no such package; exit 1 ;; esac
"""
#: A Python to install uv with. Only where ``$PIP`` names one with a pip, that pip has settings.
PYTHON = """\
#!/bin/sh
case "$*" in
    "-m venv .uv") mkdir -p .uv/bin && cp "$0" .uv/bin/python ;;
    "-m pip install "*) cp uv .uv/bin/uv; echo "$@" >>calls ;;
    "-m pip config list") ${PIP:-true} -m pip config list ;;
esac
"""


class Checkout:
    """A folder with what `.ci/venv` reads, and a uv that is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        lock = "uv==1.2.3 \\\n    --hash=sha256:abc\ntorch==2.13.0\nyarl==1\n"
        for name, text in {
            "requirements.lock": lock,
            "requirements.txt": "-r requirements/laptop.txt  # one\n-r requirements/training.txt\n",
            "requirements/laptop.txt": "rich",
            "requirements/training.txt": "torch",
            "pyproject.toml": "",
            "training/__init__.py": "",
        }.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        for path, text in {"uv": UV, "python": PYTHON}.items():
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        run("sh", ".ci/uv", "first", cwd=folder, PYTHON_BIN=str(folder / "python"))
        self.calls()

    def make(self, *arguments: str, before: str = "", code: int = 0, **environment: str) -> str:
        """Bring `.venv` up to date, as the Makefile does; the messages."""
        options = shlex.join(["-c", "requirements.lock", "-e", ".", "pip", *arguments])
        done = run(
            *("sh", "-c", f"{before} sh .ci/venv .venv {options}"),
            cwd=self.folder,
            **({"PYTHON_BIN": "", "TORCH_INDEX": ""} | environment),
        )
        assert done.returncode == code, done.stderr
        return done.stderr

    def calls(self) -> list[str]:
        """The calls of uv (and of the pip that installed it) since the last look."""
        path = self.folder / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def told(self) -> dict[str, str]:
        """The variables that uv had at its last call."""
        lines = (self.folder / "told").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_uv_gets_the_settings_of_pip_and_keeps_its_own(checkout: Checkout) -> None:
    def told(**environment: str) -> dict[str, str]:
        none = {name: "" for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_CERT"))}
        # Neither the settings of this machine nor those of its user.
        none |= {"PIP": sys.executable, "PIP_CONFIG_FILE": os.devnull}
        done = run("sh", ".ci/uv", "x", cwd=checkout.folder, **(none | environment))
        assert done.returncode == 0, done.stderr
        return {name: value for name, value in checkout.told().items() if value}

    assert told() == {"UV_PYTHON_DOWNLOADS": "never"}
    # Like pip: a home that cannot be written to is no error.
    assert told(CACHE=f"{os.devnull}/uv")["UV_NO_CACHE"] == "1"

    (checkout.folder / "pip.conf").write_text(
        "[global]\nindex-url = https://file\nfind-links =\n  /a\n  /b\ntimeout = 60\n"
    )
    of_file = told(PIP_CONFIG_FILE="pip.conf")
    assert of_file["UV_DEFAULT_INDEX"] == "https://file"
    assert of_file["UV_FIND_LINKS"] == "/a,/b"
    assert of_file["UV_HTTP_TIMEOUT"] == "60"

    of_variables = told(
        PIP_INDEX_URL="https://mine",
        PIP_EXTRA_INDEX_URL="https://more https://other",
        PIP_CERT="/cert",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="/c /d",
        PIP_DEFAULT_TIMEOUT="9",
        UV_HTTP_TIMEOUT="5",
    )
    assert of_variables == {
        "UV_DEFAULT_INDEX": "https://mine",
        "UV_INDEX": "https://more https://other",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/cert",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": "/c,/d",
        "UV_HTTP_TIMEOUT": "5",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def test_packages_join_an_environment_and_a_changed_lock_makes_it_again(checkout: Checkout) -> None:
    node, laptop = ("-r", "requirements/training.txt"), ("-r", "requirements/laptop.txt")
    both = ("-r", "requirements.txt")  # it stands for the files that it names
    assert "(new)" in checkout.make(*node)
    assert checkout.make(*laptop) != ""
    assert checkout.make(*laptop) == checkout.make(*node) == ""
    checkout.make(*both)
    (checkout.folder / "requirements" / "training.txt").write_text("torch ray")
    assert checkout.make(*both) != ""
    assert checkout.make(*both) == ""
    with (checkout.folder / "requirements.lock").open("a") as lock:
        lock.write("zipp==1\n")
    assert "has changed" in checkout.make(*node)


def test_an_interrupted_or_failed_installation_is_done_over(checkout: Checkout) -> None:
    laptop = ("-r", "requirements/laptop.txt")
    checkout.make()
    pieces = checkout.folder / ".venv" / "pieces"

    # Ctrl-C while packages join: uv dies, and its caller with it.
    pieces.touch()
    shutil.copy(checkout.folder / ".uv/bin/uv", checkout.folder / "uv")
    (checkout.folder / ".uv/bin/uv").write_text(
        UV.replace("echo no such package; exit 1", "kill -INT 0")
    )
    options = ["-c", "requirements.lock", "-e", ".", "pip", *laptop]
    killed = subprocess.run(
        ["sh", ".ci/venv", ".venv", *options],
        cwd=checkout.folder,
        env=os.environ
        | {"PYTHON_BIN": "", "TORCH_INDEX": "", "FAILS": "-r requirements/laptop.txt"},
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    assert killed.returncode != 0
    shutil.copy(checkout.folder / "uv", checkout.folder / ".uv/bin/uv")
    # Also where python3 is the environment's own, which is removed.
    said = checkout.make(before=". .venv/bin/activate &&", PYTHON_BIN="python3")
    assert "did not finish" in said
    assert not pieces.exists()
    assert checkout.make() == ""

    failed = checkout.make(*laptop, code=1, FAILS="-r requirements/laptop.txt")
    assert "  | no such package\n" in failed
    assert ".venv/install.log" in failed
    assert "did not finish" in checkout.make()


def test_a_folder_that_make_has_not_made_is_kept(checkout: Checkout) -> None:
    of_conda = checkout.folder / ".venv" / "conda-meta" / "history"
    of_conda.parent.mkdir(parents=True)
    of_conda.touch()
    said = checkout.make(code=1)
    assert "make did not make .venv" in said
    assert "remove .venv, or give it Python" in said
    assert of_conda.exists()


def test_an_environment_made_by_hand_is_installed_into_and_never_removed(
    checkout: Checkout,
) -> None:
    laptop = ("-r", "requirements/laptop.txt")
    place = checkout.folder / ".venv"
    venv.create(place)
    (place / "mine").touch()
    checkout.calls()

    # Also after an installation that failed, and with another lock.
    checkout.make(*laptop, code=1, FAILS="-r requirements/laptop.txt")
    assert "ready" in checkout.make(*laptop)
    assert checkout.make(*laptop) == ""
    with (checkout.folder / "requirements.lock").open("a") as lock:
        lock.write("zipp==1\n")
    assert "ready" in checkout.make(*laptop)
    assert [call.partition(" ")[0] for call in checkout.calls()] == ["pip"] * 3
    assert (place / "mine").exists()

    said = checkout.make(*laptop, code=1, PYTHON_BIN=sys.executable)
    assert "make did not make .venv" in said
    assert (place / "mine").exists()

    node = ("-r", "requirements/training.txt")
    checkout.make(*node, TORCH_INDEX="https://torch.example")
    assert checkout.make(*node) == "", "the index is remembered"


@pytest.mark.parametrize("listed", ["requirements/training.txt", "requirements.txt"])
def test_torch_alone_comes_from_its_index_which_is_remembered(
    checkout: Checkout, listed: str
) -> None:
    node = ("-r", listed)
    checkout.make(*node, TORCH_INDEX="https://torch.example")
    _, torch, rest = checkout.calls()
    assert torch == "pip install --python .venv --no-deps torch==2.13.0"
    assert rest.endswith(f"-r {listed}")
    assert "torch.example" not in "".join(checkout.told().values())
    assert checkout.make(*node) == ""
    # Made again, from the same index.
    (checkout.folder / ".venv" / "ready").unlink()
    checkout.make(*node)
    assert len(checkout.calls()) == 3

    failed = checkout.make(*node, code=1, TORCH_INDEX="https://other.example", FAILS="--no-deps")
    assert "torch from the index in .venv/torch-index ... failed" in failed
    assert checkout.told()["UV_INDEX"] == "https://other.example"
    assert checkout.told()["UV_DEFAULT_INDEX"] == "https://other.example"
