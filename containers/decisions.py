"""Decisions of a job's head: if its job may continue, how long hosts are held, its exit code."""

from dataclasses import dataclass
from typing import Final

from contract import exits, times
from contract.job import Hold, JobSpec

CANNOT_PREPARE: Final = "failed: a worker node cannot prepare the code: "
#: Worker tasks in which Ray did not start end the job when they have ended at so many times. Each
#: of them has tried several times (``containers.node``).
_FAILED_STARTS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Observations of a head about its job at a moment."""

    now: float
    """Unix time."""
    monotonic: float
    """Monotonic clock, in seconds."""
    num_workers: int | None
    """Worker nodes that Ray has; None until Ray is up."""
    ray_code: int | None = None
    """Exit code of a Ray that has ended by itself."""
    is_stopped: bool = False
    """The head was told to end."""
    silence: str = ""
    """Description of a program that hangs."""
    is_replaced: bool = False
    """Another job has taken over the files of the run."""
    is_unfit: bool = False
    """The head's own host cannot train."""
    is_alone: bool = False
    """The job that it goes with has ended."""
    demand: str = ""
    """Reason why the program asks Ray for more than the job can have."""
    failure: str | None = None
    """Reason why a worker node could not prepare."""
    failed_starts: int = 0
    """How often Ray did not start in tasks of worker nodes, of late."""


class Decisions:
    """Decides if a job may continue, from its head's observations so far."""

    def __init__(self, spec: JobSpec, deadline: float, began: float) -> None:
        """
        Args:
            deadline: Unix time.
            began: by the monotonic clock.
        """
        self._spec, self._deadline = spec, deadline
        # None while there are as many worker nodes as it needs.
        self._short_since: float | None = began
        self.is_held = False
        """No worker nodes are requested yet."""
        self.capacity_at: float | None = None
        """Time at which there first were enough, by the monotonic clock."""

    def begin(self, now: float) -> None:
        """Wait for worker nodes from this moment on, by the monotonic clock."""
        self.is_held, self._short_since = False, now

    @property
    def early_s(self) -> int:
        """Seconds between the command's SIGTERM and the deadline; a recipe saves
        after it. A short job loses at most a quarter of its time."""
        spec = self._spec
        return 0 if spec.recipe else min(spec.grace_s, spec.max_seconds // 4)

    @property
    def is_short(self) -> bool:
        """True while it has fewer worker nodes than it needs."""
        return self._short_since is not None

    @property
    def waits(self) -> bool:
        """True while it lacks worker nodes that it needs. A recipe waits for those that it has lost
        while the others are billed. A program may go on without them, and one on all nodes has its
        own patience (``containers.program.start.supervisor``)."""
        has_lost = self.capacity_at is not None
        may_wait = bool(self._spec.nodes.low) and (bool(self._spec.recipe) or not has_lost)
        return may_wait and self.is_short

    def decide(self, seen: Observation) -> tuple[int, str] | None:
        """Exit code of a job that must not continue, and the reason in words; None while it may."""
        if seen.is_stopped:
            return exits.TERMINATED, "stopped on request"
        if seen.is_replaced:
            text = "another job has taken over the files of this run: the command is ended"
            return exits.FILES_LOST, text
        if seen.is_alone:
            return exits.OK, f"run {self._spec.with_run} has ended, and this job with it"
        if seen.now > self._deadline - self.early_s:
            comes = f"the deadline is in {self.early_s} s"
            return exits.DEADLINE, comes if self.early_s else "the deadline is reached"
        if seen.ray_code is not None:
            return exits.RAY_FAILED, f"Ray ended on its own (exit code {seen.ray_code})"
        if seen.is_unfit:
            return exits.BAD_HOST, ""
        if seen.silence:
            return exits.HUNG, ""
        if seen.demand:
            return exits.ASKS_TOO_MUCH, f"the program {seen.demand}"
        return self._lack_of_capacity(seen)

    def hold(self, code: int, now: float) -> Hold | None:
        """How long the hosts of a job stay whose command has ended with ``code``; None: no longer.

        Args:
            now: Unix time.
        """
        until = min(now + self._spec.hold_s, self._deadline - times.HOLD_MARGIN_S)
        if code in exits.NOT_HELD or until <= now:
            return None
        return Hold(code=code, since=now, until=until)

    def exit_code(self, own: int) -> tuple[int, str]:
        """Exit code of a job whose command has ended by itself with ``own``; in words, why it is
        another one."""
        if own == exits.KILLED:
            # As the container's code it would mean that the head was killed, and would be retried.
            text = f"the command was killed (exit code {own}), perhaps out of memory: the job fails"
            return exits.FAILED, text
        if own in exits.OF_THE_SYSTEM and self._spec.uses_ray:
            text = f"the command's exit code {own} is reserved here: the job's is 1"
            return exits.FAILED, text
        return own, ""

    def _lack_of_capacity(self, seen: Observation) -> tuple[int, str] | None:
        if self.is_held:
            return None
        there, needed = seen.num_workers or 0, self._spec.nodes.low
        if seen.num_workers is not None and there >= needed:
            self._short_since = None
            if self.capacity_at is None:
                self.capacity_at = seen.monotonic
            return None
        if self._short_since is None:
            self._short_since = seen.monotonic
        if seen.failed_starts >= _FAILED_STARTS:
            text = f"failed: Ray did not start on worker nodes, {seen.failed_starts} times"
            return exits.FAILED, f"{text}; their logs say more"
        if not self.waits:
            return None
        if seen.failure is not None:
            return exits.BAD_INPUT, CANNOT_PREPARE + seen.failure
        waited = seen.monotonic - self._short_since
        if waited <= self._spec.capacity_wait_s:
            return None
        after = "after the start" if self.capacity_at is None else "after a loss"
        text = f"{there} of {needed} worker nodes, {waited:.0f} s {after}: no capacity"
        return exits.NO_CAPACITY, text
