"""What a job's user brings along reaches the command, and Ray: variables, secrets, code, packages.

Across nodes, with real Ray: ``tests/rehearsal/test_jobs.py``.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from containers import user_code
from contract.errors import InputError
from contract.job import JobSpec
from contract.ranges import Range
from tests.conftest import write_wheel


class Client:
    """S3 with one archive, Secrets Manager with one secret."""

    def __init__(self, archive: Path | None = None) -> None:
        self.archive = archive

    def __call__(self, _service: str) -> "Client":
        return self

    def download_file(self, bucket: str, key: str, target: str) -> None:
        if self.archive is None or (bucket, key) != ("bucket", "runs/r/jobs/j.zip"):
            raise ClientError({"Error": {"Code": "404", "Message": "Not Found"}}, "HeadObject")
        shutil.copy(self.archive, target)

    def get_secret_value(self, SecretId: str) -> dict[str, str]:  # noqa: N803
        if SecretId != "training/key":
            error: Any = {"Code": "ResourceNotFoundException", "Message": "no such secret"}
            raise ClientError({"Error": error}, "GetSecretValue")
        return {"SecretString": "hidden"}


def prepare(spec: JobSpec, folder: Path, client: Client) -> user_code.Prepared:
    folder.mkdir(exist_ok=True)
    return user_code.prepare(spec, folder, client=client)


def runtime(prepared: user_code.Prepared) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(prepared.environment["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    return dict(found["runtime_env"])


def archive(tmp_path: Path, **files: str) -> Path:
    path = tmp_path / "sent.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name.replace("__", "."), content)
    return path


RECIPE = JobSpec(run="r", command=("python",), nodes=Range(1, 1))
CODE = replace(RECIPE, code="s3://bucket/runs/r/jobs/j.zip")


def test_a_recipe_brings_nothing_and_ray_is_told_nothing(tmp_path: Path) -> None:
    found = prepare(RECIPE, tmp_path / "code", Client())
    assert found == user_code.Prepared(folder=None, environment={})


def test_variables_and_secrets_reach_the_command_and_rays_workers(tmp_path: Path) -> None:
    spec = replace(RECIPE, variables={"COLOUR": "green"}, secrets={"API_KEY": "training/key"})
    found = prepare(spec, tmp_path / "code", Client())
    assert found.environment["COLOUR"] == "green"
    assert found.environment["API_KEY"] == "hidden"
    assert runtime(found) == {"env_vars": {"COLOUR": "green", "API_KEY": "hidden"}}
    assert found.folder is None


def test_code_is_where_the_command_runs_and_what_ray_takes_along(tmp_path: Path) -> None:
    path = archive(tmp_path, mine__py="print(1)", **{"sub/more__py": ""})
    found = prepare(CODE, tmp_path / "code", Client(path))
    assert found.folder == tmp_path / "code"
    assert (found.folder / "sub" / "more.py").exists()
    assert runtime(found)["working_dir"] == str(found.folder)
    assert not list(tmp_path.glob("code.zip.*"))


@pytest.mark.parametrize("name", ["../outside.py", "/tmp/absolute-of-this-test.py", "a//b", "./a"])
def test_an_archive_that_would_write_outside_of_its_folder_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "sent.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("mine.py", "")
        file.writestr(name, "")
    with pytest.raises(InputError, match=r"file of the code s3://.* is refused"):
        prepare(CODE, tmp_path / "code", Client(path))
    assert not (tmp_path / "outside.py").exists()
    assert not Path("/tmp/absolute-of-this-test.py").exists()
    assert not list((tmp_path / "code").iterdir())


def test_requirements_are_installed_beside_what_the_image_has(tmp_path: Path) -> None:
    # Needs what is there already: it must not be fetched again, and is not to be found here.
    wheel = write_wheel(tmp_path, requires="numpy")
    path = archive(tmp_path, mine__py="", requirements__txt=f"--no-index\n./{wheel.name}\n")
    with zipfile.ZipFile(path, "a") as file:
        file.write(wheel, wheel.name)
    found = prepare(CODE, tmp_path / "code", Client(path))
    assert found.folder is not None
    assert sorted(each.name for each in (found.folder / user_code.INSTALLED).glob("*.py")) == [
        "greeting.py"
    ]
    assert not list(tmp_path.glob("code-venv*"))
    done = subprocess.run(
        [sys.executable, "-c", "import greeting, numpy; print(greeting.WORDS)"],
        cwd=found.folder,
        env={**os.environ, **found.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "installed\n"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secrets": {"A": "training/x"}}, "secret training/x, for A, cannot be read"),
        ({"code": "s3://bucket/none.zip"}, "none.zip cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare(replace(RECIPE, **changed), tmp_path / "code", Client())


def test_requirements_that_cannot_be_installed_show_the_end_of_pips_words(tmp_path: Path) -> None:
    path = archive(tmp_path, requirements__txt="--no-index\nthere-is-no-such-package==9\n")
    with pytest.raises(InputError, match=r"(?s)cannot be installed:.*there-is-no-such-package"):
        prepare(CODE, tmp_path / "code", Client(path))
