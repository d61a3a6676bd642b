"""``ray start`` of a node, which also comes up where its processors are slow or busy.

    python -m containers.ray_start ARGUMENTS OF `ray start`

Use it in place of Ray's own command for a node of a cluster.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray
from ray._private import node, services

#: Ray's own names and ways; its module in C has no types.
_raylet: Any = ray._raylet

#: Files in which the agent of a node tells the raylet where it listens -> the parameter of Ray's
#: ``start_raylet`` with the port.
PORT_FILES: Final = {
    _raylet.METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    _raylet.METRICS_EXPORT_PORT_NAME: "metrics_export_port",
    _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
}
#: Ray's raylet waits 15 s for its agent; less, because this process may be late too.
LATE_S: Final = 8.0


def without_the_wait(start_raylet: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Ray's ``start_raylet``: a raylet joins the cluster also if its agent is late.

    After 15 s without the agent's ports a raylet ends, even where they are fixed
    (ray-project/ray#65983). On two busy processors the agent's imports take longer, and each new
    start keeps them busy. A late agent's ports are written down here; it writes the same ones.
    """
    signature = inspect.signature(start_raylet)

    def start(*arguments: Any, **named: Any) -> Any:
        found = start_raylet(*arguments, **named)
        values = signature.bind(*arguments, **named).arguments
        ports = {name: values[port] for name, port in PORT_FILES.items()}
        about = (values["session_dir"], values["node_id"], ports)
        threading.Thread(target=_write_missing, args=about, daemon=True).start()
        return found

    return start


def _write_missing(session: str, node_id: str, ports: dict[str, int]) -> None:
    time.sleep(LATE_S)
    missing = [name for name in ports if not Path(session, f"{name}_{node_id}").exists()]
    if missing:
        print(f"node: Ray's agent needs more than {LATE_S:.0f} s to start here", file=sys.stderr)
    for name in missing:
        _raylet.persist_port(session, node_id, name, ports[name])


def main() -> None:
    """Run ``ray start`` with the arguments of this process."""
    from ray.scripts import scripts

    services.start_raylet = without_the_wait(services.start_raylet)
    # A proxy for programs outside the cluster, which none can reach. It is a Python more to start.
    ray_node: Any = node.Node
    ray_node.start_ray_client_server = lambda _node: None
    start_processes, start_dashboard = ray_node.start_ray_processes, ray_node.start_api_server
    dashboard: dict[str, Any] = {}

    def start_all(own: Any) -> None:
        start_processes(own)
        if own.head:
            start_dashboard(own, **dashboard)

    ray_node.start_api_server = lambda _node, **how: dashboard.update(how)
    ray_node.start_ray_processes = start_all
    scripts.main()


if __name__ == "__main__":
    main()
