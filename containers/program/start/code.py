"""Code of a job on a node: fetch, check and unpack it, and install its requirements.

Every node of a job does this before it joins, so that an archive or a list of requirements that
cannot be used ends the job at its beginning. The archive stays on the node: ``unpack`` makes as
many folders of it as there are programs. The packages are found at one path on all nodes,
whatever cache they come from.
"""

import contextlib
import hashlib
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import boto3

from containers.program.files.s3_files import ERRORS, open_bucket
from containers.program.start import packages
from contract import faults
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import ENV_CODE, ENV_CODE_SHA256
from contract.requirements import source_folders

#: Ray reads it in the first ``ray.init``: so do its own jobs pass on their environment.
RAY_VARIABLE: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: A job's archive and the environment with its packages, at the same path on all nodes.
ARCHIVE: Final = Path("/tmp/program/code.zip")
#: Folder on Python's path whose ``sitecustomize.py`` each Python of a program runs first.
STARTUP: Final = Path(__file__).parent / "startup"
#: Folder in which the processes of a program beside Ray count their steps.
WATCHED: Final = ARCHIVE.with_name("watch")
PACKAGES: Final = ARCHIVE.with_name("packages")
#: Below the archive's own key: why a worker node could not prepare, in words.
_FAILED: Final = "failed"


