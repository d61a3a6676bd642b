"""What a job's user brings along: variables, secrets, code, requirements.

All of it reaches the command and, through Ray's runtime environment, every process that the command
starts on other nodes.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from containers.log import say
from contract.errors import InputError
from contract.job import JobSpec
from contract.runs import check_relative

#: Ray reads it in whichever ``ray.init`` comes first: how its own jobs pass on their environment.
_RAY_VARIABLE: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
REQUIREMENTS: Final = "requirements.txt"
#: Inside the code's folder, so that Ray takes it along to the other nodes.
INSTALLED: Final = "_requirements"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Where the command runs, and with which variables more."""

    folder: Path | None
    environment: dict[str, str]


def prepare(spec: JobSpec, folder: Path, *, client: Callable[[str], Any] | None = None) -> Prepared:
    """Fetch what the job brings along.

    Args:
        spec: the job's order.
        folder: an empty one, for the code.
        client: makes clients of AWS; boto3's by default.

    Raises:
        InputError: a secret or the code cannot be read, or its requirements not be installed.
    """
    client = client or _client
    variables = dict(spec.variables)
    for name, secret in spec.secrets.items():
        variables[name] = _secret(client("secretsmanager"), name, secret)
    runtime: dict[str, Any] = {}
    place = None
    if spec.code:
        place = folder
        _fetch(client("s3"), spec.code, folder)
        runtime["working_dir"] = str(folder)
        # A script is run by its path; what is beside it must be found all the same.
        paths = [".", variables.get("PYTHONPATH", "")]
        if (folder / REQUIREMENTS).exists():
            _install(folder)
            paths.insert(0, INSTALLED)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if variables:
        runtime["env_vars"] = variables
    extra = {_RAY_VARIABLE: json.dumps({"runtime_env": runtime})} if runtime else {}
    return Prepared(folder=place, environment={**variables, **extra})


def _client(service: str) -> Any:
    import boto3

    make: Any = boto3.client  # typed by the service's name, which varies here
    return make(service)


def _secret(manager: Any, name: str, secret: str) -> str:
    try:
        return str(manager.get_secret_value(SecretId=secret)["SecretString"])
    except (ClientError, BotoCoreError, KeyError) as error:
        raise InputError(f"secret {secret}, for {name}, cannot be read: {error}") from None


def _fetch(s3: Any, address: str, folder: Path) -> None:
    parts = urlsplit(address)
    archive = folder.with_name(f"{folder.name}.zip")
    try:
        s3.download_file(parts.netloc, parts.path.lstrip("/"), str(archive))
        with zipfile.ZipFile(archive) as code:
            for name in code.namelist():
                check_relative(name.removesuffix("/"), what=f"file of the code {address}")
            code.extractall(folder)
    except (ClientError, BotoCoreError, OSError, zipfile.BadZipFile) as error:
        raise InputError(f"the code {address} cannot be read: {error}") from None
    finally:
        archive.unlink(missing_ok=True)
    say(f"code: {sum(path.is_file() for path in folder.rglob('*'))} files from {address}")


def _install(folder: Path) -> None:
    """Install the requirements beside the code; what the image has already is not taken again.

    Once, here, and not on every node: they then all have the same.
    """
    say(f"installing {REQUIREMENTS}")
    base = folder.with_name(f"{folder.name}-venv")
    venv.create(base, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(base)}))
    here = site / "image.pth"
    here.write_text("\n".join(each for each in sys.path if each.endswith("-packages")))
    command = [sys.executable, "-m", "pip", "--python", str(base / "bin" / "python"), "install"]
    command += ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "-r", REQUIREMENTS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise InputError(f"{REQUIREMENTS} cannot be installed:\n{tail}")
    here.unlink()
    site.rename(folder / INSTALLED)
    shutil.rmtree(base)
