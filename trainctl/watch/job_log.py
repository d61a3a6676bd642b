"""The log of a job: the lines of all its nodes, merged, searched and printed."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from contract import nodes
from trainctl import output
from trainctl.aws.jobs import JobExecution
from trainctl.aws.logs import LogLine, NodeLogs
from trainctl.aws.tasks import Task

#: Lines may come to CloudWatch later than newer ones of other nodes, by as much as this. Lines
#: that were read before are known by their ids.
_LATE_MS: Final = 30_000
#: Clocks of this machine and of AWS may differ by as much as this. The end of a log is looked for
#: in this time before now, and then in ten times as much.
_SKEW_MS: Final = 600_000


class JobLog:
    """Lines of all nodes of a job, each once.

    Lines are in the order of their times, as far as they were there at the same call.
    """

    def __init__(
        self,
        logs: NodeLogs,
        *,
        node: int | None = None,
        tail: int | None = None,
        as_json: bool = False,
        on_stderr: bool = False,
    ) -> None:
        """
        Args:
            node: only what the job's command printed on this node, where it runs on all.
            tail: how many of the lines that are there at the first call; all by default.
        """
        self._logs, self._node, self._tail = logs, node, tail
        self._as_json, self._on_stderr = as_json, on_stderr
        self._known: set[str] = set()
        self._newest = 0
        self._seen: dict[str, int] = {}

    def new(self, job: JobExecution, tasks: Sequence[Task]) -> list[LogLine]:
        """Lines that are new since the last call. ``tasks``: the job's nodes."""
        tail, self._tail = self._tail, None
        if tail is not None:
            return self.last(job, tasks, tail)
        first = self._first(job)
        again = max(first, self._newest, _ms(datetime.now(tz=UTC)) - _SKEW_MS)
        read = self._started(tasks)
        lines: list[LogLine] = []
        for since, some in (
            (first, [task for task in read if task.id not in self._known]),
            (again - _LATE_MS, [task for task in read if task.id in self._known]),
        ):
            if some:
                lines += self._logs.lines(some, since=max(first, since))
        return self._fresh(read, lines)

    def last(self, job: JobExecution, tasks: Sequence[Task], number: int) -> list[LogLine]:
        """The last ``number`` of the lines that are wanted; ``new`` continues after them."""
        first, end = self._first(job), _ms(job.ended or datetime.now(tz=UTC))
        read, since = self._started(tasks), end - _SKEW_MS
        lines = self._logs.lines(read, since=max(first, since))
        while sum(map(self._is_wanted, lines)) < number and since > first:
            since = end - 10 * (end - since)
            lines = self._logs.lines(read, since=max(first, since))
        self._newest = since + _LATE_MS  # nothing before that is read again
        fresh = self._fresh(read, lines)
        return fresh[max(0, len(fresh) - number) :]

    def print_new(self, job: JobExecution, tasks: Sequence[Task]) -> list[LogLine]:
        """Print the new lines; return them."""
        lines = self.new(job, tasks)
        show(lines, as_json=self._as_json, on_stderr=self._on_stderr)
        return lines

    def _is_wanted(self, line: LogLine) -> bool:
        return self._node in (None, nodes.labelled_node(line.text))

    def _first(self, job: JobExecution) -> int:
        """Time of the first line that may be shown; a node's clock may differ."""
        return _ms(job.began) - _SKEW_MS

    def _started(self, tasks: Sequence[Task]) -> list[Task]:
        """The nodes that can have written something."""
        return [task for task in tasks if not task.is_starting]

    def _fresh(self, read: Sequence[Task], lines: Sequence[LogLine]) -> list[LogLine]:
        """The wanted ones of the lines that were not read before, in the order of their times."""
        self._known |= {task.id for task in read}
        fresh = [line for line in lines if line.id not in self._seen]
        self._newest = max([self._newest, *(line.at for line in fresh)])
        self._seen |= {line.id: line.at for line in fresh}
        oldest = self._newest - _LATE_MS
        self._seen = {name: at for name, at in self._seen.items() if at >= oldest}
        return [line for line in sorted(fresh, key=lambda line: line.at) if self._is_wanted(line)]


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def label(line: LogLine) -> str:
    """Prefix of a line: nothing on the head, and the node's number, which it has already,
    where a program runs on all nodes."""
    if line.task.is_head or nodes.labelled_node(line.text) is not None:
        return ""
    return f"[worker {line.task.id[:6]}] "


def text(line: LogLine) -> str:
    """A line with its label."""
    return f"{label(line)}{line.text}"


def show(lines: Sequence[LogLine], *, as_json: bool = False, on_stderr: bool = False) -> None:
    """Print lines: text, or a JSON object each."""
    for line in lines:
        if as_json:
            print(json.dumps(values(line)), flush=True)
        else:
            output.print_text(text(line), on_stderr=on_stderr)


def values(line: LogLine) -> dict[str, object]:
    """A line for ``--json``."""
    at = datetime.fromtimestamp(line.at / 1000, tz=UTC)
    return {
        "at": at.isoformat(timespec="milliseconds"),
        "node": line.task.kind,
        "task": line.task.id,
        "program_node": nodes.labelled_node(line.text),
        "line": line.text,
    }
