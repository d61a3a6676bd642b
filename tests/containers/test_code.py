"""Variables, secrets, code and packages of a job reach its command, and Ray.

How requirements are installed, and kept: ``test_requirements``.

Across nodes, with real Ray: ``tests/rehearsal/test_jobs.py``.
"""

import errno
import hashlib
import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray._private import ray_constants
from ray._private.runtime_env import packaging

from containers.program.start import code, packages
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import ENV_CODE, ENV_CODE_SHA256, Range
from tests.aws.calls import refused
from tests.aws.s3 import S3
from tests.conftest import write_wheel


class Secrets:
    """Secrets Manager with one secret."""

    def get_secret_value(self, SecretId: str) -> dict[str, str]:  # noqa: N803
        if SecretId != "training/key":
            raise refused("ResourceNotFoundException")
        return {"SecretString": "hidden"}


def client(archive: Path | None = None) -> S3:
    """S3 with one archive."""
    s3 = S3()
    if archive:
        s3.objects["runs/r/jobs/j.zip"] = archive.read_bytes()
    return s3


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node keeps of a job is the test's own."""
    monkeypatch.setattr(code, "ARCHIVE", tmp_path / "place" / "code.zip")
    monkeypatch.setattr(code, "PACKAGES", tmp_path / "place" / "packages")


def prepare(spec: JobSpec, folder: Path, s3: S3, **options: Any) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return code.prepare(spec, folder, client=s3, secrets=Secrets(), **options)


def prepare_worker(told: dict[str, str], folder: Path, s3: S3) -> None:
    folder.mkdir(exist_ok=True)
    code.prepare_worker(told, folder, client=s3)


def archive(tmp_path: Path, **files: str | tuple[int, str]) -> Path:
    """What was sent: files by name, with a mode where that matters."""
    path = tmp_path / "sent.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, given in files.items():
            mode, content = given if isinstance(given, tuple) else (0, given)
            entry = zipfile.ZipInfo(name.replace("__", "."))
            entry.external_attr = mode << 16
            file.writestr(entry, content)
    return path


RECIPE = JobSpec(run="r", command=("python",), nodes=Range(1, 1))
CODE = replace(RECIPE, code="s3://bucket/runs/r/jobs/j.zip")


def test_a_recipe_brings_nothing_and_ray_is_told_nothing(tmp_path: Path) -> None:
    assert prepare(RECIPE, tmp_path / "code", client()) == {}
    assert code.for_ray({}, None) == {}


