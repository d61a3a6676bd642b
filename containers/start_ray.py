"""``ray start`` as a node gives it: with forked workers, and without Ray Client.

    python -m containers.start_ray SERVER PRELOAD start --block ...

SERVER is the name of this node's fork server, or "-"; PRELOAD the values of TRAIN_PRELOAD that the
node's first job will ask for, with semicolons, or "-". The rest is for Ray's own command line.
"""

import contextlib
import sys

from ray.scripts import scripts

from containers.log import say
from training.runtime import forkserver


def main(arguments: list[str]) -> None:
    server, expected, *rest = arguments
    expect = expected.split(";") if expected != forkserver.NONE else []
    # A process of its own behind port 10001, with which programs outside the cluster could run
    # anything inside it. Ray starts it wherever it can, and has no option against that.
    if hasattr(scripts, "get_ray_client_dependency_error"):
        scripts.get_ray_client_dependency_error = lambda: "left out on purpose"
    sys.argv = ["ray", *rest]
    has_server = server != forkserver.NONE
    hook = forkserver.hook_ray(server, expect=expect) if has_server else contextlib.nullcontext()
    with hook as reason:
        if reason:
            say(f"no fork server: {reason}")
        scripts.main()


if __name__ == "__main__":
    main(sys.argv[1:])
