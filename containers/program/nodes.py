"""A job's program on all of its nodes: started together, watched, started again after a loss.

    python -m containers.program.nodes

The head of a job runs this as its command (``containers.job``); the order comes as JSON in
``TRAIN_PROGRAM``. Ray brings the nodes and says when one is lost; on each of them, an actor that
holds all of the node runs a ``Launcher``. The store at which the torchruns of all nodes meet is
here, on the head, so that any other node may be lost.

A program that fails on a node ends the job with its exit code, unless a host is found unfit then.
A lost node does not end the job: the program is started again on all nodes as soon as there are
enough, with the files of one moment (``containers.program.files``).
An elastic program that torchrun has started goes on with the nodes that are left.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError

from containers.host.machine import say
from containers.program import files
from containers.program.bucket import ERRORS, Bucket, report_lost
from containers.program.launch import (
    ENV_PROGRAM,
    Ended,
    LaunchSpec,
    Order,
    Place,
    rendezvous_id,
)
from containers.program.ray_nodes import NodeInfo, alive, start_launcher
from containers.program.requirements import Stopped
from contract import exits, runs, times
from contract.errors import InputError
from contract.nodes import ENV_JOB, Range
from contract.text import listed

#: A node that does not answer for this long is lost: Ray itself needs up to 24 s to see it.
_LOST_S: Final = 40.0
#: For an answer that a node gives at once.
ANSWER_S: Final = 5.0
_POLL_S: Final = 0.5


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
    call: Any = None
    """Of a node that joins a program that runs: what its ``prepare`` or ``start`` will return."""
    is_prepared: bool = False
    """Of such a node: ``call`` is its ``start``."""
    notice: Any = None
    ended: Ended | None = None
    save: Any = None
    """What ``Launcher.save`` will return where the program has ended before that on other nodes."""

    @property
    def is_running(self) -> bool:
        return self.wait is not None

    def still_runs(self) -> bool:
        """Whether the program still runs, or saves, on a node that the others go on without."""
        return self.wait is not None and not ray.wait([self.wait], timeout=0)[0]

    @property
    def is_done(self) -> bool:
        """The program has ended here as it should: it needs the node no more."""
        return self.ended is not None and not self.ended.code and not self.ended.was_told


def first_failure(seats: Sequence[Seat]) -> Seat | None:
    """The node whose program failed first, of those that were not told to end."""
    failed = [seat for seat in seats if seat.ended and seat.ended.code and not seat.ended.was_told]
    return min(failed, key=lambda seat: seat.ended.at if seat.ended else 0.0, default=None)


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


def stop_all(seats: Sequence[Seat]) -> None:
    """Tell a program to end, on all of its nodes at once."""
    for seat in seats:
        if seat.is_running:
            seat.launcher.stop.remote(times.COMMAND_STOP_S)


def wait_for_end(seats: Sequence[Seat]) -> None:
    """Wait until a program that was told to end has ended on all nodes that are still there."""
    waits = {seat.wait: seat for seat in seats if seat.is_running}
    if waits:
        ray.wait([*waits], num_returns=len(waits), timeout=times.COMMAND_STOP_S + ANSWER_S)
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
    until = time.monotonic() + times.FILES_SAVE_S + ANSWER_S if is_stopped() else math.inf
    within = times.FILES_SAVE_S if is_stopped() else save_within_s(deadline)
    saves = {}
    for seat in seats:
        if seat.save is None:
            seat.save = seat.launcher.save.remote(within)
        elif is_stopped():
            seat.launcher.hurry.remote(times.FILES_SAVE_S)
        saves[seat.save], seat.save = seat, None
    lost = []
    while saves and time.monotonic() < until:
        done, _ = ray.wait([*saves], timeout=_POLL_S)
        for each in done:
            seat = saves.pop(each)
            try:
                names = ray.get(each)
            except RayError:
                lost.append(f"the last files of node {seat.number}, which is lost")
                continue
            if names:
                lost.append(f"{len(names):,} files of node {seat.number}: {listed(names)}")
        if is_stopped() and until == math.inf:
            until = time.monotonic() + times.FILES_SAVE_S + ANSWER_S
            for seat in saves.values():
                seat.launcher.hurry.remote(times.FILES_SAVE_S)
    lost += [
        f"the last files of node {seat.number}, which does not answer" for seat in saves.values()
    ]
    for each in lost:
        say(f"warning: not saved: {each}")
    return lost


def save_within_s(deadline: float) -> float | None:
    """How long the last copy of a node's files may take: it ends before the job's deadline does."""
    if deadline == math.inf:
        return None
    return max(times.FILES_SAVE_S, deadline - times.FILES_SAVE_S - time.time())


#: Between two looks at which nodes there are.
_LOOK_S: Final = 1.0
#: After a first failure, those of the other nodes are waited for: the earliest is the cause.
_OTHERS_S: Final = 1.5
_ACTOR_START_S: Final = 120.0
#: After the first nodes of an elastic program, others are waited for this long.
_SETTLE_S: Final = 10.0
#: Nodes that go again and again without notice, soon after a start, go because of the program.
_STARTS_IN_VAIN: Final = 5
_LONG_RUN_S: Final = 600.0


class Group:
    """The program on its nodes, from the job's beginning to its end."""

    def __init__(self, told: LaunchSpec) -> None:
        self._told = told
        self._seats: list[Seat] = []
        self._joining: list[Seat] = []  # nodes that come while an elastic program runs
        self._leaving: set[str] = set()  # nodes that have had notice, or cannot be used
        self._start = -1
        self._stopped = False
        self._has_lost = False  # a node, since the last start
        self._is_surprised = False  # by such a loss: it came without notice
        self._in_vain = 0  # starts in a row that ended so, soon
        self._store: Any = None
        self._nodes = told.workers  # with a head that trains, one more
        self._looked_at = 0.0
        self._num_seen, self._seen_at = 0, 0.0
        self._gone: list[Seat] = []
        self._writer = uuid.uuid4().hex  # of the files, for all starts of this job
        self._has_changed = False  # which nodes there are, since the files were told
        self._is_bucket_down = False

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """End the program everywhere; ``run`` returns. For a signal's handler."""
        self._stopped = True

    def run(self) -> int:
        """Exit code of the program, or of what ended it.

        Raises:
            InputError: the program cannot be started; it has been ended where it was.
        """
        try:
            return self._run()
        except Exception:
            with contextlib.suppress(RayError):
                self._end_all()
            raise

    def _run(self) -> int:
        while not self._stopped:
            if (code := self._gather()) is not None:
                return code
            began = time.monotonic()
            if self._begin():
                code = self._watch()
            else:
                self._end_all()
            if code is not None:
                return code
            if self._stopped:
                break
            if self._is_in_vain(time.monotonic() - began):
                say(
                    f"nodes were lost without notice {self._in_vain} times in a row, each time "
                    f"within {_LONG_RUN_S / 60:.0f} minutes of a start: the program may need more "
                    "memory than a node has. Submit the run again with larger nodes or less memory "
                    "in use"
                )
                return exits.FAILED
            say(
                f"the program is started again on {self._nodes} "
                f"node{'s' if self._nodes.high > 1 else ''}"
            )
        return exits.TERMINATED

    def _is_in_vain(self, ran_s: float) -> bool:
        """Whether the program, which has lost a node, is not worth another start."""
        if self._is_surprised:
            self._in_vain = self._in_vain + 1 if ran_s < _LONG_RUN_S else 1
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

    def _free(self, here: Sequence[NodeInfo]) -> list[NodeInfo]:
        """Nodes that have no seat, as many as there are seats for."""
        seats = [*self._seats, *self._joining]
        taken = {seat.node.id for seat in seats} | self._leaving
        return [node for node in here if node.id not in taken][: self._nodes.high - len(seats)]

    def _number(self) -> int:
        """Of the next seat."""
        # A node that has left the others saves its files under its number.
        saving = [seat for seat in self._gone if seat.still_runs()]
        used = {seat.number for seat in (*self._seats, *self._joining, *saving)}
        return next(each for each in itertools.count() if each not in used)

    def _take(self, here: Sequence[NodeInfo]) -> None:
        """Give free seats to nodes that have none, once they answer."""
        started = [(node, start_launcher(self._order(), node)) for node in self._free(here)]
        for node, launcher in started:
            try:
                ray.get(launcher.address.remote(), timeout=_ACTOR_START_S)
            # Ray lists a node for some seconds after it is lost.
            except (ActorUnschedulableError, RayActorError, GetTimeoutError) as error:
                say(f"node {node.address} did not start the program's launcher: {error}")
                ray.kill(launcher)
                continue
            self._sit(Seat(number=self._number(), node=node, launcher=launcher))

    def _sit(self, seat: Seat) -> None:
        seat.notice = seat.launcher.wait_for_notice.remote()
        self._seats.append(seat)
        self._seats.sort(key=lambda seat: seat.number)

    def _order(self) -> Order:
        told = self._told
        if self._store is None:
            # Takes seconds, in which nodes are on their way.
            import torch.distributed as dist

            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                told.address, told.rendezvous_port, is_master=True, wait_for_workers=False
            )
        return told.order(nodes=self._nodes, port=int(self._store.port))

    def _is_torchrun(self) -> bool:
        """Whether torchruns have met at the store since the last start."""
        key = f"torch.rendezvous.{rendezvous_id(self._told.run, self._start)}"
        return bool(self._store.check([key]))

    def _stays(self, seat: Seat) -> bool:
        """Whether a node can take part in the next start."""
        if seat.node.id in self._leaving:
            ray.kill(seat.launcher)  # Ray has nothing to wait for on this node then
            return False
        return answers(seat, lambda: self._stopped)

    def _has_settled(self) -> bool:
        """Whether an elastic program need not wait for nodes that come just after the first."""
        now = time.monotonic()
        if len(self._seats) != self._num_seen:
            self._num_seen, self._seen_at = len(self._seats), now
        return len(self._seats) >= self._nodes.high or now - self._seen_at > _SETTLE_S

    # --- the program
    def _begin(self) -> bool:
        """Start the program on all nodes; return whether none was lost meanwhile.

        Raises:
            InputError: the program cannot be started.
        """
        self._start += 1
        self._has_lost = self._is_surprised = self._has_changed = False
        names = f"node{'s' if len(self._seats) > 1 else ''}"
        say(f"running {' '.join(self._told.words)} on {len(self._seats)} {names}")
        try:
            restored = self._begin_files()
        except Stopped:
            self._seats.clear()  # the program has not run since its files were saved
            return False
        for rank, seat in enumerate(self._seats):
            seat.place, seat.ended = self._place(seat, rank, self._seats, restored), None
        return self._on(self._seats, "prepare") and self._on(self._seats, "start")

    def _begin_files(self) -> files.Start | None:
        """What all nodes restore; None if files are not kept."""
        if not self._told.storage:
            return None
        numbers = [seat.number for seat in self._seats]
        return files.begin(
            self._bucket(), numbers, writer=self._writer, say=say, should_stop=lambda: self._stopped
        )

    def _bucket(self) -> Bucket:
        return Bucket(f"{self._told.storage}/{runs.output_prefix(self._told.run)}")

    def _keep_files_current(self) -> None:
        """Tell the nodes about a change among them, once no node restores or saves under the old
        start any more."""
        is_saving = any(seat.still_runs() for seat in self._gone)
        if self._has_changed and not self._joining and not is_saving:
            self._renumber()

    def _renumber(self) -> files.Start | None:
        """Begin a new start of the files, because the nodes have changed under an elastic program.

        Returns:
            None if files are not kept, or the bucket does not answer: it is tried again.
        """
        if not self._told.storage:
            self._has_changed = False
            return None
        numbers = [seat.number for seat in self._seats]
        try:
            start = files.claim(self._bucket(), numbers, writer=self._writer)
        except ERRORS as error:
            if not self._is_bucket_down:
                say(f"files are not saved at the moment: {error}; trying again")
            self._is_bucket_down = True
            return None
        for seat in self._seats:
            seat.launcher.renumber.remote(start)
        self._has_changed = self._is_bucket_down = False
        return start

    def _place(
        self, seat: Seat, rank: int, seats: Sequence[Seat], restored: files.Start | None
    ) -> Place:
        return Place(
            number=seat.number,
            rank=rank,
            start=self._start,
            address=seat.node.address,
            addresses=tuple(each.node.address for each in seats),
            gpus=int(seat.node.gpus),
            files=restored,
        )

    def _on(self, seats: Sequence[Seat], step: str) -> bool:
        """Prepare or start the program on some nodes at once; return whether all did."""
        calls = {getattr(seat.launcher, step).remote(seat.place): seat for seat in seats}
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
                except (InputError, RayError) as error:
                    failure = failure or error  # after the others, which may have started
                    continue
                if step == "start":
                    seat.wait = seat.launcher.wait.remote()
        if failure is not None:
            raise failure
        return is_done

    def _watch(self) -> int | None:
        """Wait for the program's end; None where it must be started again."""
        while not self._stopped:
            lost = self._look()
            running = [seat for seat in self._seats if seat.is_running]
            if any(seat.ended and seat.ended.was_replaced for seat in self._seats):
                self._end_all()
                self._report_lost("another job has taken over the files of the run")
                return exits.FILES_LOST
            failed = first_failure(self._seats)
            if failed and not lost:
                lost = self._lost_behind(failed)
            if lost or (failed and self._has_lost):
                if failed or not self._goes_on_without(lost):
                    self._end_all()
                    return None
            elif failed:
                assert failed.ended is not None
                code = failed.ended.code
                say(f"the program failed on node {failed.number}, exit code {code}")
                self._end_all()
                if hosts := unfit(self._seats):
                    self._leaving |= {seat.node.id for seat in hosts}
                    return None
                if code in exits.OF_THE_SYSTEM:
                    say(f"exit code {code} has a meaning of its own here: the job's is 1")
                    return exits.FAILED
                return code
            elif not running:
                return self._save_last()
            self._grow()
        self._end_all()
        return exits.TERMINATED

    def _look(self) -> list[Seat]:
        """Wait for a moment; take note of what has ended. Return the seats whose nodes go."""
        lost: list[Seat] = []
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
                if seat not in lost and not seat.is_done:
                    lost.append(seat)
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
                if not seat.is_done:
                    lost.append(seat)
        return lost

    def _lost_behind(self, failed: Seat) -> list[Seat]:
        """Nodes whose loss has made the program fail on another one, if there are any.

        The others feel a loss within a second, and Ray sees it later.
        """
        deadline = time.monotonic() + _OTHERS_S
        lost: list[Seat] = []
        while not lost and time.monotonic() < deadline:
            lost = self._look() if any(seat.wait for seat in self._seats) else lost
        if lost:
            return lost
        others = [seat for seat in self._seats if seat is not failed and not seat.is_done]
        lost = [seat for seat in others if not answers(seat, lambda: self._stopped)]
        self._is_surprised |= bool(lost)
        return lost

    def _goes_on_without(self, lost: Sequence[Seat]) -> bool:
        """Whether the program goes on with the nodes that are left: torchrun does, if elastic."""
        left = [seat for seat in self._seats if seat not in lost and seat.is_running]
        is_elastic = self._nodes.low < self._nodes.high
        if not is_elastic or len(left) < max(1, self._nodes.low) or not self._is_torchrun():
            return False
        say(f"the program goes on with {len(left)} node{'s' if len(left) > 1 else ''}")
        self._has_lost = True
        for seat in lost:
            if seat.node.id in self._leaving:
                # Its launcher ends the program in time, saves, and is not needed any more then.
                seat.wait = seat.launcher.wait.remote()
            self._seats.remove(seat)
            self._gone.append(seat)  # or Ray would end an actor that nothing refers to
        self._has_changed = True
        return True

    def _grow(self) -> None:
        """Let nodes that have come later take part, where torchrun lets them.

        It waits for none of them: their files may take long, and another node may be lost.
        """
        for seat in [*self._joining]:
            if ray.wait([seat.call], timeout=0)[0]:
                self._advance(seat)
        self._keep_files_current()
        now = time.monotonic()
        is_full = len(self._seats) + len(self._joining) >= self._nodes.high
        if is_full or self._nodes.low == self._nodes.high or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        if not any(seat.is_running for seat in self._seats) or not self._is_torchrun():
            return
        free = self._free(alive())
        if not free or (self._told.storage and (self._joining or self._has_changed)):
            return  # files are being restored, or told to the nodes: one change after the other
        restored = self._renumber()
        if self._told.storage and restored is None:
            return
        for node in free:
            launcher = start_launcher(self._order(), node)
            self._joining.append(seat := Seat(number=self._number(), node=node, launcher=launcher))
            say(f"node {seat.number} ({node.address}) joins the program")
            seat.place = self._place(seat, len(self._seats), [*self._seats, seat], restored)
            seat.call = launcher.prepare.remote(seat.place)

    def _advance(self, seat: Seat) -> None:
        """A node that joins has its files: start the program; or it has started it."""
        try:
            ray.get(seat.call)
        except (InputError, RayError) as error:
            say(f"node {seat.number} is left out: {getattr(error, 'cause', error)}")
            self._leaving.add(seat.node.id)
            self._joining.remove(seat)
            self._has_changed = True
            ray.kill(seat.launcher)
            return
        if not seat.is_prepared:
            seat.is_prepared = True
            seat.call = seat.launcher.start.remote(seat.place)
            return
        self._joining.remove(seat)
        self._has_changed = True
        self._sit(seat)
        seat.wait = seat.launcher.wait.remote()

    def _save_last(self) -> int:
        """Save the files of a program that has succeeded; return the exit code of the job."""
        lost = self._end_all()
        if not lost or not self._told.storage:
            return exits.OK
        self._report_lost("; ".join(lost))
        return exits.FILES_LOST

    def _report_lost(self, what: str) -> None:
        storage, run = self._told.storage, self._told.run
        report_lost(what, storage=storage, run=run, job=os.environ.get(ENV_JOB, ""))

    def _end_all(self) -> list[str]:
        """End the program wherever it runs, and save its files: all, unless the job must end.

        Returns:
            What is lost, as ``save_all``.
        """
        stop_all(self._seats)
        self._keep_files_current()
        if calls := [seat.call for seat in self._joining if seat.is_prepared]:
            ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)
        for seat in [*self._joining]:
            if seat.is_prepared and ray.wait([seat.call], timeout=0)[0]:
                self._advance(seat)  # the program runs there, or it cannot
                stop_all([seat])
            else:
                ray.kill(seat.launcher)
        self._joining.clear()
        wait_for_end(self._seats)
        return save_all(self._seats, lambda: self._stopped, self._told.deadline)


def main() -> int:
    """Run what the head says; return the exit code of the job."""
    told = LaunchSpec.from_json(os.environ[ENV_PROGRAM])
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # they are handled where they are asked for
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    group = Group(told)
    # After ray.init, which sets a handler of its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, group.stop)
    try:
        return run(group)
    finally:
        ray.shutdown()


def run(group: Group) -> int:
    """Run the program; return the exit code of the job, also where it is a user's mistake."""
    try:
        return group.run()
    except InputError as error:
        # Raised on a node, Ray adds where: the first line is ours.
        say(f"error: {getattr(error, 'cause', error)}")
        return exits.BAD_INPUT


if __name__ == "__main__":
    # Where Ray prints the last twenty lines of a lost node's own log, again and again.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        sys.exit(main())
