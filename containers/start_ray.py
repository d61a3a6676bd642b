"""``ray start`` as a node gives it: with forked workers, and without Ray Client.

    python -m containers.start_ray SERVER PRELOAD start --block ...

SERVER is the name of this node's fork server, or "-"; PRELOAD the values of TRAIN_PRELOAD that the
node's first job will ask for, with semicolons, or "-". The rest is for Ray's own command line.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from ray._private import services
from ray.scripts import scripts

from containers.log import say
from contract import nodes
from training.runtime import forkserver


def telling_agent_port(start: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the raylet at which port the agent beside it will answer.

    Ray 2.60 tells it the ports of its other helpers, and not this one, although the raylet has an
    option for it. Without, it waits until the agent has written its port into a file, and ends
    itself after 15 s, which the agent's imports exceed on a busy host.

    Args:
        start: Ray's own start of a process, with its command and what it is.
    """

    @functools.wraps(start)
    def new(command: list[str], process_type: str, *given: Any, **more: Any) -> Any:
        if process_type == "raylet":
            command = [*command, f"--dashboard_agent_listen_port={nodes.AGENT_PORT}"]
        return start(command, process_type, *given, **more)

    return new


def main(arguments: list[str]) -> None:
    server, expected, *rest = arguments
    expect = expected.split(";") if expected != forkserver.NONE else []
    # A process of its own behind port 10001, with which programs outside the cluster could run
    # anything inside it. Ray starts it wherever it can, and has no option against that.
    if hasattr(scripts, "get_ray_client_dependency_error"):
        scripts.get_ray_client_dependency_error = lambda: "left out on purpose"
    if hasattr(services, "start_ray_process"):
        services.start_ray_process = telling_agent_port(services.start_ray_process)
    sys.argv = ["ray", *rest]
    has_server = server != forkserver.NONE
    hook = forkserver.hook_ray(server, expect=expect) if has_server else contextlib.nullcontext()
    with hook as reason:
        if reason:
            say(f"no fork server: {reason}")
        # Its greeting is for people who start it by hand; warnings and errors go to stderr.
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            scripts.main()


if __name__ == "__main__":
    main(sys.argv[1:])