def prepare(
    spec: JobSpec,
    folder: Path,
    *,
    client: Any = None,
    secrets: Any = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Fetch what the job brings along, on its head; return the variables of its command.

    Args:
        spec: the job's order.
        folder: an empty one, for the code.
        client: of S3; boto3's by default.
        secrets: client of Secrets Manager; boto3's by default.
        should_stop: whether the node has to end; asked while requirements are installed.

    Raises:
        InputError: a secret or the code cannot be read, or its requirements not be installed.
        UnreachableError: AWS does not give them.
        PreparationStopped: ``should_stop`` returned true.
    """
    variables = dict(spec.variables)
    for name, secret in spec.secrets.items():
        variables[name] = _secret(secrets or boto3.client("secretsmanager"), name, secret)
    of_pip = sorted(name for name in spec.secrets if name.startswith(packages.PREFIXES))
    if spec.code and of_pip and spec.nodes.high:
        raise InputError(
            f"secret of {of_pip[0]}: only the head reads secrets, and every node installs "
            "requirements; put the packages into the code's folder, as wheels"
        )
    if spec.code:
        unpack(fetch(spec.code, spec.code_sha256, client=client), folder)
        packages.install(folder, PACKAGES, environment=variables, should_stop=should_stop)
        variables |= search_paths(folder, variables)
    return variables


def for_ray(variables: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Variable with which Ray passes on variables and the code's folder to what it starts."""
    runtime: dict[str, Any] = {"working_dir": str(folder)} if folder else {}
    if variables:
        runtime["env_vars"] = dict(variables)
    found = {RAY_VARIABLE: json.dumps({"runtime_env": runtime})} if runtime else {}
    # What git ignores was left out on the laptop. Ray's own reading of .gitignore also leaves out
    # files that git tracks.
    return {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1", **found} if folder else found


def for_workers(spec: JobSpec) -> dict[str, str]:
    """Variables with which a worker node of a job is started, so that it can prepare its code."""
    if not spec.code:
        return {}
    of_pip = {k: v for k, v in spec.variables.items() if k.startswith(packages.PREFIXES)}
    return {ENV_CODE: spec.code, ENV_CODE_SHA256: spec.code_sha256, **of_pip}


def prepare_worker(
    environment: Mapping[str, str],
    folder: Path,
    *,
    client: Any = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fetch the code of a job on one of its worker nodes, and install its requirements.

    Without ``ENV_CODE`` in the node's environment there is nothing to do. Why an installation has
    failed is left in the bucket for the head (``failure_of_worker``), for which this node would be
    one that never came.

    Args:
        folder: an empty one, of which the requirements are read.

    Raises:
        InputError, UnreachableError, PreparationStopped: as ``prepare``.
    """
    address = environment.get(ENV_CODE)
    if not address:
        return
    # A failure here may be this node's own: the next one may succeed.
    unpack(fetch(address, environment.get(ENV_CODE_SHA256, ""), client=client), folder)
    try:
        packages.install(folder, PACKAGES, should_stop=should_stop)
    except InputError as error:
        if not faults.is_full(error):  # another host may have room on its disk
            with contextlib.suppress(*ERRORS):
                open_bucket(address, client).put(_FAILED, str(error).encode())
        raise


def failure_of_worker(address: str, *, client: Any = None) -> str:
    """Reason why a worker node could not prepare the code at this address; "" if all could."""
    with contextlib.suppress(*ERRORS):
        return (open_bucket(address, client).get(_FAILED) or b"").decode()
    return ""


def forget_failure_of_worker(address: str, *, client: Any = None) -> None:
    """Remove what a worker node has left there in an earlier attempt of the job."""
    with contextlib.suppress(*ERRORS):
        open_bucket(address, client).delete([_FAILED])


def _secret(manager: Any, name: str, secret: str) -> str:
    try:
        return str(manager.get_secret_value(SecretId=secret)["SecretString"])
    except ERRORS as error:
        raise faults.explained(error, f"secret {secret}, for {name}, cannot be read") from None
    except KeyError:
        raise InputError(f"secret {secret}, for {name}, is no text") from None


# --- the archive ----------------------------------------------------------------------------------
def fetch(address: str, sha256: str, *, client: Any = None) -> Path:
    """Fetch an archive to ``ARCHIVE``; return its path.

    Args:
        address: ``s3://bucket/key``.
        sha256: of the archive, in hexadecimal; empty: not checked.

    Raises:
        InputError: it cannot be read, or is another one.
        UnreachableError: S3 does not give it, or the disk does not take it.
    """
    above, _, name = address.rpartition("/")
    try:
        content = open_bucket(above, client).get(name)
        if content is None:
            raise InputError(f"the code {address} cannot be read: there is none")
        found = hashlib.sha256(content).hexdigest()
        if found == (sha256 or found):
            ARCHIVE.with_name("watch").mkdir(parents=True, exist_ok=True)  # WATCHED
            ARCHIVE.write_bytes(content)
            return ARCHIVE
    except ERRORS as error:
        raise faults.explained(error, f"the code {address} cannot be read") from None
    raise InputError(
        f"the code {address} is not what was submitted: its SHA-256 is {found}, the order's is "
        f"{sha256}; submit the job again"
    )


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive that ``trainctl`` has packed into an empty folder.

    Executable files stay executable. Links are made as they were: who can change the archive could
    run any code here.

    Raises:
        InputError: it is none.
    """
    try:
        with zipfile.ZipFile(archive) as code:
            for entry in code.infolist():
                mode = entry.external_attr >> 16
                path = folder / entry.filename
                if stat.S_ISLNK(mode):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(code.read(entry).decode())
                    continue
                code.extract(entry, folder)
                if not entry.is_dir():
                    path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)
    # RuntimeError: it is encrypted, or compressed in a way that zipfile does not know.
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"the code cannot be unpacked: {error}") from None


# --- its packages ---------------------------------------------------------------------------------
def search_paths(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH and PATH with which a program finds its own modules and packages.

    Args:
        folder: of the code; paths in it are relative, for programs run in a copy of it.
        variables: those that the user has set; they stay, behind.
    """
    # A script is run by its path; modules beside it must be importable too.
    modules = [str(packages.site_packages(PACKAGES)), *source_folders(folder)]
    modules.append(variables.get("PYTHONPATH", ""))
    programs = [str(PACKAGES / "bin"), variables.get("PATH", os.environ.get("PATH", ""))]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "PATH": os.pathsep.join(filter(None, programs)),
    }
