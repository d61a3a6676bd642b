"""Stands for Ray's dashboard agent in a Ray that has no dashboard.

The raylet does not start without an agent: it waits for three files with the agent's ports, and
ends when the agent does. Ray's own agent imports for two seconds and then serves metrics and a web
page. This one says what Ray's says where it serves nothing (-1: ray/dashboard/agent.py, the branch
for a minimal installation), and sleeps. ``training.runtime.local_ray`` puts it in place.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main(raylet: int, session: str, node: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != raylet:
        return
    for name in PORTS:
        path = os.path.join(session, f"{name}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.rename(f"{path}.new", path)  # whole at once: the raylet is looking
    while True:
        signal.pause()


if __name__ == "__main__":
    main(int(os.environ.get("RAY_RAYLET_PID") or os.getppid()), *sys.argv[1:])
