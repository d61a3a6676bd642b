"""``--before bandwidth``: the network between a job's nodes is measured before its command."""

from typing import Final

from contract.ranges import Range
from contract.runs import check_run_name
from contract.text import significant
from trainctl.aws.shape import Shape
from trainctl.errors import UsageError

BANDWIDTH: Final = "bandwidth"
#: Of what AWS gives for the network of a host: the floor below which the job's command is not run.
SHARE: Final = 0.7
_SUFFIX: Final = "-bandwidth"
_MOST: Final = 63  # letters of a run's name


def command(wanted: str, *, run: str, nodes: Range, shape: Shape) -> tuple[str, ...]:
    """The words of the gate's own run, which is called RUN-bandwidth.

    Args:
        wanted: value of ``--before``.
        run: the job's.
        nodes: worker nodes; the gate measures the smallest number of them.

    Raises:
        UsageError: there is no such gate, or no network between nodes to measure.
    """
    if wanted != BANDWIDTH:
        raise UsageError(f"--before is {wanted!r}: it must be {BANDWIDTH}")
    hosts = nodes.low + (1 if shape.head_trains else 0)
    if hosts < 2:
        raise UsageError(
            f"--before {BANDWIDTH} measures the network between nodes that train, and this job "
            "may start with one: give more --nodes, or leave it out"
        )
    name = check_run_name(run[: _MOST - len(_SUFFIX)] + _SUFFIX)
    words = ["python", "-m", "training.launch", BANDWIDTH, "--preset", "quick", "--run", name]
    words += ["--workers", str(shape.num_workers(nodes.low)), "--overwrite"]
    return (*words, "--floor", significant(floor(shape)))


def floor(shape: Shape) -> float:
    """Least bus bandwidth of the all-reduce, in 10^9 bytes per second."""
    machine = shape.worker
    return SHARE * (machine.network_gbps if shape.efa else machine.tcp_gbps) / 8
