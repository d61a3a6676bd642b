"""Requirements are installed beside what the image has: with its uv, from wheels made here."""

import functools
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from containers.program.files.s3_files import PreparationStopped
from containers.program.start import packages
from contract.errors import InputError
from contract.requirements import file_of, source_folders
from tests.conftest import write_wheel


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv reaches what a test gives it, and nothing else."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_OFFLINE", "1")


def folder_with(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def install(folder: Path, **options: object) -> Path | None:
    """The new environment; None where nothing is asked for."""
    target = folder.with_name(f"{folder.name}-environment")
    found = packages.install(folder, target, **options)  # type: ignore[arg-type]
    return target if found else None


def names(folder: Path | None) -> list[str]:
    assert folder is not None
    return sorted(each.name for each in packages.site_packages(folder).glob("*.py"))


def test_an_installation_ends_when_its_node_has_to(tmp_path: Path) -> None:
    code = folder_with(tmp_path / "code", requirements__txt="greeting\n")
    with pytest.raises(PreparationStopped):
        install(code, should_stop=lambda: True)


@pytest.mark.parametrize("quiet_s", [0.0, 60.0])
def test_what_uv_prints_is_shown_while_a_long_installation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_s: float
) -> None:
    """This one goes on once its first line is shown, or at once where none is to be."""
    uv, shown = tmp_path / "uv", tmp_path / "shown"
    uv.write_text(
        f"#!/bin/sh\necho Resolved\nuntil [ -s {shown} ]; do sleep 0.02; done\necho + greeting\n"
    )
    uv.chmod(0o755)
    shown.write_text("at once\n" if quiet_s else "")
    ends = time.monotonic() + 20

    def say(line: str) -> None:
        with shown.open("a") as file:
            file.write(f"{line}\n")

    monkeypatch.setattr(packages, "say", say)
    monkeypatch.setattr(packages, "_QUIET_S", quiet_s)
    monkeypatch.setattr(sys, "executable", str(uv))
    _, said = packages._uv(["pip"], tmp_path, dict(os.environ), lambda: time.monotonic() > ends)
    assert said == "Resolved\n+ greeting"
    assert shown.read_text() == ("at once\n" if quiet_s else f"{said}\n")


def test_what_is_shown_of_a_long_installation_names_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_QUIET_S", 0.0)
    write_wheel(tmp_path)
    install(
        folder_with(
            tmp_path / "code", requirements__txt=f"{tmp_path}/greeting-1.0-py3-none-any.whl\n"
        )
    )
    assert "node:  + greeting==1.0 (from file:" in capsys.readouterr().err


def test_a_command_may_install_packages_itself(tmp_path: Path) -> None:
    code = folder_with(tmp_path / "code", train__py="")
    assert install(code) is None, "there is no list"
    write_wheel(tmp_path, requires="numpy")
    place = tmp_path / "code-environment"
    command = "pip install --no-index --find-links . greeting && python -c 'import greeting, numpy'"
    # A name of this project would be found by mistake.
    command += " && python -c 'import contract'"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{place}/bin{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert "Requirement already satisfied: numpy" in done.stdout, done.stderr
    assert names(place) == ["greeting.py"]
    assert done.stderr.endswith("No module named 'contract'\n")


def test_packages_lie_beside_those_of_the_image_which_are_not_taken_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = [
        write_wheel(tmp_path, script="greet = greeting:main", requires="numpy"),
        write_wheel(tmp_path, name="torch"),
        write_wheel(tmp_path, name="torchvision"),
    ]
    listed = "".join(f"{each}\n" for each in wheels)
    code = folder_with(tmp_path / "code", requirements__txt=f"{listed}numpy>=1\nray[train]\n")
    found = install(code)
    assert names(found) == ["greeting.py", "torch.py", "torchvision.py"]
    assert found is not None
    # Nothing else claims to be in the environment: entry points would be looked for there.
    assert sorted(each.name for each in packages.site_packages(found).glob("*-info")) == [
        "greeting-1.0.dist-info",
        "torch-1.0.dist-info",
        "torchvision-1.0.dist-info",
    ]
    done = subprocess.run([found / "bin" / "greet"], env={}, capture_output=True, text=True)
    assert done.stdout == "installed\n", done.stderr
    torchrun = found / "bin" / "torchrun"  # of the image, for the same Python
    assert torchrun.read_text().startswith(f"#!{found}/bin/python")
    assert os.access(torchrun, os.X_OK)
    imported = subprocess.run([found / "bin" / "python", "-c", "import numpy, ray"], env={})
    assert imported.returncode == 0
    said = capsys.readouterr().err
    assert "torchvision cannot" not in said


@pytest.mark.parametrize("fits", [True, False])
def test_a_package_of_the_image_that_the_list_breaks_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fits: bool
) -> None:
    """As litgpt's huggingface_hub 1.3 breaks transformers 5.23."""
    write_wheel(tmp_path, name="huggingface_hub", version="1.3.7")
    if fits:
        older = {"name": "transformers", "version": "5.0.0", "requires": "huggingface_hub<1.4"}
        write_wheel(tmp_path, **older)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code = folder_with(tmp_path / "code", requirements__txt="huggingface_hub==1.3.7\n")
    renewed = ["transformers.py"] if fits else []
    assert names(install(code)) == ["huggingface_hub.py", *renewed]
    warned = "WARNING: transformers requires `huggingface-hub" in capsys.readouterr().err
    assert warned is not fits


