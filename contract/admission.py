"""Admission: which queued jobs of a deployment may start their head, in order of submission.

A job starts once its head and its minimum of worker nodes fit beside the maximum of all jobs before
it, whether those run or wait; it may then grow into what they leave. So no job takes a host that an
earlier one needs, and two jobs never hold half of the hosts each. Nothing is stored: the running
executions are the queue. The function that cleans up after jobs decides by it
(``stacks/jobs/keeper``), and ``trainctl`` shows by it what a job waits for.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.nodes import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Maximum number of hosts in use by all jobs."""

    max_heads: int
    max_workers: int
    max_jobs_per_user: int = 0
    """0: no limit."""

    def in_turn(self, order: Sequence[str], user: Callable[[str], str]) -> list[str]:
        """The unfinished jobs but those of a user who has as many before them as are allowed.

        Those wait for their user's own jobs, and nobody waits for them: later ones pass them by.

        Args:
            order: names of all unfinished jobs.
            user: who has submitted one.
        """
        if not self.max_jobs_per_user:
            return [*order]
        seen = Counter[str]()
        found = []
        for name in order:
            seen[user(name)] += 1
            if seen[user(name)] <= self.max_jobs_per_user:
                found.append(name)
        return found

    def admit(self, nodes: Range, earlier: Sequence[Range]) -> Range | None:
        """The worker nodes that a job may have; None while it cannot start.

        Args:
            nodes: those that it asks for. Where its command runs does not matter: a head has a
                host of its own in any case.
            earlier: those of all jobs that were submitted before it and still run.
        """
        left = max(0, self.max_workers - sum(each.high for each in earlier))
        if len(earlier) >= self.max_heads or nodes.low > left:
            return None
        return Range(nodes.low, min(nodes.high, left))


def in_order(executions: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of executions, as Step Functions lists them, in the order of their start."""
    found = sorted((each["startDate"], each["name"]) for each in executions)
    return [name for _, name in found]
