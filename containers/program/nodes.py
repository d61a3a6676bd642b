"""A job's program on all of its nodes: started together, watched, started again after a loss.

    python -m containers.program.nodes

The head of a job runs this as its command (``containers.job``); the order comes as JSON in
``TRAIN_PROGRAM``. Ray brings the nodes and says when one is lost; on each of them, an actor that
holds all of the node runs a ``Launcher``.

A program that fails on a node ends the job with its exit code, unless a host is found unfit then.
A lost node does not end the job: the program is started again on all nodes as soon as there are
enough, with the files of one moment (``containers.program.files``). With a range of nodes it is
also started again when more have come. Each start has a fixed number of nodes, so any launcher can
be used.
"""

import contextlib
import itertools
import logging
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any, Final

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError

from containers.host.machine import say
from containers.program import starts
from containers.program.bucket import Bucket, report, until_answered
from containers.program.cause import cause
from containers.program.launch import ENV_PROGRAM, Ended, LaunchSpec, Place
from containers.program.ray_nodes import NodeInfo, alive, start_launcher
from containers.program.requirements import Stopped
from contract import exits, runs, times
from contract.errors import InputError, UnreachableError, exit_code
from contract.nodes import ENV_JOB, Range
from contract.text import counted, listed

#: A node that does not answer for this long is lost: Ray itself needs up to 24 s to see it.
_LOST_S: Final = 40.0
#: For an answer that a node gives at once.
ANSWER_S: Final = 5.0
_POLL_S: Final = 0.5
#: Between two looks at which nodes there are.
_LOOK_S: Final = 1.0
#: After a first failure, those of the other nodes are waited for: the earliest is the cause.
_OTHERS_S: Final = 1.5
_ACTOR_START_S: Final = 120.0
#: With a range, the nodes that come next are waited for this long before a start,
_SETTLE_S: Final = 10.0
#: and a program runs for this long before it is started again on more nodes: that costs what it did
#: since it last saved.
_GROW_AFTER_S: Final = 120.0
#: Nodes that go again and again without notice, soon after a start, go because of the program.
_STARTS_IN_VAIN: Final = 5
_LONG_RUN_S: Final = 600.0


# --- decisions ------------------------------------------------------------------------------------
class Next(Enum):
    """What happens to a program that has been started."""

    WAIT = auto()
    AGAIN = auto()
    """It is ended wherever it runs, and started again."""
    REPLACED = auto()
    """It is ended: another job has taken over its files."""
    FAILED = auto()
    DONE = auto()


def after(ends: Sequence[Ended | None], *, is_lost: bool, can_grow: bool) -> Next:
    """What comes next.

    Args:
        ends: of the program on each of its nodes; None where it runs.
        is_lost: a node is, on which the program had not ended well.
        can_grow: it may be started again on more nodes.
    """
    if any(ended and ended.was_replaced for ended in ends):
        return Next.REPLACED
    if is_lost:
        return Next.AGAIN
    if first_failure(ends) is not None:
        return Next.FAILED
    if not any(ended is None for ended in ends):
        return Next.DONE
    is_whole = all(ended is None for ended in ends)
    return Next.AGAIN if can_grow and is_whole else Next.WAIT


def first_failure(ends: Sequence[Ended | None]) -> int | None:
    """Index of the end that failed first, of those that were not told to end."""
    failed = [
        (ended.at, index)
        for index, ended in enumerate(ends)
        if ended and ended.code and not ended.was_told
    ]
    return min(failed)[1] if failed else None


def new_seats(
    here: Sequence[NodeInfo], taken: Mapping[str, int], *, most: int, unfit: Collection[str]
) -> list[tuple[int, NodeInfo]]:
    """Who takes the free seats: a number, the lowest that is free, and a node for each.

    Args:
        here: the nodes that there are.
        taken: id of each node that has a seat -> its number.
        most: as many seats as there may be.
        unfit: ids of the nodes that go, or cannot be used.
    """
    free = [node for node in here if node.id not in taken and node.id not in unfit]
    numbers = (number for number in itertools.count() if number not in taken.values())
    return [*zip(numbers, free[: max(0, most - len(taken))], strict=False)]


