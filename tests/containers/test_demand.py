"""Requests that can never be met are told from those that only wait, in one sentence."""

import pytest

from containers import demand
from containers.demand import DemandWatch, RayReport, ResourceRequest

#: Preset cpu with two nodes: the head only coordinates.
CPU = [{"CPU": 0}, {"CPU": 2}, {"CPU": 2}]
GPU = [{"CPU": 0}, {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}]
TRAINS = [{"CPU": 8, "GPU": 4}] * 2
ONE, TWO, ON_GPU = {"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}


def group(num: int, bundle: dict[str, float], strategy: str = "PACK") -> ResourceRequest:
    return ResourceRequest(bundles=(bundle,) * num, strategy=strategy)


def of(*bundles: dict[str, float], strategy: str = "") -> ResourceRequest:
    return ResourceRequest(bundles=bundles, strategy=strategy)


@pytest.mark.parametrize(
    ("request_", "nodes", "words"),
    [
        # Not even the whole job could hold it.
        (group(5, ONE), CPU, "5 workers of 1 CPU each; this job has at most 4"),
        (group(2, ON_GPU), CPU, "2 workers of 1 CPU and 1 GPU each; this job has at most 0"),
        (group(9, ON_GPU), GPU, "9 workers of 1 CPU and 1 GPU each; this job has at most 8"),
        (group(3, ONE, "STRICT_SPREAD"), CPU, "3 workers of 1 CPU each; this job has at most 2"),
        (group(3, ONE, "STRICT_PACK"), CPU, "3 CPUs on one node; a node of this job has 2 CPUs"),
        (of({"GPU": 1.0}), CPU, "1 GPU on one node; a node of this job has 2 CPUs"),
        (of({"CPU": 3.0}), CPU, "3 CPUs on one node; a node of this job has 2 CPUs"),
        (
            of(ONE, TWO, TWO, TWO, strategy="PACK"),
            CPU,
            "3 workers of 2 CPUs each; this job has at most 2",
        ),
        (
            of(ONE, {"GPU": 1.0}, strategy="SPREAD"),
            CPU,
            "1 worker of 1 GPU; this job has at most 0",
        ),
        # An idle job could: it only waits.
        (group(4, ONE), CPU, ""),
        (group(4, ONE, "SPREAD"), CPU, ""),
        (group(2, TWO, "STRICT_SPREAD"), CPU, ""),
        (group(2, ONE, "STRICT_PACK"), CPU, ""),
        (group(8, ON_GPU), GPU, ""),
        (group(8, ON_GPU), TRAINS, ""),
        (group(24, {"GPU": 1 / 3}), GPU, ""),
        (of({}), CPU, ""),
        (of({"CPU": 0.0, "GPU": 0.0}), CPU, ""),
        (of(ONE, TWO, strategy="PACK"), CPU, ""),
        (of({"CPU": 1.0, "memory": 2.0**40, "node:10.0.0.9": 0.01}), CPU, ""),
    ],
)
def test_what_can_never_be_is_told_from_what_only_waits(
    request_: ResourceRequest, nodes: list[dict[str, int]], words: str
) -> None:
    assert demand.impossible(request_, nodes) == (f"asks for {words}" if words else None)


def seen(*requests: ResourceRequest) -> RayReport:
    return RayReport(requests=requests, idle_s=())


def reason(*looks: tuple[float, RayReport]) -> str:
    watch = DemandWatch(CPU)
    for now, each in looks:
        watch.take(each, now=now)
    return watch.reason


def test_a_program_must_mean_what_it_asks_for() -> None:
    asks = seen(group(5, ONE))
    assert reason((0, asks), (10, asks)) == ""
    assert reason((0, asks), (10, seen()), (20, seen()), (21, asks)) == ""
    assert reason((0, asks), (8, seen()), (16, asks)).startswith("asks for 5 workers")


def test_trials_that_queue_do_not_end_a_job() -> None:
    queue = seen(*[group(1, {"CPU": 2.0})] * 20)
    assert reason((0, queue), (60, queue)) == ""
