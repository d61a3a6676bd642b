"""Requests that can never be met are told from those that only wait, in one sentence."""

import pytest

from containers import demand
from containers.demand import Capacity, Request, Seen, Watch

#: Preset cpu with two nodes: the head only coordinates.
CPU = Capacity(head={"CPU": 0, "GPU": 0}, worker={"CPU": 2, "GPU": 0}, workers=2)
GPU = Capacity(head={"CPU": 0, "GPU": 0}, worker={"CPU": 8, "GPU": 4}, workers=2)
TRAINS = Capacity(head={"CPU": 8, "GPU": 4}, worker={"CPU": 8, "GPU": 4}, workers=1)
ONE, ON_GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


def group(num: int, bundle: dict[str, float], strategy: str = "PACK") -> Request:
    return Request(bundles=(bundle,) * num, strategy=strategy)


@pytest.mark.parametrize(
    ("request_", "capacity", "words"),
    [
        (group(5, ONE), CPU, "asks for 5 workers of 1 CPU each; this job has at most 4"),
        (
            group(2, ON_GPU),
            CPU,
            "asks for 2 workers of 1 CPU and 1 GPU each; this job has at most 0",
        ),
        (
            group(9, ON_GPU),
            GPU,
            "asks for 9 workers of 1 CPU and 1 GPU each; this job has at most 8",
        ),
        (
            group(3, ONE, "STRICT_SPREAD"),
            CPU,
            "asks for 3 workers of 1 CPU each; this job has at most 2",
        ),
        (
            group(3, ONE, "STRICT_PACK"),
            CPU,
            "asks for 3 CPUs on one node; a node of this job has 2 CPUs",
        ),
        (
            Request(bundles=({"GPU": 1.0},)),
            CPU,
            "asks for 1 GPU on one node; a node of this job has 2 CPUs",
        ),
        (
            Request(bundles=({"CPU": 3.0},)),
            CPU,
            "asks for 3 CPUs on one node; a node of this job has 2 CPUs",
        ),
        (
            Request(bundles=({"CPU": 1.0}, {"CPU": 2.0}, *[{"CPU": 2.0}] * 2), strategy="PACK"),
            CPU,
            "asks for 3 workers of 2 CPUs each; this job has at most 2",
        ),
        (
            Request(bundles=({"CPU": 1.0}, {"GPU": 1.0}), strategy="SPREAD"),
            CPU,
            "asks for 1 worker of 1 GPU; this job has at most 0",
        ),
    ],
)
def test_what_not_even_the_whole_job_could_hold_is_impossible(
    request_: Request, capacity: Capacity, words: str
) -> None:
    assert demand.impossible(request_, capacity) == words


@pytest.mark.parametrize(
    ("request_", "capacity"),
    [
        (group(4, ONE), CPU),
        (group(4, ONE, "SPREAD"), CPU),
        (group(2, {"CPU": 2.0}, "STRICT_SPREAD"), CPU),
        (group(2, ONE, "STRICT_PACK"), CPU),
        (group(8, ON_GPU), GPU),
        (group(8, ON_GPU), TRAINS),
        (group(24, {"GPU": 1 / 3}), GPU),
        (Request(bundles=({},)), CPU),
        (Request(bundles=({"CPU": 0.0, "GPU": 0.0},)), CPU),
        (Request(bundles=({"CPU": 1.0}, {"CPU": 2.0}), strategy="PACK"), CPU),
        (Request(bundles=({"CPU": 1.0, "memory": 2.0**40, "node:10.0.0.9": 0.01},)), CPU),
    ],
)
def test_what_an_idle_job_could_hold_only_waits(request_: Request, capacity: Capacity) -> None:
    assert demand.impossible(request_, capacity) is None


def seen(*requests: Request) -> Seen:
    return Seen(requests=requests, idle_s=())


def reason(*looks: tuple[float, Seen], capacity: Capacity = CPU) -> str:
    watch = Watch(capacity)
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