@pytest.mark.parametrize("fitting", [[], ["torchvision.py"]])
def test_another_torch_brings_its_own_torchvision_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitting: list[str]
) -> None:
    write_wheel(tmp_path, name="torch")
    if fitting:
        write_wheel(tmp_path, name="torchvision", requires="torch==1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code = folder_with(tmp_path / "code", requirements__txt="torch==1.0\n")
    assert names(install(code)) == ["torch.py", *fitting]


def test_a_torchvision_that_cannot_be_imported_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = write_wheel(tmp_path, name="torchvision", requires="torch")
    broken = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr("torchvision/__init__.py", broken)  # found before torchvision.py
    install(folder_with(tmp_path / "code", requirements__txt=f"{wheel}\n"))
    said = capsys.readouterr().err
    assert "torchvision cannot be imported beside torch 2." in said
    assert "RuntimeError: operator torchvision::nms does not exist\n" in said
    assert "built for another torch" in said


@pytest.mark.parametrize(
    ("image", "given", "backend"),
    [
        ("2.13.0+cpu", {}, "cpu"),
        ("2.13.0", {}, None),  # of the default index, which has what fits it
        ("2.13.0+git1", {}, None),
        ("2.13.0+cpu", {"PIP_INDEX_URL": "https://example.org/simple"}, None),
    ],
)
def test_torchvision_comes_from_the_index_of_the_images_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    image: str,
    given: dict[str, str],
    backend: str | None,
) -> None:
    asked: list[tuple[str | None, ...]] = []

    def uv(
        words: list[str], _code: Path, variables: dict[str, str], _stop: object
    ) -> tuple[int, str]:
        if words[1] == "install":
            asked.append((variables.get("UV_TORCH_BACKEND"), variables.get("UV_DEFAULT_INDEX")))
        return 0, ""

    monkeypatch.setattr(packages, "_uv", uv)
    versions = {"ray": "2.60.0", "torch": image}
    monkeypatch.setattr(packages, "_version", lambda name, _folders: versions.get(name, ""))
    install(folder_with(tmp_path / "code", requirements__txt="torchvision\n"), environment=given)
    assert asked == [(backend, given.get("PIP_INDEX_URL"))]


def test_wheels_on_a_web_server_are_found_where_pip_must_not_use_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_OFFLINE")
    write_wheel(tmp_path)
    code = folder_with(tmp_path / "code", requirements__txt="greeting\n")
    serve = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        given = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": address}
        assert names(install(code, environment=given)) == ["greeting.py"]
        server.shutdown()


def test_another_ray_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, name="ray")
    code = folder_with(tmp_path / "code", requirements__txt=f"--find-links {tmp_path}\nray==1.0\n")
    with pytest.raises(InputError, match=r"(?s)asks for another Ray than \d.*leave ray out of it"):
        install(code)


def test_packages_in_a_folder_src_are_found(tmp_path: Path) -> None:
    code = folder_with(tmp_path / "code", pyproject__toml="[project]\n")
    assert source_folders(code) == (".",)
    (code / "src").mkdir()
    assert source_folders(code) == (".", "src")


def test_programs_of_the_folders_own_project_run(tmp_path: Path) -> None:
    listed = "[project]\nname = 'x'\nscripts = {mine = 'tool:App.run', other = 'tool'}\n"
    tool = "class App:\n    def run():\n        return 7\n"
    code = folder_with(tmp_path / "code", pyproject__toml=listed, tool__py=tool)
    install(code)
    program = tmp_path / "code-environment" / "bin" / "mine"
    done = subprocess.run([program], cwd=code, env={"PYTHONPATH": "."}, check=False)
    assert done.returncode == 7
    # What is no function, and what would take the place of the environment's own Python.
    listed = "[project]\nname = 'x'\nscripts = {python = 'tool:App.run', other = 'tool'}\n"
    (code / "pyproject.toml").write_text(listed)
    install(code)
    assert not program.with_name("other").exists()
    assert program.with_name("python").is_symlink()
    done = subprocess.run([program.with_name("python"), "-c", "print(1)"], stdout=subprocess.PIPE)
    assert done.stdout == b"1\n"


