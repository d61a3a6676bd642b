"""Health check of a node's container: ``python -P -m containers.health``, exit code 0 or 1.

ECS starts it every few seconds beside the training, so it imports next to nothing: a client for
HTTP would be most of its work. Asks Ray on this node itself; both addresses stay open without a
token.
"""

import os
import socket
import sys

from contract import nodes
from contract.times import HEALTH_PROBE_S


def place(kind: str) -> tuple[int, str]:
    """Port and path asked: on the head whether the cluster's control service lives, else the
    raylet."""
    if kind == nodes.HEAD:
        return nodes.DASHBOARD_PORT, "/api/gcs_healthz"
    return nodes.AGENT_PORT, "/api/local_raylet_healthz"


def ask(port: int, path: str) -> str:
    """The answer of this machine's server at ``port``, headers included. Raises OSError."""
    request = f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=HEALTH_PROBE_S) as connection:
        connection.settimeout(HEALTH_PROBE_S)
        connection.sendall(request.encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer.decode(errors="replace")


def listens(port: int) -> bool:
    """True if a server on this machine accepts connections at ``port``."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=HEALTH_PROBE_S).close()
    except OSError:
        return False
    return True


def main() -> int:
    if os.environ.get(nodes.ENV_KEPT):
        return 0  # no Ray runs here
    port, path = place(os.environ.get(nodes.ENV_NODE, nodes.WORKER))
    url = f"http://127.0.0.1:{port}{path}"
    try:
        head, _, body = ask(port, path).partition("\r\n\r\n")
    except OSError as error:
        # The dashboard answers for the control service, and training needs only the latter.
        if port == nodes.DASHBOARD_PORT and listens(nodes.GCS_PORT):
            print(f"{url}: {error}; the control service listens")
            return 0
        print(f"unhealthy: {url}: {error}", file=sys.stderr)
        return 1
    if " 200 " not in head.partition("\r\n")[0] or "success" not in body:
        print(f"unhealthy: {url}: {head.partition(chr(13))[0]}: {body}", file=sys.stderr)
        return 1
    print(body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
