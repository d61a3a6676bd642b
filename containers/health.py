"""Health check of a node's container: ``python -m containers.health``, exit code 0 or 1.

Standard library only, and quick: ECS runs it every few seconds. Asks Ray on this node itself; both
addresses stay open without a token.
"""

import os
import sys
import urllib.request
from typing import Final

from training import contract

TIMEOUT_S: Final = 3


def url(kind: str) -> str:
    """What is asked: on the head whether the cluster's control service lives, else the raylet."""
    if kind == contract.HEAD:
        return f"http://127.0.0.1:{contract.DASHBOARD_PORT}/api/gcs_healthz"
    return f"http://127.0.0.1:{contract.AGENT_PORT}/api/local_raylet_healthz"


def main() -> int:
    kind = os.environ.get(contract.ENV_NODE, contract.WORKER)
    try:
        with urllib.request.urlopen(url(kind), timeout=TIMEOUT_S) as answer:
            body = answer.read().decode(errors="replace")
    except OSError as error:
        print(f"unhealthy: {url(kind)}: {error}", file=sys.stderr)
        return 1
    print(body)
    return 0 if "success" in body else 1


if __name__ == "__main__":
    sys.exit(main())
