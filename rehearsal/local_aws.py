"""Start and stop the local AWS. For tests, for ``python -m rehearsal start``, and for scripts.

    with local_aws(Path("/tmp/aws")) as aws:
        subprocess.run(["npx", "cdk", "deploy"], env=os.environ | aws.environment())

Standard library only, and Python of the project's environment; the emulator itself runs in
``.venv-aws``. State is in memory and ends with the server; with ``Containers`` it is also on disk.
"""

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from contract.errors import ReportedError
from rehearsal import children

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-aws" / "bin" / "python"

ACCOUNT = "000000000000"
REGION = "us-east-1"
ROLE = "aws"
METADATA_PORT = 4567
SECONDS_TO_START = 60
SECONDS_TO_STOP = 15
#: A state machine's waits here, by those on AWS, where what has changed shows within ten seconds
#: and not within one.
WAIT_SCALE = 0.1


class LocalAwsError(ReportedError):
    """The local AWS cannot start; the message says why, and what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Containers:
    """Where ECS tasks run as containers; see ``rehearsal.ministack.ecs_runtime``."""

    name: str
    """Name of the rehearsal, a label of all its containers."""
    engine: str
    """Address of the Docker Engine, such as ``unix:///var/run/docker.sock``."""
    network: str
    """Docker network of the tasks. The local AWS should listen on its gateway."""
    registry: str
    """``host:port`` of the registry that stands for ECR; "": images are in the engine itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalAws:
    """A running local AWS."""

    endpoint: str
    """Where it answers, such as ``http://127.0.0.1:4566``; one address for all services."""
    log: Path
    """Log of the emulator: every request, and every resource that it failed to make."""
    pid: int
    """Process of the server. It leads a process group that holds its Lambda functions too."""

    def environment(self) -> dict[str, str]:
        """The variables that send a child process's AWS clients here, and nowhere else."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            # The emulator takes the key for the account. The CDK CLI remembers which account a key
            # belongs to, so it must be a key that is used nowhere else.
            "AWS_ACCESS_KEY_ID": ACCOUNT,
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DISABLE_HOST_PREFIX_INJECTION": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


def metadata_endpoint(host: str) -> str:
    """Where the containers of a rehearsal look for the metadata of their instance."""
    return f"http://{host}:{METADATA_PORT}"


def is_healthy(endpoint: str) -> bool:
    """True if an emulator answers at ``endpoint``."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=5)
    try:
        connection.request("GET", "/_ministack/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def local_aws(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    python: Path | None = None,
    delay_s: float | None = None,
    seed: int = 0,
    wait_scale: float = WAIT_SCALE,
) -> Iterator[LocalAws]:
    """Start a local AWS, wait until it answers, and stop it and all its processes at the end.

    ECS tasks are only records there.

    Args:
        folder: for its log and its scratch files; made if it does not exist.
        host: address to listen on. Loopback, unless containers are to reach it.
        port: 0 takes a free one.
        python: interpreter with the emulator. Default: that of ``.venv-aws``.
        delay_s: within what time lists of tasks show what has changed; default: a second.
        seed: of these delays.
        wait_scale: what a state machine's waits and pauses between retries are multiplied by.

    Raises:
        LocalAwsError: it is not installed, the port is taken, or it ended while starting.
    """
    own = {
        "REHEARSAL_DELAY_S": str(delay_s or ""),
        "REHEARSAL_SEED": str(seed),
        "SFN_WAIT_SCALE": str(wait_scale),
    }
    server, aws = _start(folder, host, port, python or PYTHON, containers=None, strictness=own)
    try:
        _wait_until_healthy(server, aws)
        yield aws
    finally:
        _stop(server)


def start_detached(folder: Path, *, host: str, port: int, containers: Containers) -> LocalAws:
    """Start a local AWS that stays when this process ends; ``rehearsal.children`` ends it.

    Raises:
        LocalAwsError: as ``local_aws``.
    """
    server, aws = _start(folder, host, port, PYTHON, containers=containers)
    try:
        _wait_until_healthy(server, aws)
    except BaseException:
        _stop(server)
        raise
    return aws


def _start(
    folder: Path,
    host: str,
    port: int,
    python: Path,
    *,
    containers: Containers | None,
    strictness: Mapping[str, str] = MappingProxyType({}),
) -> tuple[subprocess.Popen[bytes], LocalAws]:
    if not python.exists():
        raise LocalAwsError(f"no local AWS: {python} does not exist; run `make venv-aws`")
    port = _bindable_port(host, port)
    endpoint = f"http://{host}:{port}"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    command = [str(python), "-m", "rehearsal.ministack.server"]
    environment = _server_environment(folder, endpoint, host, port, containers) | dict(strictness)
    if containers:
        server = children.start(
            command, name=containers.name, role=ROLE, environment=environment, log=log
        )
    else:
        with log.open("wb") as output:
            server = subprocess.Popen(
                [*command, "--end-with-parent"],
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    return server, LocalAws(endpoint=endpoint, log=log, pid=server.pid)


def _bindable_port(host: str, port: int) -> int:
    """``port``, or a free one for 0. Raises LocalAwsError if the server could not listen there."""
    try:
        with socket.create_server((host, port)) as probe:
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        raise LocalAwsError(
            f"the local AWS cannot listen on {host}:{port}: {error.strerror or error}; "
            "stop what listens there, or choose another port (0: any free one)"
        ) from error


def _server_environment(
    folder: Path, endpoint: str, host: str, port: int, containers: Containers | None
) -> dict[str, str]:
    """Everything the server sees: nothing of the caller's own AWS settings."""
    if containers:
        own = {
            "DOCKER_HOST": containers.engine,
            "REHEARSAL_NETWORK": containers.network,
            "REHEARSAL_REGISTRY": containers.registry,
            "REHEARSAL_METADATA": metadata_endpoint(host),
            # Checkpoints are large, and a server that is started again finds its state.
            "PERSIST_STATE": "1",
            "STATE_DIR": str(folder / "state"),
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(folder / "s3"),
        }
    else:
        # Where Docker runs, it would stop what an earlier emulator has started there.
        own = {"DOCKER_HOST": f"unix://{folder}/no-docker"}
    return own | {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "REHEARSAL_FOLDER": str(folder),
        "TMPDIR": str(folder),
        "HOME": str(folder),
        "SFN_WAIT_SCALE": str(WAIT_SCALE),
        # Its defaults listen on all interfaces, here and for MQTT.
        "BIND_HOST": host,
        "GATEWAY_PORT": str(port),
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        # Where Lambda functions send their answers and their calls.
        "MINISTACK_HOST": host,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "MINISTACK_REGION": REGION,
    }


def _wait_until_healthy(server: subprocess.Popen[bytes], aws: LocalAws) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    endpoint, log = aws.endpoint, aws.log
    while not is_healthy(endpoint):
        if server.poll() is not None:
            reason = f"ended with code {server.returncode}"
        elif time.monotonic() > deadline:
            reason = f"does not answer at {endpoint} after {SECONDS_TO_START} s"
        else:
            time.sleep(0.05)
            continue
        tail = log.read_text(errors="replace")[-2000:].strip()
        raise LocalAwsError(f"the local AWS {reason}; the end of {log}:\n{tail}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server, politely and then not, and with it everything in its process group."""
    server.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=SECONDS_TO_STOP)
    finally:
        # The group is empty in most cases; macOS calls that a lack of permission.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        if server.stdin is not None:
            server.stdin.close()
