"""``--before bandwidth``: measure the network between a job's nodes before its command."""

from collections.abc import Mapping
from typing import Final

from contract.nodes import Range
from contract.runs import check_run_name
from contract.text import significant
from trainctl.aws.errors import UsageError
from trainctl.aws.shape import Shape

BANDWIDTH: Final = "bandwidth"
#: Share of a host's nominal network bandwidth below which the job's command is not run.
SHARE: Final = 0.7
#: The same where sockets do not fill the network, above so many Gb/s: the published 2.4 GB/s of a
#: p4d.24xlarge are a fifth of its 100 (docs/scaling.md).
WIDE_SHARE: Final = 0.15
WIDE_GBPS: Final = 50.0
_SUFFIX: Final = "-bandwidth"
_MOST: Final = 63  # letters of a run's name


def command(
    *, run: str, nodes: Range, shape: Shape, variables: Mapping[str, str]
) -> tuple[str, ...]:
    """The words of the gate's own run, which is called RUN-bandwidth.

    Args:
        run: the job's.
        nodes: worker nodes; the gate measures the smallest number of them.
        variables: of the job.

    Raises:
        UsageError: there is no network between nodes to measure.
    """
    hosts = nodes.low + (1 if shape.head_trains else 0)
    if hosts < 2:
        raise UsageError(
            f"--before {BANDWIDTH} measures the network between nodes that train, and this job "
            "may start with one: give more --nodes, or leave it out"
        )
    name = check_run_name(run[: _MOST - len(_SUFFIX)] + _SUFFIX)
    words = ["python", "-m", "training.launch", BANDWIDTH, "--preset", "quick", "--run", name]
    words += ["--workers", str(shape.num_workers(nodes.low)), "--overwrite"]
    uses_efa = shape.efa and variables.get("NCCL_NET") != "Socket"
    return (*words, "--floor", significant(floor(shape, uses_efa=uses_efa)))


def floor(shape: Shape, *, uses_efa: bool) -> float:
    """Least bus bandwidth of the all-reduce, in 10^9 bytes per second."""
    machine = shape.worker
    if uses_efa:
        return SHARE * machine.network_gbps / 8
    share = WIDE_SHARE if machine.tcp_gbps > WIDE_GBPS else SHARE
    return share * machine.tcp_gbps / 8
