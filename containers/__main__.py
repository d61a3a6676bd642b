"""``python -m containers head|worker|job``: the entry point of both images."""

import os
import sys
import time
from collections.abc import Sequence

from containers.host.machine import say
from containers.node import NodeConfig, NodeRunner
from contract import exits, faults, nodes, times
from contract.errors import InputError


@faults.command(say=say)
def main(arguments: Sequence[str]) -> int:
    """Be the node that the one argument names; return the container's exit code."""
    if len(arguments) != 1:
        raise InputError("one argument is needed: head, worker or job")
    if until := os.environ.get(nodes.ENV_KEPT):
        # The keeper ends this task; the rest is for the case that it cannot.
        say("this host is kept for its user's next job")
        time.sleep(max(0, float(until) + times.SWEEP_GRACE_S - time.time()))
        return exits.OK
    if arguments[0] == nodes.JOB:
        from containers import job_head  # a worker has no use for it

        return job_head.run(os.environ)
    return NodeRunner(NodeConfig.from_environment(arguments[0], os.environ)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
