"""A node unpacks what ``--code DIR`` packs: links, executable files, and the same hash."""

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from containers.program.start.code import unpack
from trainctl.aws.errors import UsageError
from trainctl.jobs import code_folder
from trainctl.jobs.code_folder import CodeFolder
from trainctl.jobs.programs import Program


def project(folder: Path) -> Path:
    (folder / "tools").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "tools" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "tools" / "run.sh").chmod(0o755)
    (folder / "start").symlink_to("tools/run.sh")
    (folder / "bin").symlink_to(folder / "tools")  # absolute, and to a folder
    return folder


def test_a_node_gets_the_files_with_their_rights_and_links(tmp_path: Path) -> None:
    CodeFolder.of(project(tmp_path / "code")).pack(tmp_path / "sent.zip")
    (tmp_path / "node").mkdir()
    unpack(tmp_path / "sent.zip", tmp_path / "node")
    node = tmp_path / "node"
    assert os.access(node / "tools" / "run.sh", os.X_OK)
    assert not os.access(node / "train.py", os.X_OK)
    assert (node / "start").readlink() == Path("tools/run.sh")
    assert (node / "bin").readlink() == Path("tools")
    assert (node / "bin" / "run.sh").read_text() == "#!/bin/sh\n"


def test_the_same_files_have_the_same_hash_wherever_and_whenever(tmp_path: Path) -> None:
    first = CodeFolder.of(project(tmp_path / "a")).pack(tmp_path / "a.zip")
    other = project(tmp_path / "b")
    later = time.time() + 1000
    os.utime(other / "train.py", (later, later))
    assert CodeFolder.of(other).pack(tmp_path / "b.zip") == first
    assert hashlib.sha256((tmp_path / "a.zip").read_bytes()).hexdigest() == first
    (other / "train.py").chmod(0o755)
    assert CodeFolder.of(other).pack(tmp_path / "b.zip") != first


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "venv/lib"])
def test_a_link_to_what_is_not_uploaded_is_refused(tmp_path: Path, target: str) -> None:
    code = project(tmp_path / "code")
    (tmp_path / "outside").mkdir()
    (code / "venv" / "lib").mkdir(parents=True)
    (code / "data").symlink_to(target)
    with pytest.raises(UsageError, match=f"data .* {target}"):
        CodeFolder.of(code)


@pytest.mark.parametrize("name", [".env", ".env.local", "inner/.env.production"])
def test_a_file_of_variables_is_refused(tmp_path: Path, name: str) -> None:
    code = project(tmp_path / "code")
    for other in (".env.example", "a.env", ".envrc.txt"):
        (code / other).touch()
    CodeFolder.of(code)
    (code / name).parent.mkdir(exist_ok=True)
    (code / name).write_text("PASSWORD=1\n")
    with pytest.raises(UsageError, match=name):
        CodeFolder.of(code)


def test_files_of_a_submodule_are_uploaded(tmp_path: Path) -> None:
    code = project(tmp_path / "code")
    (code / "vendored").mkdir()
    (code / "vendored" / "part.py").write_text("")
    for folder in (code / "vendored", code):
        subprocess.run(["git", "init", "-q", folder], check=True)
    names = [str(path.relative_to(code)) for path in code_folder.files_of(code)]
    assert names == ["bin", "start", "tools/run.sh", "train.py", "vendored/part.py"]


def test_a_work_tree_that_git_cannot_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = project(tmp_path / "code")
    subprocess.run(["git", "init", "-q", code], check=True)
    (code / ".gitignore").write_text(".env\n")
    (code / ".env").write_text("PASSWORD=secret\n")
    assert code / ".env" not in code_folder.files_of(code)
    # What git does in a folder of another user; the variable is of its own tests.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UsageError, match="dubious ownership"):
        CodeFolder.of(code)


@pytest.mark.parametrize("target", ["nowhere", "data", "/no/such/file"])
def test_what_leads_nowhere_here_either_is_left_out_and_named(tmp_path: Path, target: str) -> None:
    code = project(tmp_path / "code")
    (code / "data").symlink_to(target)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (code / "weights.pt").write_text(pointer)
    found = CodeFolder.of(code)
    assert "data" not in [path.name for path in found.files]
    links, pointers = found.warnings
    assert "data" in links
    assert "weights.pt" in pointers


def test_the_commit_of_a_folder_is_named_and_its_changes(tmp_path: Path) -> None:
    code = project(tmp_path / "code")
    assert CodeFolder.of(code).commit == ""
    git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert CodeFolder.of(code).commit == head.stdout.strip()
    (code / "train.py").write_text("print(2)\n")
    assert CodeFolder.of(code).commit == f"{head.stdout.strip()}-dirty"


def test_a_link_to_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    code = project(tmp_path / "code")
    (code / "pkg").mkdir()
    (code / "pkg" / "loop.py").write_text("import ray\n")
    (code / "pkg.py").symlink_to("pkg")
    assert Program(CodeFolder.of(code), ["python", "-m", "pkg.loop"]).of_ray == "pkg/loop.py"
    CodeFolder.of(code)


def test_the_packages_that_will_be_installed_are_named_before_the_upload(tmp_path: Path) -> None:
    code = project(tmp_path / "code")
    assert "requirements.txt" not in CodeFolder.of(code).words
    (code / "requirements.txt").write_text("einops\n")
    assert CodeFolder.of(code).words.endswith("requirements.txt")
    subprocess.run(["git", "init", "-q", code], check=True)
    (code / ".gitignore").write_text("requirements.txt\n")
    with pytest.raises(UsageError, match=r"requirements\.txt"):
        CodeFolder.of(code)


def test_a_lock_without_its_project_is_refused(tmp_path: Path) -> None:
    code = project(tmp_path / "code")
    (code / "uv.lock").touch()
    with pytest.raises(UsageError, match=r"uv\.lock"):
        CodeFolder.of(code)


def test_what_git_ignores_is_named_beside_what_is_uploaded(tmp_path: Path) -> None:
    code = project(tmp_path / "code")
    (code / "data").mkdir()
    for name in ("init.pt", "data/x.txt", "data/y.txt"):
        (code / name).touch()
    assert "init.pt" not in CodeFolder.of(code).words
    subprocess.run(["git", "init", "-q", code], check=True)
    (code / ".gitignore").write_text("data/\n*.pt\n__pycache__\n")
    (code / "__pycache__").mkdir()
    assert "data/, init.pt" in CodeFolder.of(code).words
