"""Requirements are installed once on a host, whole or not at all, and beside what the image has.

With pip as it is in the image, and wheels made here: from a folder, or from an index on loopback
that counts what is fetched from it.
"""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from containers.program import requirements
from containers.program.cache import Cache
from contract.errors import InputError
from contract.requirements import file_of, source_folders
from tests.conftest import write_wheel


def isolate(patch: pytest.MonkeyPatch) -> None:
    """pip reaches what a test gives it, and nothing else."""
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.delenv("PIP_FIND_LINKS", raising=False)
    patch.setenv("PIP_RETRIES", "0")
    patch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


def folder_with(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def install(folder: Path, cache: Path, **options: object) -> Path | None:
    """Install, and let go of it as the end of a container does."""
    found = requirements.install(folder, Cache(cache), **options)  # type: ignore[arg-type]
    if found is None:
        return None
    found.lease.close()
    return found.folder


def installed(folder: Path) -> list[Path]:
    """Whole installations in the cache of a test."""
    return [each for each in (folder / "cache" / "packages").iterdir() if each.is_dir()]


def names(folder: Path | None) -> list[str]:
    assert folder is not None
    return sorted(each.name for each in requirements.site_packages(folder).glob("*.py"))


@contextmanager
def index(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A package index with one project, and what has been asked of it."""
    wheel = write_wheel(folder)
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.endswith(wheel.name):
                body, kind = wheel.read_bytes(), "application/octet-stream"
            else:
                body, kind = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode(), "text/html"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple", asked
        finally:
            server.shutdown()


def test_a_second_job_with_the_same_requirements_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    with index(tmp_path) as (address, asked):
        given = {"PIP_INDEX_URL": address}
        first = folder_with(tmp_path / "first", requirements__txt="greeting==1.0\n")
        found = install(first, tmp_path / "cache", environment=given)
        assert names(found) == ["greeting.py"]
        assert [each for each in asked if each.endswith(".whl")]
        asked.clear()
        other_code = folder_with(
            tmp_path / "second", requirements__txt="greeting==1.0\n", train__py="1\n"
        )
        assert install(other_code, tmp_path / "cache", environment=given) == found
        downloads = {"PIP_CACHE_DIR": str(tmp_path / "downloads")}
        assert install(other_code, tmp_path / "cache", environment=given | downloads) == found
        assert asked == []
        # Another index may have something else under the same name.
        given = {"PIP_INDEX_URL": f"{address}/"}
        with pytest.raises(requirements.Stopped):
            install(other_code, tmp_path / "cache", environment=given, should_stop=lambda: True)
    assert "requirements.txt: installed on this host already" in capsys.readouterr().err


def test_two_installs_of_a_pyproject_at_once_make_one_and_both_use_it(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    text = f'[project]\nname = "mine"\ndependencies = ["greeting @ file://{wheel}"]\n'
    code = folder_with(tmp_path / "code", pyproject__toml=text)
    program = (
        "import sys, pathlib\n"
        "from containers.program import cache, requirements\n"
        "code, root = map(pathlib.Path, sys.argv[1:])\n"
        "print(requirements.install(code, cache.Cache(root)).folder)\n"
    )
    command = [sys.executable, "-c", program, str(code), str(tmp_path / "cache")]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120) for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sum("installing pyproject.toml" in err for _, err in said) == 1
    (there,) = installed(tmp_path)
    assert there == Path(said[0][0].strip())
    assert names(there) == ["greeting.py"]


def test_an_installation_ends_when_its_node_has_to(tmp_path: Path) -> None:
    code = folder_with(tmp_path / "code", requirements__txt="greeting\n")
    with pytest.raises(requirements.Stopped):
        install(code, tmp_path / "cache", should_stop=lambda: True)
    assert installed(tmp_path) == []


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Code that asks for a program, for another torch and for what the image has; its cache."""
    folder = tmp_path_factory.mktemp("mixed")
    wheels = [
        write_wheel(folder, script="greet = greeting:main"),
        write_wheel(folder, name="torch", version="1.0"),
    ]
    listed = "".join(f"{each}\n" for each in wheels)
    code = folder_with(folder / "code", requirements__txt=f"{listed}numpy>=1\nray[train]\n")
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch)
        install(code, folder / "cache")
    return code, folder / "cache"


def test_what_the_image_has_is_not_taken_again(mixed: tuple[Path, Path]) -> None:
    assert names(install(*mixed)) == ["greeting.py", "torch.py"]


def test_programs_of_a_package_run_with_the_images_python(mixed: tuple[Path, Path]) -> None:
    found = install(*mixed)
    assert found is not None
    program = found / "bin" / "greet"
    # Through /bin/sh where the name of the folder is too long for a first line.
    first, second, *_ = program.read_text().splitlines()
    assert sys.executable in (first.removeprefix("#!"), second.removeprefix("'''exec' ").split()[0])
    done = subprocess.run(
        [program],
        env={"PYTHONPATH": str(requirements.site_packages(found))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "installed\n"
    assert [each.name for each in (found / "bin").iterdir()] == ["greet"]


def test_another_version_of_a_package_of_the_image_is_named(
    mixed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # A later job, for which nothing is installed, is told too.
    install(*mixed)
    said = capsys.readouterr().err
    assert "installed on this host already" in said
    assert "WARNING: requirements.txt replaces packages of the image: torch 1.0 (image: " in said
    assert "the image's torch is tested" in said


def test_another_ray_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, name="ray", version="1.0")
    code = folder_with(tmp_path / "code", requirements__txt=f"--find-links {tmp_path}\nray==1.0\n")
    with pytest.raises(InputError, match=r"asks for another Ray than \d.*leave ray out of it"):
        install(code, tmp_path / "cache")


def test_packages_in_a_folder_src_are_found(tmp_path: Path) -> None:
    code = folder_with(tmp_path / "code", pyproject__toml="[project]\n")
    assert source_folders(code) == (".",)
    (code / "src").mkdir()
    assert source_folders(code) == (".", "src")


def test_included_lists_editable_folders_constraints_and_content_of_files_count(
    tmp_path: Path,
) -> None:
    wheel = write_wheel(tmp_path)
    code = folder_with(tmp_path / "code", requirements__txt="-r more.txt\n-c limits.txt\n")
    own = code / wheel.name
    own.write_bytes(wheel.read_bytes()[:100])
    (code / "more.txt").write_text(f"-e ./{wheel.name}\n")
    (code / "limits.txt").write_text("greeting<2\n")
    with pytest.raises(InputError, match=r"(?s)requirements.txt cannot be installed:\n.*greeting"):
        install(code, tmp_path / "cache")
    assert installed(tmp_path) == [], "a broken installation leaves nothing that counts"
    own.write_bytes(wheel.read_bytes())
    found = install(code, tmp_path / "cache")
    assert names(found) == ["greeting.py"]
    # The limits and the bytes of the file are a part of what an installation is known by.
    (code / "limits.txt").write_text("greeting<1\n")
    with pytest.raises(InputError, match="cannot be installed"):
        install(code, tmp_path / "cache")
    (code / "limits.txt").write_text("greeting<2\n")
    assert install(code, tmp_path / "cache", should_stop=lambda: True) == found
    own.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(requirements.Stopped):
        install(code, tmp_path / "cache", should_stop=lambda: True)
    (code / "more.txt").unlink()
    with pytest.raises(InputError, match=r"more\.txt cannot be read"):
        install(code, tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ""),
        ({"pyproject.toml": "[tool.ruff]\n"}, ""),
        ({"pyproject.toml": "[project]\ndependencies = ['a']\n"}, "pyproject.toml"),
        ({"pyproject.toml": "[project]\n", "uv.lock": ""}, "uv.lock"),
        ({"pyproject.toml": "", "uv.lock": "", "requirements.txt": ""}, "requirements.txt"),
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
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        file_of(tmp_path)


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
    pytest.importorskip("uv", reason="no uv in this environment")
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
    assert names(install(code, tmp_path / "cache")) == ["greeting.py"]
    (code / "uv.lock").write_text("no lock")
    with pytest.raises(InputError, match=r"uv\.lock cannot be read:\n"):
        install(code, tmp_path / "cache")