def test_variables_and_secrets_reach_the_command_and_rays_workers(tmp_path: Path) -> None:
    spec = replace(RECIPE, variables={"COLOUR": "green"}, secrets={"API_KEY": "training/key"})
    found = prepare(spec, tmp_path / "code", client())
    assert found == {"COLOUR": "green", "API_KEY": "hidden"}
    told = json.loads(code.for_ray(found, tmp_path)["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert told == {"runtime_env": {"env_vars": found, "working_dir": str(tmp_path)}}


def test_code_is_where_the_command_runs(tmp_path: Path) -> None:
    path = archive(tmp_path, mine__py="print(1)", **{"sub/more__py": ""})
    found = prepare(CODE, tmp_path / "code", client(path))
    assert found["PYTHONPATH"] == f"{packages.site_packages(code.PACKAGES)}:."
    assert found["PATH"].startswith(f"{code.PACKAGES}/bin:")
    assert (tmp_path / "code" / "sub" / "more.py").exists()


def test_ray_sends_the_files_that_git_tracks_whatever_gitignore_says(tmp_path: Path) -> None:
    folder, package = tmp_path / "code", tmp_path / "package.zip"
    folder.mkdir()
    (folder / ".gitignore").write_text("log*\n")
    (folder / "logic.py").touch()
    # As in ray.init() of ray/_private/worker.py.
    told = code.for_ray({}, folder).get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0")
    packaging.create_package(str(folder), package, include_gitignore=told != "1")
    assert "logic.py" in zipfile.ZipFile(package).namelist()


def test_an_archive_that_was_changed_after_the_submission_does_not_run(tmp_path: Path) -> None:
    path = archive(tmp_path, mine__py="print(1)")
    spec = replace(CODE, code_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    prepare(spec, tmp_path / "code", client(path))
    code.ARCHIVE.unlink()
    archive(tmp_path, mine__py="print(2)")
    with pytest.raises(InputError, match="is not what was submitted"):
        prepare(spec, tmp_path / "other", client(path))
    assert not list((tmp_path / "other").iterdir())
    assert not code.ARCHIVE.exists()


def test_a_worker_node_checks_the_code_and_has_the_packages_at_the_heads_path(
    tmp_path: Path,
) -> None:
    wheel = write_wheel(tmp_path)
    path = archive(tmp_path, requirements__txt=f"--no-index\n./{wheel.name}\n")
    with zipfile.ZipFile(path, "a") as file:
        file.write(wheel, wheel.name)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = replace(CODE, code_sha256=sha256, variables={"PIP_RETRIES": "0", "OTHER": "1"})
    told = code.for_workers(spec)
    assert told == {
        ENV_CODE: CODE.code,
        ENV_CODE_SHA256: sha256,
        "PIP_RETRIES": "0",
    }
    installed = packages.site_packages(code.PACKAGES)
    on_head = prepare(spec, tmp_path / "head", client(path))
    assert on_head["PYTHONPATH"] == f"{installed}:."
    shutil.rmtree(code.PACKAGES)
    prepare_worker(told, tmp_path / "worker", client(path))
    assert (installed / "greeting.py").exists()
    with pytest.raises(InputError, match="is not what was submitted"):
        prepare_worker(told | {ENV_CODE_SHA256: "0" * 64}, tmp_path / "worker", client(path))


def test_the_head_learns_why_a_worker_node_cannot_prepare(tmp_path: Path) -> None:
    path = archive(tmp_path, requirements__txt="--no-index\nthere-is-no-such-package==9\n")
    s3, told = client(path), code.for_workers(CODE)
    assert code.failure_of_worker(CODE.code, client=s3) == ""
    with pytest.raises(InputError) as raised:
        prepare_worker(told, tmp_path / "worker", s3)
    assert "there-is-no-such-package" in str(raised.value)
    assert code.failure_of_worker(CODE.code, client=s3) == str(raised.value)
    code.forget_failure_of_worker(CODE.code, client=s3)
    assert code.failure_of_worker(CODE.code, client=s3) == ""


def test_a_worker_whose_disk_is_full_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> bool:
        raise InputError(f"requirements.txt cannot be installed:\n{os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(packages, "install", fail)
    s3 = client(archive(tmp_path))
    with pytest.raises(InputError):
        prepare_worker(code.for_workers(CODE), tmp_path / "worker", s3)
    assert code.failure_of_worker(CODE.code, client=s3) == ""


def test_a_node_without_code_fetches_nothing(tmp_path: Path) -> None:
    assert code.for_workers(RECIPE) == {}
    prepare_worker({}, tmp_path, client())
    assert not code.ARCHIVE.exists()


def test_an_index_that_needs_a_secret_is_refused_where_workers_would_need_it(
    tmp_path: Path,
) -> None:
    spec = replace(CODE, secrets={"PIP_INDEX_URL": "training/key"})
    path = archive(tmp_path, mine__py="")
    with pytest.raises(InputError, match="only the head reads secrets"):
        prepare(spec, tmp_path / "code", client(path))
    prepare(replace(spec, nodes=Range(0, 0)), tmp_path / "code", client(path))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secrets": {"A": "training/x"}}, "secret training/x, for A, cannot be read"),
        ({"code": "s3://bucket/none.zip"}, "none.zip cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare(replace(RECIPE, **changed), tmp_path / "code", client())