# --- seats ----------------------------------------------------------------------------------------
@dataclass(kw_only=True, slots=True)
class Seat:
    """One of the places of a program, and the node that has it now."""

    number: int
    node: NodeInfo
    launcher: Any
    """The actor."""
    place: Place | None = None
    wait: Any = None
    """What ``Launcher.wait`` will return; None before a start and after an end."""
    notice: Any = None
    ended: Ended | None = None
    save: Any = None
    """What ``Launcher.save`` will return where the program has ended before that on other nodes."""

    @property
    def is_done(self) -> bool:
        """The program has ended here as it should: it needs the node no more."""
        return self.ended is not None and not self.ended.code and not self.ended.was_told


def answers(seat: Seat, is_stopped: Callable[[], bool]) -> bool:
    """Whether a node is still there; waits until that is known, or the job has to end."""
    deadline = time.monotonic() + _LOST_S
    while time.monotonic() < deadline and not is_stopped():
        try:
            ray.get(seat.launcher.address.remote(), timeout=ANSWER_S)
            return True
        except GetTimeoutError:
            continue
        except RayError:
            return False
    return is_stopped()


def unfit(seats: Sequence[Seat]) -> list[Seat]:
    """The nodes whose hosts are found unfit to train, after the program has failed."""
    calls = {seat.launcher.host_faults.remote(): seat for seat in seats}
    done, _ = ray.wait([*calls], num_returns=len(calls), timeout=times.HOST_CHECK_S + ANSWER_S)
    found = []
    for call in done:
        with contextlib.suppress(RayError):  # lost since
            if faults := ray.get(call):
                seat = calls[call]
                say(f"node {seat.number} ({seat.node.address}) needs another host: {faults[0]}")
                found.append(seat)
    return found


def end_programs(seats: Sequence[Seat], within_s: float) -> None:
    """Tell a program to end, and wait until it has on all nodes that are still there; SIGKILL comes
    after ``within_s`` seconds."""
    waits = {seat.wait: seat for seat in seats if seat.wait is not None}
    for seat in waits.values():
        seat.launcher.stop.remote(within_s)
    if waits:
        ray.wait([*waits], num_returns=len(waits), timeout=within_s + ANSWER_S)
    for wait, seat in waits.items():
        with contextlib.suppress(RayError):  # lost, or about to be
            seat.ended = ray.get(wait, timeout=0)
        seat.wait = None


def save_all(
    seats: Sequence[Seat], is_stopped: Callable[[], bool], deadline: float = math.inf
) -> list[str]:
    """Bring the files of a program, which has ended, to the bucket from all of its nodes.

    Args:
        is_stopped: whether the job has to end; asked until all are there.
        deadline: Unix time at which it will have to. Until then, what fails is tried again.

    Returns:
        What is lost, in words: an item for each node that has lost something.
    """
    until, within = math.inf, save_within_s(deadline)
    if is_stopped():
        within = times.FILES_SAVE_S
    for seat in seats:
        seat.save = seat.save or seat.launcher.save.remote(within)
    saves = {seat.save: seat for seat in seats}
    lost = []
    while saves and time.monotonic() < until:
        if is_stopped() and until == math.inf:
            until = time.monotonic() + times.FILES_SAVE_S + ANSWER_S
            for seat in saves.values():
                seat.launcher.hurry.remote(times.FILES_SAVE_S)
        done, _ = ray.wait([*saves], timeout=_POLL_S)
        for each in done:
            seat = saves.pop(each)
            try:
                names = ray.get(each)
            except RayError:
                lost.append(f"the last files of node {seat.number}, which is lost")
                continue
            if names:
                lost.append(f"{counted(len(names), 'file')} of node {seat.number}: {listed(names)}")
    lost += [
        f"the last files of node {seat.number}, which does not answer" for seat in saves.values()
    ]
    for seat in seats:
        seat.save = None
    for text in lost:
        say(f"warning: not saved: {text}")
    return lost


def save_within_s(deadline: float) -> float | None:
    """How long the last copy of a node's files may take: it ends before the job's deadline does."""
    if deadline == math.inf:
        return None
    return max(times.FILES_SAVE_S, deadline - times.FILES_SAVE_S - time.time())


