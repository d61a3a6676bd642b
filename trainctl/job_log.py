"""The log of a job: the lines of all its nodes, merged, searched and printed."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from contract import nodes
from trainctl import output
from trainctl.aws.jobs import Job
from trainctl.aws.logs import PAGE_LINES, LogLine, NodeLogs
from trainctl.aws.tasks import Task

if TYPE_CHECKING:
    from rich.text import Text

#: Lines may come to CloudWatch later than newer ones of other nodes, by as much as this. Lines
#: that were read before are known by their ids.
_LATE_MS: Final = 30_000
#: So many lines of a node are read at least, that those with the same time are known.
_END_LINES: Final = 100
#: Clocks of this machine and of AWS may differ by as much as this.
_SKEW_MS: Final = 600_000
#: States of a task in which it cannot have written yet.
_NOT_STARTED: Final = ("PROVISIONING", "PENDING", "ACTIVATING")
#: What means the same to CloudWatch, between %, as to Python.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_#=@/;,:-]+")
_STYLES: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_green")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which lines of a job's log are wanted."""

    node: int | None = None
    """Only what its command printed on this node, of a job whose command runs on all nodes."""
    task: str | None = None
    """Only of the node with this task."""
    pattern: re.Pattern[str] | None = None
    """Only lines in which it is found."""
    since: datetime | None = None
    """Only what was written from then on."""

    def has(self, line: LogLine) -> bool:
        if self.node is not None and nodes.labelled_node(line.text) != self.node:
            return False
        return self.pattern is None or self.pattern.search(line.text) is not None

    @property
    def filter(self) -> str:
        """What of it CloudWatch can do; it may let more lines pass."""
        if self.pattern is None or self.pattern.flags & re.IGNORECASE:
            return ""
        return f"%{self.pattern.pattern}%" if _PLAIN.fullmatch(self.pattern.pattern) else ""


ALL: Final = Wanted()


class JobLog:
    """What the nodes of a job have written, each line once.

    Lines are in the order of their times, as far as they were there at the same call.
    """

    def __init__(self, logs: NodeLogs, wanted: Wanted = ALL) -> None:
        self._logs, self._wanted = logs, wanted
        self._known: set[str] = set()
        self._newest = 0
        self._seen: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        """Of nodes of which only the end was read: the time of the last line of it."""
        self._of_ends: set[tuple[str, int, str]] = set()

    def new(self, job: Job, tasks: Sequence[Task]) -> list[LogLine]:
        """What is new since the last call. ``tasks``: the job's nodes."""
        wanted = self._wanted
        began = _ms(max(job.began, wanted.since) if wanted.since else job.began)
        # A node's clock may differ; what must not be shown is only what a user has excluded.
        first = began if wanted.since else began - _SKEW_MS
        again = max(first, self._newest, _ms(datetime.now(tz=UTC)) - _SKEW_MS)
        read = [task for task in tasks if self._has_started(task)]
        lines: list[LogLine] = []
        for since, some in (
            (first, [task for task in read if task.id not in self._known]),
            (again - _LATE_MS, [task for task in read if task.id in self._known]),
        ):
            if some:
                lines += self._logs.lines(some, since=max(first, since), pattern=wanted.filter)
        self._known |= {task.id for task in read}
        fresh = [
            line for line in lines if line.id not in self._seen and not self._is_of_an_end(line)
        ]
        self._newest = max([self._newest, *(line.at for line in fresh)])
        self._seen |= {line.id: line.at for line in fresh}
        oldest = self._newest - _LATE_MS
        self._seen = {name: at for name, at in self._seen.items() if at >= oldest}
        return [line for line in sorted(fresh, key=lambda line: line.at) if wanted.has(line)]

    def last(self, job: Job, tasks: Sequence[Task], number: int) -> list[LogLine]:
        """The last ``number`` lines of those that are wanted; ``new`` goes on after them."""
        wanted = self._wanted
        if wanted.node is not None or wanted.pattern is not None or number > PAGE_LINES:
            return end_of(self.new(job, tasks), number)
        since = _ms(wanted.since) if wanted.since else 0
        ends: list[LogLine] = []
        for task in tasks:
            if self._has_started(task):
                found = self._logs.last(task, max(number, _END_LINES), since=since)
                ends += found
                if found:
                    self._known.add(task.id)
                    self._ends[task.id] = max(line.at for line in found)
        self._newest = max([self._newest, *self._ends.values()])
        self._of_ends = {_key(line) for line in ends}
        return end_of(sorted(ends, key=lambda line: line.at), number)

    def _is_of_an_end(self, line: LogLine) -> bool:
        """Whether ``last`` has passed it already; its lines have no ids."""
        end = self._ends.get(line.task.id, -1)
        return line.at < end or (line.at == end and _key(line) in self._of_ends)

    def _has_started(self, task: Task) -> bool:
        if task.status in _NOT_STARTED:
            return False
        return self._wanted.task is None or task.id == self._wanted.task


def end_of(lines: Sequence[LogLine], number: int) -> list[LogLine]:
    """The last ``number`` lines."""
    return [*lines[max(0, len(lines) - number) :]]


def _key(line: LogLine) -> tuple[str, int, str]:
    return line.task.id, line.at, line.text


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def label(line: LogLine) -> str:
    """What a line begins with: nothing on the head, and the node's number, which it has already,
    where a program runs on all nodes."""
    if line.task.node != nodes.WORKER or nodes.labelled_node(line.text) is not None:
        return ""
    return f"[worker {line.task.id[:6]}] "


def text(line: LogLine) -> str:
    """A line with its label."""
    return f"{label(line)}{line.text}"


class Printer:
    """Prints lines on stdout, on a terminal with a color for each node."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._styles: dict[str, str] = {}

    def print(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            if self._as_json:
                print(json.dumps(values(line)), flush=True)
            else:
                output.print_line(self._styled(line))

    def _styled(self, line: LogLine) -> "Text":
        from rich.text import Text

        number = nodes.labelled_node(line.text)
        if number is None and line.task.node != nodes.WORKER:
            return Text(line.text)
        whole = text(line)
        name = line.task.id if number is None else nodes.node_label(number)
        style = self._styles.setdefault(name, _STYLES[len(self._styles) % len(_STYLES)])
        size = len(label(line)) or len(nodes.node_label(number or 0))
        return Text.assemble((whole[:size], style), whole[size:])


def values(line: LogLine) -> dict[str, object]:
    """A line for ``--json``."""
    at = datetime.fromtimestamp(line.at / 1000, tz=UTC)
    return {
        "at": at.isoformat(timespec="milliseconds"),
        "node": nodes.WORKER if line.task.node == nodes.WORKER else nodes.HEAD,
        "task": line.task.id,
        "program_node": nodes.labelled_node(line.text),
        "line": line.text,
    }
