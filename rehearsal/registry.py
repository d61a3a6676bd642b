"""An image registry on loopback, in place of ECR: what is pushed there is what the nodes pull.

It is Debian's ``docker-registry`` (the distribution project's), started as a plain process. Engines
take 127.0.0.1 for a registry that needs no certificate.
"""

import http.client
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from rehearsal import processes

ROLE: Final = "registry"
SECONDS_TO_START: Final = 20

_CONFIG: Final = """\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{folder}"}}
  delete: {{enabled: true}}
http: {{addr: "{address}"}}
"""


class RegistryError(RuntimeError):
    """The registry does not start; the message says why."""


def program() -> str | None:
    """Path of the registry's program, or None where it is not installed."""
    return shutil.which("docker-registry") or shutil.which("registry")


def start(folder: Path, *, name: str) -> str:
    """Start a registry that keeps its images in ``folder``; return its ``host:port``.

    Raises:
        RegistryError: it ends at once, or does not answer.
    """
    command = program()
    if command is None:
        raise RegistryError("no registry: install docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "config.yml", folder / "log"
    config.write_text(_CONFIG.format(folder=folder / "images", address=address))
    server = processes.start(
        [command, "serve", str(config)],
        name=name,
        role=ROLE,
        environment={"OTEL_TRACES_EXPORTER": "none"},
        log=log,
    )
    _wait_until_it_answers(server, address, log)
    return address


def _wait_until_it_answers(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while server.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(address, timeout=5)
        try:
            connection.request("GET", "/v2/")
            if connection.getresponse().status == http.client.OK:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        finally:
            connection.close()
    said = log.read_text(errors="replace")[-1000:].strip()
    raise RegistryError(f"the image registry does not answer at {address}; it said:\n{said}")