class Group:
    """The program on its nodes, from the job's beginning to its end."""

    def __init__(self, told: LaunchSpec) -> None:
        self._told = told
        self._seats: list[Seat] = []
        self._leaving: set[str] = set()  # nodes that have had notice, or cannot be used
        self._silent: set[str] = set()  # nodes for which no program that runs is ended
        self._start = -1
        self._began = 0.0
        self._stopped = False
        self._is_surprised = False  # since the last start: a loss without notice, or a bad disk
        self._in_vain = 0  # starts in a row that ended so, soon
        self._nodes = told.workers  # with a head that trains, one more
        self._num_seen, self._seen_at = 0, 0.0
        self._writer = uuid.uuid4().hex  # of the files, for all starts of this job

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """End the program everywhere; ``run`` returns. For a signal's handler."""
        self._stopped = True

    def run(self) -> int:
        """Exit code of the program, or of what ended it.

        Raises:
            InputError, UnreachableError: the program cannot be started; it has been ended where it
                was.
        """
        try:
            return self._run()
        except Exception:
            with contextlib.suppress(RayError):
                self._end_all()
            raise

    def report(self, reason: str) -> None:
        """Say why the job ends."""
        spec = self._told
        report(reason, storage=spec.storage, run=spec.run, job=os.environ.get(ENV_JOB, ""))

    def _run(self) -> int:
        while not self._stopped:
            if (code := self._gather()) is not None:
                return code
            self._ran_s = 0.0
            if self._begin():
                code = self._watch()
            else:
                self._end_all()
            if code is not None:
                return code
            if self._stopped:
                break
            if self._is_in_vain():
                self.report(
                    "failed: nodes were lost without notice, or could not be prepared, "
                    f"{self._in_vain} times in a row, each time within {_LONG_RUN_S / 60:.0f} "
                    "minutes of a start: the program may need more memory or disk than a node has. "
                    "Submit the run again with larger nodes, or let it use less"
                )
                return exits.FAILED
            say(
                f"the program is started again on {self._nodes} "
                f"node{'s' if self._nodes.high > 1 else ''}"
            )
        return exits.TERMINATED

    def _is_in_vain(self) -> bool:
        """Whether the program, which has lost a node, is not worth another start."""
        if self._ran_s >= _LONG_RUN_S:
            self._in_vain = 0
        if self._is_surprised:
            self._in_vain += 1
        return self._in_vain >= _STARTS_IN_VAIN

    # --- nodes
    def _gather(self) -> int | None:
        """Take a seat for each node until there are enough; an exit code where that fails."""
        began = time.monotonic()
        has_said = False
        while not self._stopped:
            self._seats = [seat for seat in self._seats if self._stays(seat)]
            here = alive()
            if any(node.is_head for node in here):
                self._nodes = Range(self._told.workers.low + 1, self._told.workers.high + 1)
            self._take(here)
            if len(self._seats) >= max(1, self._nodes.low) and self._has_settled():
                return None
            waited = time.monotonic() - began
            # The head counts too, but only until all have joined: one may be lost before the start.
            if len(self._seats) < max(1, self._nodes.low) and waited > self._told.capacity_wait_s:
                what = "after a loss" if self._start >= 0 else "for the first start"
                say(
                    f"{len(self._seats)} of {self._nodes.low} nodes {waited:.0f} s {what}: "
                    "no capacity"
                )
                return exits.NO_CAPACITY
            missing = self._nodes.low - len(self._seats)
            if self._start >= 0 and missing > 0 and not has_said:
                say(f"waiting for {missing} node{'s' if missing > 1 else ''}")
                has_said = True
            time.sleep(_LOOK_S)
        return exits.TERMINATED

    def _free(self, here: Sequence[NodeInfo]) -> list[tuple[int, NodeInfo]]:
        taken = {seat.node.id: seat.number for seat in self._seats}
        return new_seats(here, taken, most=self._nodes.high, unfit=self._leaving)

    def _take(self, here: Sequence[NodeInfo]) -> None:
        """Give free seats to nodes that have none, once they answer."""
        free = self._free(here)
        launchers = [start_launcher(self._told, node) for _, node in free]
        for (number, node), launcher in zip(free, launchers, strict=True):
            try:
                ray.get(launcher.address.remote(), timeout=_ACTOR_START_S)
            # Ray lists a node for some seconds after it is lost.
            except (ActorUnschedulableError, RayActorError, GetTimeoutError) as error:
                say(f"node {node.address} did not start the program's launcher: {error}")
                ray.kill(launcher)
                self._silent.add(node.id)
                continue
            notice = launcher.wait_for_notice.remote()
            self._seats.append(Seat(number=number, node=node, launcher=launcher, notice=notice))
        self._seats.sort(key=lambda seat: seat.number)

    def _stays(self, seat: Seat) -> bool:
        """Whether a node can take part in the next start."""
        if seat.node.id in self._leaving:
            ray.kill(seat.launcher)  # Ray has nothing to wait for on this node then
            return False
        return answers(seat, lambda: self._stopped)

    def _has_settled(self) -> bool:
        """Whether nodes that come just after the first need not be waited for."""
        now = time.monotonic()
        if len(self._seats) != self._num_seen:
            self._num_seen, self._seen_at = len(self._seats), now
        return len(self._seats) >= self._nodes.high or now - self._seen_at > _SETTLE_S

    def _can_grow(self) -> bool:
        """Whether the program is started again because more nodes have come."""
        if len(self._seats) >= self._nodes.high:
            return False
        if time.monotonic() - self._began < _GROW_AFTER_S:
            return False
        return any(node.id not in self._silent for _, node in self._free(alive()))

    # --- the program
    def _begin(self) -> bool:
        """Start the program on all nodes; return whether none was lost meanwhile.

        Raises:
            InputError: the program cannot be started.
        """
        self._start += 1
        self._is_surprised = False
        names = f"node{'s' if len(self._seats) > 1 else ''}"
        say(f"running {' '.join(self._told.words)} on {len(self._seats)} {names}")
        restored = None
        if self._told.storage:
            bucket = Bucket(f"{self._told.storage}/{runs.output_prefix(self._told.run)}")
            numbers = [seat.number for seat in self._seats]
            try:
                restored = until_answered(
                    lambda: starts.begin(bucket, numbers, writer=self._writer),
                    say=say,
                    should_stop=lambda: self._stopped,
                )
            except Stopped:
                self._seats.clear()  # the program has not run since its files were saved
                return False
        addresses = tuple(seat.node.address for seat in self._seats)
        for rank, seat in enumerate(self._seats):
            seat.ended = None
            seat.place = Place(
                number=seat.number,
                rank=rank,
                start=self._start,
                addresses=addresses,
                gpus=int(seat.node.gpus),
                files=restored,
            )
        if not self._on_all("prepare"):
            return False
        self._began = time.monotonic()
        return self._on_all("start")

    def _on_all(self, step: str) -> bool:
        """Prepare or start the program on all nodes at once; return whether all did."""
        calls = {getattr(seat.launcher, step).remote(seat.place): seat for seat in self._seats}
        is_done, is_told = True, False
        failure: Exception | None = None
        while calls:
            done, _ = ray.wait([*calls], timeout=_POLL_S)
            if self._stopped and not is_told:
                is_told = True
                for seat in calls.values():
                    seat.launcher.break_off.remote()
            for call in done:
                seat = calls.pop(call)
                try:
                    is_done &= ray.get(call) is not False
                except RayActorError:
                    is_done = False
                    self._is_surprised |= seat.node.id not in self._leaving
                    continue
                except (InputError, UnreachableError, RayError, OSError) as error:
                    told = getattr(error, "cause", error)
                    if isinstance(told, OSError):  # a disk in trouble: tried again, some times
                        say(f"node {seat.number} ({seat.node.address}) cannot {step}: {told}")
                        is_done, self._is_surprised = False, True
                    else:
                        failure = failure or error  # after the others, which may have started
                    continue
                if step == "start":
                    seat.wait = seat.launcher.wait.remote()
        if failure is not None:
            raise failure
        return is_done

    def _watch(self) -> int | None:
        """Wait for the program's end; None where it must be started again."""
        step = Next.WAIT
        while step is Next.WAIT and not self._stopped:
            lost = self._look()
            failed = first_failure([seat.ended for seat in self._seats])
            if not lost and failed is not None:
                # The program on the others feels a loss within a second, and Ray sees it later.
                lost = self._lost_behind(self._seats[failed])
            ends = [seat.ended for seat in self._seats]
            step = after(ends, is_lost=lost, can_grow=self._can_grow())
        self._ran_s = time.monotonic() - self._began  # what it writes last may take long
        # After a failure, or a loss without notice, what the program saves now does not count.
        counts = step in (Next.WAIT, Next.AGAIN) and not self._is_surprised
        saved = self._end_all(self._told.grace_s if counts else times.COMMAND_STOP_S)
        if step is Next.AGAIN:
            return None
        if step is Next.FAILED:
            return self._failure()
        if step is Next.REPLACED:
            saved = ["another job has taken over the files of the run"]
        if step is Next.WAIT:
            return exits.TERMINATED
        if not saved or not self._told.storage:
            return exits.OK
        self.report(f"files lost: {'; '.join(saved)}")
        return exits.FILES_LOST

    def _failure(self) -> int | None:
        """Exit code of a job whose program has failed; None where another host may help."""
        failed = first_failure([seat.ended for seat in self._seats])
        assert failed is not None
        first, ended = self._seats[failed], self._seats[failed].ended
        assert ended is not None
        errors = [error for seat in self._seats if seat.ended for error in seat.ended.errors]
        found = cause(errors, code=ended.code, node=first.number, last_error=ended.last_error)
        reason = found.reason(self._told.run)
        if hosts := unfit(self._seats):
            say(reason)
            self._leaving |= {seat.node.id for seat in hosts}
            return None
        self.report(reason)
        if ended.code in exits.OF_THE_SYSTEM:
            say(f"exit code {ended.code} has a meaning of its own here: the job's is 1")
            return exits.FAILED
        return ended.code

    def _look(self) -> bool:
        """Wait for a moment; take note of what has ended. Return whether a node goes that the
        program needs."""
        is_lost = False
        refs = {seat.wait: seat for seat in self._seats if seat.wait is not None}
        notices = {seat.notice: seat for seat in self._seats if seat.notice is not None}
        done, _ = ray.wait([*refs, *notices], num_returns=1, timeout=_POLL_S)
        for ref in done:
            seat = refs.get(ref) or notices[ref]
            try:
                found = ray.get(ref)
            except RayError:
                say(f"node {seat.number} ({seat.node.address}) is lost")
                seat.wait = seat.notice = None
                self._is_surprised |= seat.node.id not in self._leaving and not seat.is_done
                is_lost |= not seat.is_done
                continue
            if isinstance(found, Ended):
                seat.wait, seat.ended = None, found
                if seat.is_done:
                    # Now: the node may be lost while the program goes on on others.
                    within = save_within_s(self._told.deadline)
                    seat.save = seat.launcher.save.remote(within)
                if found.code == 0 or found.was_told:
                    say(f"the program ended on node {seat.number}, exit code {found.code}")
            else:
                left = max(0.0, float(found) - time.time())
                say(f"node {seat.number} ({seat.node.address}) must end in {left:.0f} s")
                seat.notice = None
                self._leaving.add(seat.node.id)
                is_lost |= not seat.is_done
        return is_lost

    def _lost_behind(self, failed: Seat) -> bool:
        """Whether the loss of a node has made the program fail on another one."""
        deadline = time.monotonic() + _OTHERS_S
        while time.monotonic() < deadline and any(seat.wait for seat in self._seats):
            if self._look():
                return True
        others = [seat for seat in self._seats if seat is not failed and not seat.is_done]
        is_lost = not all(answers(seat, lambda: self._stopped) for seat in others)
        self._is_surprised |= is_lost
        return is_lost

    def _end_all(self, within_s: float = times.COMMAND_STOP_S) -> list[str]:
        """End the program wherever it runs, and save its files: all, unless the job must end.

        Args:
            within_s: seconds between SIGTERM and SIGKILL.

        Returns:
            What is lost, as ``save_all``.
        """
        end_programs(self._seats, within_s)
        return save_all(self._seats, lambda: self._stopped, self._told.deadline)


def main() -> int:
    """Run what the head says; return the exit code of the job."""
    spec = LaunchSpec.from_json(os.environ[ENV_PROGRAM])
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # they are handled where they are asked for
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    group = Group(spec)
    # After ray.init, which sets a handler of its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, group.stop)
    try:
        return run(group)
    finally:
        ray.shutdown()


def run(group: Group) -> int:
    """Run the program; return the exit code of the job, also where it could not be started."""
    try:
        return group.run()
    except (InputError, UnreachableError) as error:
        # Raised on a node, Ray adds where: the first line is ours.
        own = getattr(error, "cause", error)
        code = exit_code(own)
        if code == exits.BAD_INPUT:
            group.report(f"failed: {own}")
        else:  # it is tried again
            say(f"error: {own}")
        return code


if __name__ == "__main__":
    # Where Ray prints the last twenty lines of a lost node's own log, again and again.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        sys.exit(main())
