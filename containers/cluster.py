"""How large the cluster is, said in the head's log whenever it changes.

From outside, only the log tells whether the workers that ECS has started have joined Ray:
``trainctl cluster`` reads the line.
"""

import http.client
import json
import threading
from collections.abc import Callable
from typing import Final

from contract.nodes import DASHBOARD_PORT, ClusterSize

#: The answer lists all nodes, and takes the dashboard some milliseconds.
POLL_S: Final = 1.0
#: Until there is a first answer: a job's command waits for it.
FIRST_POLL_S: Final = 0.2
_PATH: Final = "/api/v0/nodes?detail=1&limit=10000&timeout=5"


def size(token: str) -> ClusterSize:
    """Ask this node's dashboard.

    Raises:
        OSError: it does not answer (yet).
        ValueError: it answers something else.
    """
    connection = http.client.HTTPConnection("127.0.0.1", DASHBOARD_PORT, timeout=10)
    try:
        connection.request("GET", _PATH, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read()
    except http.client.HTTPException as error:
        raise ValueError(f"the dashboard answered {error!r}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise ValueError(f"the dashboard answered {answer.status}")
    return counted(body)


def counted(answer: bytes) -> ClusterSize:
    """Add up what the nodes of the state API's answer have. Raises ValueError on another answer."""
    try:
        nodes = json.loads(answer)["data"]["result"]["result"]
        alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of nodes in the dashboard's answer: {error!r}") from error
    return ClusterSize(
        num_nodes=len(alive),
        num_cpus=int(sum(each.get("CPU", 0) for each in alive)),
        num_gpus=int(sum(each.get("GPU", 0) for each in alive)),
    )


def watch(token: str, say: Callable[[str], None], stopped: threading.Event) -> None:
    """Say the size at the start and whenever it changes, until ``stopped`` is set."""
    last: ClusterSize | None = None
    while not stopped.wait(POLL_S if last else FIRST_POLL_S):
        try:
            now = size(token)
        except (OSError, ValueError):
            continue  # not up yet, or busy; the node's own health check says when it is worse
        if now != last and now.num_nodes:
            say(now.line())
            last = now
