"""Jobs start in order and within the limits, and each of them in the end, whatever is submitted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from contract.admission import Limits, in_order
from contract.job import JobSpec, Priority
from contract.nodes import Range


@dataclass(eq=False)
class Job:
    """One that was submitted."""

    number: int
    nodes: Range
    granted: Range | None = None


def played(seed: int) -> Iterator[tuple[Limits, list[Job]]]:
    """Jobs come, look whether it is their turn, at moments of their own, and end: the limits and
    the jobs that are there, after each step."""
    chance = Random(seed)
    limits = Limits(max_heads=chance.randint(1, 4), max_workers=chance.randint(1, 6))
    jobs: list[Job] = []
    to_come = chance.randint(2, 12)
    while jobs or to_come:
        started = [job for job in jobs if job.granted]
        match chance.choice(["comes", "looks", "looks", "ends"]):
            case "comes" if to_come:
                to_come -= 1
                low = chance.randint(0, limits.max_workers)
                jobs.append(Job(to_come, Range(low, chance.randint(low, limits.max_workers))))
            case "looks" if jobs:
                job = chance.choice(jobs)
                earlier = [each.nodes for each in jobs[: jobs.index(job)]]
                job.granted = job.granted or limits.admit(job.nodes, earlier)
            case "ends" if started:
                jobs.remove(chance.choice(started))
        yield limits, jobs


@pytest.mark.parametrize("seed", range(200))
def test_jobs_never_have_more_than_there_is_and_none_waits_for_a_later_one_or_for_ever(
    seed: int,
) -> None:
    for limits, jobs in played(seed):
        started = [job for job in jobs if job.granted]
        assert len(started) <= limits.max_heads
        granted = [job.granted for job in started if job.granted]
        assert sum(each.high for each in granted) <= limits.max_workers, "no two hold half each"
        for job in started:
            assert job.granted
            assert job.nodes.low == job.granted.low <= job.granted.high <= job.nodes.high
        if jobs:
            assert limits.admit(jobs[0].nodes, []), "the first in the queue may always start"
        # Each could start at the same moment if there were none behind it.
        for number, job in enumerate(jobs):
            earlier = [each.nodes for each in jobs[:number]]
            if not job.granted and limits.admit(job.nodes, earlier):
                assert len(started) < limits.max_heads
                taken = sum(each.high for each in granted)
                assert taken + job.nodes.low <= limits.max_workers
    assert not jobs, "all have had their turn"


@pytest.mark.parametrize(
    ("nodes", "earlier", "granted"),
    [
        (Range(4, 4), [], Range(4, 4)),
        (Range(1, 8), [], Range(1, 4)),
        (Range(5, 8), [], None),
        (Range(2, 4), [Range(2, 2)], Range(2, 2)),
        # What runs may grow to the most that it has asked for.
        (Range(1, 1), [Range(1, 4)], None),
        # A head by itself, and one that trains, need no worker.
        (Range(0, 0), [Range(4, 4)], Range(0, 0)),
        (Range(0, 3), [Range(1, 3)], Range(0, 1)),
        (Range(0, 0), [Range(0, 0), Range(0, 0)], None),
        # Without trainctl more can be asked for than there is.
        (Range(0, 2), [Range(1, 99)], Range(0, 0)),
    ],
)
def test_a_job_has_its_fewest_nodes_and_grows_to_what_earlier_ones_leave(
    nodes: Range, earlier: list[Range], granted: Range | None
) -> None:
    assert Limits(max_heads=2, max_workers=4).admit(nodes, earlier) == granted


def order(nodes: str, *pools: str) -> JobSpec:
    wanted = Range.parse(nodes, option="nodes")
    return JobSpec(run="r", command=("x",), nodes=wanted, pools=pools)


#: Of hosts for four workers, two in pool a and eight in pool b: what is asked for, earlier jobs,
#: and where there is room.
PLACES: list[tuple[JobSpec | None, list[JobSpec | None], tuple[tuple[str, ...], str] | None]] = [
    (order("4"), [], (("default",), "4")),
    (order("2", "a"), [order("4")], (("a",), "2")),  # hosts of another pool are not in the way
    (order("2", "a"), [order("1", "a")], None),
    (order("1", "gone"), [], None),
    # An earlier job may go to each pool of its list.
    (order("2", "a"), [order("2", "default", "a")], None),
    (order("2", "a", "default"), [order("2", "a", "b")], (("default",), "2")),
    # It has no more in any of them than it may have in all.
    (order("1:8", "b", "gone", "a"), [], (("b", "a"), "1:2")),
    (None, [order("4")], (("default",), "0")),
]


@pytest.mark.parametrize(("wanted", "earlier", "found"), PLACES)
def test_each_pool_has_its_own_hosts(
    wanted: JobSpec | None,
    earlier: list[JobSpec | None],
    found: tuple[tuple[str, ...], str] | None,
) -> None:
    limits = Limits(max_heads=2, max_workers=4, pools={"a": 2, "b": 8})
    place = limits.place(wanted, earlier)
    assert (place and (place[0], str(place[1]))) == found


def test_jobs_are_in_order_by_priority_then_start_then_name_and_none_waits_for_ever() -> None:
    now = datetime.now(tz=UTC)
    levels = dict(zip("abcdef", ["normal", "normal", "normal", "high", "low", "low"], strict=True))
    hours = dict(zip("abcdef", [2, 1, 2, 1, 11.9, 12.1], strict=True))
    executions = [
        {"name": name, "startDate": now - timedelta(hours=hours[name]), "status": "RUNNING"}
        for name in "bdfeca"
    ]
    orders = {
        name: JobSpec(run="r", command=("x",), nodes=Range(1, 1), priority=Priority(level))
        for name, level in levels.items()
    }
    begun = set[str]()
    found = in_order(executions, orders.get, has_begun=begun.__contains__, now=now.timestamp())
    assert found == [*("f", "d"), *("a", "c", "b"), "e"], "f has waited for half a day"
    orders["d"], orders["c"] = replace(orders["d"], after="a"), replace(orders["c"], after="gone")
    found = in_order(executions, orders.get, has_begun=begun.__contains__, now=now.timestamp())
    assert found == ["f", "a", "c", "b", "e"], "d follows one that is unfinished"
    orders["d"] = replace(orders["d"], with_run="r")
    for has_begun in ("b", "a"):
        begun.add(has_begun)
        found = in_order(executions, orders.get, has_begun=begun.__contains__, now=now.timestamp())
        assert ("d" in found) == (has_begun == "a"), "d goes with a, once that has begun"
