"""Admission: which queued jobs of a deployment may start their head, by priority, and in order of
submission.

A job starts once its head and its minimum of worker nodes fit beside the maximum of all jobs before
it, whether those run or wait; it may then grow into what they leave. So no job takes a host that an
earlier one needs, and two jobs never hold half of the hosts each. Nothing is stored: the running
executions are the queue. The function that cleans up after jobs decides by it
(``stacks/jobs/keeper``), and ``trainctl`` shows by it what a job waits for.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contract import times
from contract.job import JobSpec, Priority
from contract.nodes import DEFAULT_POOL, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Maximum number of hosts in use by all jobs."""

    max_heads: int
    max_workers: int
    max_jobs_per_user: int = 0
    """0: no limit."""
    pools: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of worker hosts of each pool beside the deployment's own."""

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

    @property
    def workers(self) -> Mapping[str, int]:
        """The same with the deployment's own."""
        return {DEFAULT_POOL: self.max_workers, **self.pools}

    def without(self, heads: int, workers: Mapping[str, int]) -> "Limits":
        """The limits beside hosts that are kept: heads', and workers' by their pools."""
        return replace(
            self,
            max_heads=self.max_heads - heads,
            max_workers=self.max_workers - workers.get(DEFAULT_POOL, 0),
            pools={name: most - workers.get(name, 0) for name, most in self.pools.items()},
        )

    def place(
        self, order: JobSpec | None, earlier: Sequence[JobSpec | None]
    ) -> tuple[tuple[str, ...], Range] | None:
        """Those of its pools that have room for a job, and the worker nodes that it may have in
        each of them; None while it cannot start.

        Args:
            order: None: it is not understood, and holds no more than a head.
            earlier: orders of all jobs that were submitted before it and still run. Each may use
                any of its pools, now or later.
        """
        nodes, ladder = (order.nodes, order.ladder) if order else (Range(0, 0), (DEFAULT_POOL,))
        found: dict[str, Range] = {}
        for pool in ladder:
            held = [each.nodes if each and pool in each.ladder else Range(0, 0) for each in earlier]
            here = replace(self, max_workers=self.workers.get(pool, 0))
            if pool in self.workers and (granted := here.admit(nodes, held)):
                found[pool] = granted
        high = min((each.high for each in found.values()), default=0)
        return ((*found,), Range(nodes.low, high)) if found else None

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


def in_order(
    executions: Iterable[Mapping[str, Any]],
    order: Callable[[str], JobSpec | None],
    *,
    has_begun: Callable[[str], object],
    now: float,
) -> list[str]:
    """Names of executions, as Step Functions lists them, in the order of their turns: by priority,
    and of one priority by their start. None is overtaken for longer than ``COUNTS_AS_HIGH_S``. Jobs
    that follow one of these are left out, and those that go with one until it has begun.

    Args:
        order: of a job; None: it is not understood.
        has_begun: true of a job that was admitted.
        now: Unix time.
    """
    levels = [*Priority]
    began_at = {each["name"]: each["startDate"] for each in executions}
    found = []
    for name, began in began_at.items():
        spec = order(name)
        follows = spec and spec.after in began_at.keys() - {""}
        if spec and follows and not (spec.with_run and has_begun(spec.after)):
            continue
        is_old = now - began.timestamp() >= times.COUNTS_AS_HIGH_S
        level = Priority.HIGH if is_old else spec.priority if spec else Priority.NORMAL
        found.append((levels.index(level), began, name))
    return [name for _, _, name in sorted(found)]
