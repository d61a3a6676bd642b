"""The Session Manager plug-in, which carries shells and tunnels on AWS."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Final

from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.tasks import Task

PLUGIN: Final = "session-manager-plugin"
#: The first that reads a session from its environment, by its release notes.
_VERSION: Final = (1, 2, 536, 0)
_LOOPBACK: Final = "127.0.0.1"
#: A tunnel's way to the host and back.
_OPEN_S: Final = 30.0
_END_S: Final = 5.0


def require_plugin() -> str:
    """Path of the plug-in. Raises CliError where it is not installed, or too old."""
    plugin = shutil.which(PLUGIN)
    if plugin is None:
        raise CliError(
            f"{PLUGIN} is not installed, and shells and tunnels on AWS go through it: see 'Install "
            "the Session Manager plugin' in the documentation of AWS Systems Manager"
        )
    asked = subprocess.run([plugin, "--version"], capture_output=True, text=True, check=False)
    version = tuple(int(each) for each in re.findall(r"\d+", asked.stdout)[:4])
    if version < _VERSION:
        raise CliError(
            f"{PLUGIN} is {asked.stdout.strip() or 'of an unknown version'}: before "
            f"{'.'.join(map(str, _VERSION))} it takes a session's token as an argument, which all "
            "users of this machine can read. Install the newest one"
        )
    return plugin


@contextlib.contextmanager
def tunnel(
    deployment: Deployment, head: Task, *, port: int, local_port: int
) -> "Iterator[subprocess.Popen[str]]":
    """Keep a tunnel to a node open; yields the process that holds it, once it can be used.

    Args:
        port: of the node.
        local_port: the same on this machine.

    Raises:
        CliError: it does not open; the message has what the plug-in prints.
    """
    plugin = require_plugin()
    output.say(f"opening a tunnel to the {head.kind} ...")
    session = deployment.sessions.tunnel(head, port=port, local_port=local_port)
    process = subprocess.Popen(
        [plugin, *session.arguments],
        env={**os.environ, **session.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + _OPEN_S
        while is_free(local_port):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                said = " ".join(process.communicate()[0].split())[-400:]
                raise CliError(f"the tunnel does not open: {said or 'no reason given'}")
            time.sleep(0.1)
        yield process
    finally:
        # At Ctrl-C the terminal signals it too.
        process.terminate()
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def require_free(port: int) -> None:
    """Raises UsageError where a port of this machine, that of ``--port``, is in use."""
    if not is_free(port):
        raise UsageError(f"port {port} of this machine is in use: give another one with --port")


def free_port(wanted: int) -> int:
    """A port of this machine that is not in use: the wanted one where possible."""
    if is_free(wanted):
        return wanted
    with socket.create_server((_LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """True if nothing answers at a port of this machine."""
    with socket.socket() as asked:
        asked.settimeout(1)
        return asked.connect_ex((_LOOPBACK, port)) != 0
