"""Log streams of nodes in CloudWatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from contract import nodes
from contract.nodes import ClusterSize
from contract.secret_text import masked
from trainctl.aws.clients import Clients, unless
from trainctl.aws.tasks import Task

if TYPE_CHECKING:
    from mypy_boto3_logs.type_defs import FilterLogEventsRequestPaginateTypeDef

#: Lines of the head's newest log that may stand between two of the cluster's sizes.
_SIZE_WITHIN_LINES: Final = 500
#: As many streams as one FilterLogEvents takes.
_STREAMS_MOST: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """A line that a node has written."""

    task: Task
    at: int
    """Unix time at which it was written, in milliseconds."""
    text: str
    id: str
    """CloudWatch's."""


class NodeLogs:
    """The logs of all nodes, in one log group."""

    def __init__(self, clients: Clients, *, group: str) -> None:
        self._clients, self.group = clients, group
        self._exist: set[str] = set()
        self._never: set[str] = set()

    def lines(self, tasks: Sequence[Task], *, since: int) -> list[LogLine]:
        """Read the lines of several nodes, in the order of their times.

        One call for up to 100 nodes, and one more for each further megabyte.

        Args:
            tasks: the nodes; those that have not written yet are left out.
            since: Unix time in milliseconds.
        """
        of_stream = {self.stream(task): task for task in tasks}
        names = [name for name in of_stream if name not in self._never]
        found: list[LogLine] = []
        for first in range(0, len(names), _STREAMS_MOST):
            some = names[first : first + _STREAMS_MOST]
            with unless("ResourceNotFoundException"):
                found += self._filtered(some, since=since, of_stream=of_stream)
                continue
            # One stream that is not there yet fails the call for all of them.
            some = [name for name in some if self._exists(name, of_stream[name])]
            found += self._filtered(some, since=since, of_stream=of_stream)
        # Sorting keeps the lines of a node that have the same time in their order.
        return sorted(found, key=lambda line: line.at)

    def _filtered(
        self, names: Sequence[str], *, since: int, of_stream: dict[str, Task]
    ) -> list[LogLine]:
        if not names:
            return []
        request: FilterLogEventsRequestPaginateTypeDef = {
            "logGroupName": self.group,
            "logStreamNames": [*names],
            "startTime": max(since, 0),
        }
        pages = self._clients.logs.get_paginator("filter_log_events").paginate(**request)
        return [
            LogLine(
                task=of_stream[event["logStreamName"]],
                at=event["timestamp"],
                text=masked(event["message"].rstrip()),
                id=event["eventId"],
            )
            for event in pages.search("events[]")
        ]

    def _exists(self, name: str, task: Task) -> bool:
        """Check that a stream exists; asks until it does, or never will."""
        if name not in self._exist:
            there = self._read(name, limit=1) is not None
            if there or task.has_stopped:
                (self._exist if there else self._never).add(name)
        return name in self._exist

    def last_lines(self, task: Task, number: int = 5) -> list[str]:
        """The end of a node's log; empty when it has none. One call."""
        return self._read(self.stream(task), limit=number) or []

    def ray_size(self, head: Task) -> ClusterSize | None:
        """Size of the Ray cluster in the head's log; None while it reports nothing."""
        lines = self.last_lines(head, _SIZE_WITHIN_LINES)
        sizes = (ClusterSize.from_line(line) for line in reversed(lines))
        return next((size for size in sizes if size), None)

    def stream(self, task: Task) -> str:
        """Name of a node's log stream. Tasks have their log settings from the task definition, so
        it cannot hold the job's id."""
        return f"{task.node}/{nodes.CONTAINER}/{task.id}"

    def _read(self, stream: str, *, limit: int) -> list[str] | None:
        """The last lines; None where there is no such stream."""
        with unless("ResourceNotFoundException"):
            found = self._clients.logs.get_log_events(
                logGroupName=self.group, logStreamName=stream, startFromHead=False, limit=limit
            )
            return [each["message"].rstrip() for each in found["events"]]
        return None  # the container has not written a line yet