def test_included_lists_editable_folders_and_constraints_count(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    code = folder_with(tmp_path / "code", requirements__txt="-r more.txt\n-c limits.txt\n")
    own = code / wheel.name
    own.write_bytes(wheel.read_bytes()[:100])
    (code / "more.txt").write_text(f"./{wheel.name}\n")
    (code / "limits.txt").write_text("greeting<2\n")
    with pytest.raises(InputError, match=r"(?s)requirements.txt cannot be installed:\n.*greeting"):
        install(code)
    own.write_bytes(wheel.read_bytes())
    assert names(install(code)) == ["greeting.py"]
    (code / "limits.txt").write_text("greeting<1\n")
    with pytest.raises(InputError, match="cannot be installed"):
        install(code)
    (code / "more.txt").unlink()
    with pytest.raises(InputError, match=r"more\.txt"):
        install(code)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ""),
        ({"pyproject.toml": "[tool.ruff]\n"}, ""),
        ({"pyproject.toml": "[project]\ndependencies = ['a']\n"}, "pyproject.toml"),
        ({"pyproject.toml": "[project]\n", "uv.lock": ""}, "uv.lock"),
        ({"pyproject.toml": "", "uv.lock": "", "requirements.txt": ""}, "requirements.txt"),
        ({"requirements.txt": "-r requirements.txt\na @ git+https://h/a\n"}, "requirements.txt"),
    ],
)
def test_the_file_that_counts(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert file_of(tmp_path) == found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"uv.lock": ""}, "uv.lock belongs to a pyproject.toml"),
        ({"pyproject.toml": "[project"}, "pyproject.toml cannot be read: Expected"),
        ({"pyproject.toml": "[project]\ndynamic = ['dependencies']\n"}, "are dynamic"),
        ({"pyproject.toml": "[project]\ndependencies = 'a'\n"}, "must be a list of texts"),
        (
            {"requirements.txt": "# git+ssh://a\ntyro @ git+ssh://git@github.com/me/tyro@main\n"},
            r"requirements.txt: git\+ssh://git@github.com/me/tyro@main cannot be installed",
        ),
        ({"requirements.txt": "-r a.txt\n", "a.txt": "-e git+git@host:me/x.git\n"}, "a.txt: git"),
        (
            {"pyproject.toml": "[project]\ndependencies = ['a @ git+ssh://git@host/a']\n"},
            "nodes have no SSH key",
        ),
        (
            {"pyproject.toml": "", "uv.lock": 'source = { git = "ssh://git@github.com/me/x" }\n'},
            "uv.lock: ssh://git@github.com/me/x cannot be installed",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        file_of(tmp_path)


@pytest.mark.parametrize("wanted", [">=3.99", ">=3.8,<3.10", "==3.10.*"])
def test_a_project_for_another_python_is_refused(tmp_path: Path, wanted: str) -> None:
    project = f"[project]\nname = 'x'\nrequires-python = '{wanted}'\n"
    code = folder_with(tmp_path / "code", pyproject__toml=project)
    with pytest.raises(InputError, match=re.escape(wanted)):
        install(code)


LOCK = """\
version = 1
requires-python = ">=3.11"

[[package]]
name = "greeting"
version = "1.0"
source = { registry = "%s" }
wheels = [{ path = "greeting-1.0-py3-none-any.whl" }]

[[package]]
name = "mine"
version = "0.1"
source = { virtual = "." }
dependencies = [{ name = "greeting" }]

[package.metadata]
requires-dist = [{ name = "greeting" }]
"""


def test_what_uv_has_locked_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path)
    code = folder_with(
        tmp_path / "code",
        pyproject__toml=(
            '[project]\nname = "mine"\nversion = "0.1"\ndependencies = ["greeting"]\n'
            'requires-python = ">=3.11"\n'
        ),
        uv__lock=LOCK % tmp_path,
    )
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert names(install(code)) == ["greeting.py"]
    (code / "uv.lock").write_text("no lock")
    with pytest.raises(InputError, match=r"uv\.lock cannot be read:\n"):
        install(code)
