"""Supervisor of a program on all nodes: starts it together, watches it, restarts it after a loss.

    python -m containers.program.start.supervisor

The head of a job runs this as its command (``containers.job_head``); the order comes as JSON in
``TRAIN_PROGRAM``. Ray brings the nodes and says when one is lost; on each of them, an actor that
holds all of the node runs a ``Launcher``.

A program that fails on a node ends the job with its exit code, unless a host is found unfit then.
A lost node does not end the job: the program is started again on all nodes as soon as there are
enough, with the files of one moment (``containers.program.files.program_files``). With a range of
nodes it is also started again when more have come. Each start has a fixed number of nodes, so any
launcher can be used.
"""

import contextlib
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any, Final

import ray
from ray.exceptions import RayError

from containers.host.machine import in_background, say
from containers.program.files import starts
from containers.program.files.s3_files import (
    PreparationStopped,
    open_bucket,
    open_recorder,
    report,
    until_answered,
    write_records,
)
from containers.program.files.selection import shortfall
from containers.program.start.on_node import (
    ENV_PROGRAM,
    Ended,
    LaunchSpec,
    NodePlace,
    Status,
)
from containers.program.start.ray_nodes import NodeInfo, alive, start_launcher
from containers.program.watch import joined
from containers.program.watch import signs as watch
from containers.program.watch.cause import Error, cause, success
from containers.program.watch.signs import Verdict
from contract import exits, faults, runs, times
from contract.errors import InputError, UnreachableError
from contract.nodes import ENV_JOB, Range
from contract.text import counted, listed
from training.record import progress
from training.record.goodput import Recorder

#: A node that does not answer for this long is lost: Ray itself needs up to 24 s to see it.
_LOST_S: Final = 40.0
#: The same for a node whose launcher has to be started first.
_LAUNCHER_START_S: Final = 120.0
_POLL_S: Final = 0.5
#: After a first failure, those of the other nodes are waited for: the earliest is the cause.
_OTHERS_S: Final = 1.5
#: With a range, the nodes that come next are waited for this long before a start,
_SETTLE_S: Final = 10.0
#: and a program runs for this long before it is started again on more nodes: that costs what it did
#: since it last saved.
_GROW_AFTER_S: Final = 120.0
#: If nodes keep dying soon after a start without a spot notice, assume that the program kills them.
_STARTS_IN_VAIN: Final = 5
_LONG_RUN_S: Final = 600.0
#: Notes of steps over which their pace is measured.
_PACES: Final = 13


# --- decisions ------------------------------------------------------------------------------------
class Next(Enum):
    """Verdict about a started program."""

    WAIT = auto()
    AGAIN = auto()
    """Stop it wherever it runs, and start it again."""
    REPLACED = auto()
    """Stop it: another job has taken over its files."""
    FAILED = auto()
    DONE = auto()


def after(ends: Sequence[Ended | None], *, is_lost: bool, can_grow: bool) -> Next:
    """Decide about a started program.

    Args:
        ends: of the program on each of its nodes; None where it runs.
        is_lost: a node is lost on which the program had not ended well.
        can_grow: it may be started again on more nodes.
    """
    if any(ended and ended.was_replaced for ended in ends):
        return Next.REPLACED
    if is_lost:
        return Next.AGAIN
    if first_failure(ends):
        return Next.FAILED
    if None not in ends:
        return Next.DONE
    return Next.AGAIN if can_grow and not any(ends) else Next.WAIT


def first_failure(ends: Iterable[Ended | None]) -> Ended | None:
    """The end that failed first, of programs that no SIGTERM of ours has ended."""
    failed = [ended for ended in ends if ended and ended.code and not ended.was_stopped]
    return min(failed, key=lambda ended: ended.at, default=None)


# --- seats ----------------------------------------------------------------------------------------
@dataclass(kw_only=True, slots=True)
class Seat:
    """One of the places of a program, and the node that has it now."""

    number: int
    node: NodeInfo
    launcher: Any
    """The actor."""
    start: int = -1
    """Number of the start that was ordered last."""
    status: Status = field(default_factory=Status)
    """Its last answer,"""
    heard_at: float = 0.0
    """to a question of that time, by the monotonic clock."""
    asked: Any = None
    """An answer that has not come yet,"""
    asked_at: float = 0.0
    """to a question of that time."""
    is_lost: bool = False

    @property
    def runs(self) -> bool:
        """The program has been started here."""
        return self.status.runs and self.status.start == self.start

    @property
    def ended(self) -> Ended | None:
        """End of the program here; None while it runs."""
        return self.status.ended if self.status.start == self.start else None

    @property
    def is_done(self) -> bool:
        """The program has ended here as it should: it needs the node no more."""
        return self.ended is not None and not self.ended.code and not self.ended.was_stopped

    @property
    def is_over(self) -> bool:
        """The program has ended here, and its files are saved as far as they can be; or it was
        never started here."""
        is_saved = self.ended is not None and self.status.lost is not None
        return self.is_lost or self.start < 0 or is_saved

    @property
    def lost(self) -> str:
        """Lost files of the program, in words."""
        if self.ended is None or (names := self.status.lost) is None:
            what = "is lost" if self.is_lost else "does not answer"
            return f"the last files of node {self.number}, which {what}"
        return f"{counted(len(names), 'file')} of node {self.number}: {listed(names)}" * bool(names)


def ask(seats: Sequence[Seat]) -> None:
    """Poll all nodes; those that do not answer at once are asked again later."""
    now = time.monotonic()
    asked = {}
    for seat in seats:
        if not seat.is_lost:
            if seat.asked is None:
                seat.asked, seat.asked_at = seat.launcher.status.remote(), now
            asked[seat.asked] = seat
    done, late = ray.wait([*asked], num_returns=len(asked), timeout=_POLL_S) if asked else ([], [])
    for ref in done:
        seat = asked[ref]
        seat.asked = None
        try:
            seat.status, seat.heard_at = ray.get(ref), seat.asked_at
        except RayError:
            seat.is_lost = True
    for ref in late:
        seat = asked[ref]
        seat.is_lost = now - seat.asked_at > (_LOST_S if seat.heard_at else _LAUNCHER_START_S)
    time.sleep(_POLL_S)


def answers(calls: Mapping[Any, Seat], within_s: float) -> Iterator[tuple[Seat, Any]]:
    """Answers of the launchers that are not lost, and answer within some seconds."""
    done, _ = ray.wait([*calls], num_returns=len(calls), timeout=within_s)
    for call in done:
        with contextlib.suppress(RayError):
            yield calls[call], ray.get(call)


def unfit(seats: Sequence[Seat]) -> list[Seat]:
    """The nodes whose hosts are found unfit to train, after the program has failed."""
    calls = {seat.launcher.host_faults.remote(): seat for seat in seats}
    found = []
    for seat, flaws in answers(calls, times.HOST_CHECK_S + 5):
        if flaws:
            say(f"node {seat.number} ({seat.node.address}) needs another host: {flaws[0]}")
            found.append(seat)
    return found


class NodeGroup:
    """A program on its nodes, from the start of the job to its end."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._order = spec, spec.order
        self._seats: list[Seat] = []
        self._leaving: set[str] = set()  # ids of nodes that go, or cannot be used
        self._start = -1
        self._began, self._failed_at = math.inf, 0.0
        self._stopped = False
        self._is_surprised = False  # since the last start: a loss without notice, or a bad disk
        self._in_vain = 0  # starts in a row that ended so, soon
        self._nodes = self._order.nodes  # with a head that trains, one more
        self._num_seen, self._seen_at = 0, 0.0
        self._writer = uuid.uuid4().hex  # of the files, for all starts of this job
        self._newest_ns = 0  # newest change of a saved file, on any node
        self._life = watch.Watch(self._order.hang_s)
        self._hung = ""  # what is known of a hang, in words
        self._apart = joined.Apart()
        self._paces: deque[tuple[float, int]] = deque(maxlen=_PACES)  # times and steps then
        self._recorder: Recorder | None = None
        self._restored_at = 0.0  # Unix time of the files that the program was started with
        self._writing: threading.Thread | None = None

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """End the program everywhere; ``run`` returns. For a signal's handler."""
        self._stopped = True

    def run(self) -> int:
        """Exit code of the program, or of what ended it.

        Raises:
            InputError, UnreachableError: the program cannot be started; it has been ended where it
                was.
        """
        code: int | None = None
        try:
            while code is None and not self._stopped:
                code = self._gather()
                if code is None:
                    code = self._try_once()
            self._write_last_steps()
            return exits.TERMINATED if code is None else code
        except Exception:
            with contextlib.suppress(RayError):
                self._end_all()
            raise

    def report(self, reason: str) -> None:
        """Log why the job ends."""
        report(reason, storage=self._spec.storage, run=self._order.run, job=self._job)

    # --- nodes
    def _gather(self) -> int | None:
        """Take a seat for each node until there are enough; an exit code where that fails."""
        began = time.monotonic()
        has_said = False
        while not self._stopped:
            self._look()
            self._take_seats()
            ready = sum(seat.heard_at >= began for seat in self._seats)
            least = max(1, self._nodes.low)
            if ready == len(self._seats) >= least and self._has_settled():
                return None
            waited = time.monotonic() - began
            # The head counts too, but only until all have joined: one may be lost before the start.
            missing = least - ready
            if missing > 0 and waited > self._order.capacity_wait_s:
                what = "after a loss" if self._start >= 0 else "for the first start"
                say(f"{ready} of {self._nodes.low} nodes {waited:.0f} s {what}: no capacity")
                return exits.NO_CAPACITY
            if self._start >= 0 and missing > 0 and not has_said:
                say(f"waiting for {counted(missing, 'node')}")
                has_said = True
        return exits.TERMINATED

    def _take_seats(self) -> None:
        """Take away the seats of the nodes that leave, and give one to each free node."""
        left = [seat for seat in self._seats if seat.node.id in self._leaving]
        self._seats = [seat for seat in self._seats if seat not in left]
        for seat in left:
            ray.kill(seat.launcher)  # Ray has nothing to wait for on this node then
            if seat.is_lost and seat.heard_at and not seat.status.leaves_at:
                # Perhaps only its launcher died. A node that can start no other one is lost.
                self._leaving.remove(seat.node.id)
        if any(node.is_head for node in alive()):
            of_order = self._order.nodes
            self._nodes = Range(of_order.low + 1, of_order.high + 1)
        for number, node in self._free():
            launcher = start_launcher(self._spec, node)
            self._seats.append(Seat(number=number, node=node, launcher=launcher))
        self._seats.sort(key=lambda seat: seat.number)

    def _free(self) -> list[tuple[int, NodeInfo]]:
        """Nodes that can take a seat, each with its number; the lowest numbers come first."""
        taken = {seat.node.id: seat.number for seat in self._seats}
        free = [node for node in alive() if node.id not in taken and node.id not in self._leaving]
        numbers = {*range(self._nodes.high)}.difference(taken.values())
        return [*zip(sorted(numbers), free, strict=False)]

    def _has_settled(self) -> bool:
        """True once nodes that join just after the first need not be waited for."""
        now = time.monotonic()
        if len(self._seats) != self._num_seen:
            self._num_seen, self._seen_at = len(self._seats), now
        return len(self._seats) >= self._nodes.high or now - self._seen_at > _SETTLE_S

    def _look(self) -> None:
        """Poll all nodes; note those with a spot notice."""
        ask(self._seats)
        for seat in self._seats:
            self._newest_ns = max(self._newest_ns, seat.status.newest_ns)
            at = seat.status.leaves_at
            if seat.node.id in self._leaving or not (seat.is_lost or at):
                continue
            self._leaving.add(seat.node.id)
            what = f"must end in {max(0.0, at - time.time()):.0f} s" if at else "is lost"
            say(f"node {seat.number} ({seat.node.address}) {what}")
            self._is_surprised |= not at and not seat.is_done

    # --- the program
    def _try_once(self) -> int | None:
        """Start the program on all nodes and wait for its end; None where it must be started again.

        Raises:
            InputError: it cannot be started.
        """
        self._start += 1
        self._is_surprised, self._failed_at = False, 0.0
        self._apart = joined.Apart()
        say(f"running {shlex.join(self._order.command)} on {counted(len(self._seats), 'node')}")
        restored = None
        if self._spec.storage:
            bucket = open_bucket(f"{self._spec.storage}/{runs.output_prefix(self._order.run)}")
            numbers = [seat.number for seat in self._seats]
            try:
                restored = until_answered(
                    lambda: starts.begin(bucket, numbers, writer=self._writer),
                    say=say,
                    should_stop=lambda: self._stopped,
                )
            except PreparationStopped:
                return exits.TERMINATED  # the program has not run since its files were saved
            if restored.round:
                self._restored_at = float(restored.round * times.FILES_EVERY_S)
        addresses = tuple(seat.node.address for seat in self._seats)
        for rank, seat in enumerate(self._seats):
            seat.start = self._start
            place = NodePlace(
                number=seat.number,
                rank=rank,
                start=self._start,
                addresses=addresses,
                gpus=int(seat.node.gpus),
                files=restored,
                most=self._nodes.high,
            )
            # Its answer is one to a question, and shows whether the order has arrived.
            seat.asked, seat.asked_at = seat.launcher.start.remote(place), time.monotonic()
        self._began = math.inf
        return self._watch()

    def _watch(self) -> int | None:
        """Exit code of a started program, once it has ended; None where it must start again."""
        step = Next.WAIT
        while step is Next.WAIT and not self._stopped:
            self._look()
            step = self._next()
            if step is Next.WAIT and self._began < math.inf and not self._failed_at:
                step = self._check_life()
        ran_s = time.monotonic() - self._began  # what it writes last may take long
        # After a failure, or a loss without notice, what the program saves now does not count.
        counts = step in (Next.WAIT, Next.AGAIN) and not self._is_surprised
        lost = self._end_all(self._order.grace_s if counts else times.COMMAND_STOP_S)
        if step is Next.FAILED:
            return self._failure()
        if step is Next.AGAIN:
            return self._again(ran_s)

        # The job has to end, or the program has ended well: what of its files is missing?
        lack = shortfall(self._newest_ns, time.time()) if self._spec.storage else ""
        if step is Next.WAIT:
            if lack:
                say(f"warning: {lack}")
            return exits.TERMINATED
        if step is Next.REPLACED:
            lost = ["another job has taken over the files of the run"]
        if lost and self._spec.storage:
            self.report(f"files lost: {'; '.join(lost)}")
            return exits.FILES_LOST
        lacks = "; ".join(filter(None, (self._hidden, lack, self._apart.words)))
        if reason := success(self._errors, self._order.run, lacks):
            self.report(reason)
        return exits.OK

    def _again(self, ran_s: float) -> int | None:
        """None where the program is started again; the exit code after too many short starts."""
        if ran_s >= _LONG_RUN_S:
            self._in_vain = 0
        self._in_vain += self._is_surprised
        if self._in_vain < _STARTS_IN_VAIN:
            nodes = f"node{'s' if self._nodes.high > 1 else ''}"
            say(f"the program is started again on {self._nodes} {nodes}")
            return None
        self.report(
            "failed: nodes were lost without notice, or could not be prepared, "
            f"{self._in_vain} times in a row, each time within {_LONG_RUN_S / 60:.0f} minutes of a "
            "start: the program may need more memory or disk than a node has. Submit the run again "
            "with larger nodes, or let it use less"
        )
        return exits.FAILED

    def _next(self) -> Next:
        """Decide what comes next, now that all nodes have answered."""
        if self._began == math.inf and all(seat.runs for seat in self._seats):
            self._began = time.monotonic()
            self._life.begin(self._began, spins=any(seat.node.gpus for seat in self._seats))
            self._note_start()
        ends = [seat.ended for seat in self._seats]
        is_lost = any(seat.node.id in self._leaving and not seat.is_done for seat in self._seats)
        for seat in self._seats:
            if seat.ended and isinstance(seat.ended.trouble, OSError):  # tried again, some times
                say(f"node {seat.number} ({seat.node.address}) cannot start: {seat.ended.trouble}")
                is_lost = self._is_surprised = True
        can_grow = (
            len(self._seats) < self._nodes.high
            and time.monotonic() - self._began > _GROW_AFTER_S
            and bool(self._free())
        )
        step = after(ends, is_lost=is_lost, can_grow=can_grow)
        if step is Next.FAILED:
            # The program on the others feels a loss within a second, and Ray sees it later: a
            # failure counts once each node has answered a question that was asked after that.
            self._failed_at = self._failed_at or time.monotonic()
            heard_at = min(seat.heard_at for seat in self._seats if not seat.is_lost)
            return step if heard_at > self._failed_at + _OTHERS_S else Next.WAIT
        return step

    def _check_life(self) -> Next:
        """Find out if the program still does something; log where it is if it has become silent."""
        running = [seat for seat in self._seats if seat.ended is None]
        self._hear(running)
        self._note_progress()
        has_ended = len(running) < len(self._seats)
        verdict = self._life.verdict(has_ended=has_ended)
        if verdict is Verdict.ALIVE:
            return Next.WAIT

        # Where its processes are, and what they have noted.
        is_last = verdict is Verdict.HUNG
        calls = {seat.launcher.look.remote(seat.number, is_last): seat for seat in running}
        looks = [answer for _, answer in answers(calls, _LOST_S)]
        found = [each for of_node, _ in looks for each in of_node]
        errors = [each for _, of_node in looks for each in of_node]
        numbers = listed([f"node {seat.number}" for seat in running])
        others = f"the program has ended on the other nodes, and not on {numbers}"
        text = watch.silence(self._life, found, others * has_ended)
        if not is_last:
            say(f"warning: {text}; the stacks of all processes are in the log")
            return Next.WAIT

        # Silent for too long: a program that has done its work is ended, another one fails. Without
        # a step on any node, what its threads still do may be its work.
        is_over = watch.are_over(found, step=self._life.step) and len(looks) == len(running)
        if is_over and (has_ended or self._life.step) and not errors:
            say(f"warning: {numbers}: the program does not end after its last line, and is ended")
            return Next.DONE
        self._hung = watch.hung(text, errors, self._order.run)
        return Next.FAILED

    def _hear(self, running: Sequence[Seat]) -> None:
        """Pass on the signs of life and the connections of the nodes that run the program."""
        now, seats = time.monotonic(), {seat.number: seat for seat in running}
        self._life.hear(now, {number: seat.status.signs for number, seat in seats.items()})
        peers = {number: seat.status.peers for number, seat in seats.items()}
        addresses = {number: seat.node.address for number, seat in seats.items()}
        if self._apart.hear(now, peers, addresses):
            say(f"warning: {self._apart.words}")

    # --- what it writes into its run
    def _note_start(self) -> None:
        """Record that the program runs on all nodes, and where each of them is."""
        if not (self._spec.storage and self._job):
            return
        if self._recorder is None:
            self._recorder = open_recorder(self._spec.storage, self._order.run, self._job)
        self._recorder.begin(time.time(), resumes=self._restored_at)
        places = {seat.number: seat.node.address for seat in self._seats}
        addresses = tuple(places.get(number, "") for number in range(max(places) + 1))
        self._recorder.activity = replace(self._recorder.activity, nodes=addresses)
        self._write()

    def _write_last_steps(self) -> None:
        """Write what is recorded when nothing starts any more, and wait for it."""
        if self._recorder is None:
            return
        if self._writing:
            self._writing.join(times.S3_TIMEOUT_S)
        self._write().join(times.S3_TIMEOUT_S)

    def _note_progress(self) -> None:
        """Write the program's steps into its run, now and then."""
        now, step = time.monotonic(), self._life.step
        if self._paces and step < self._paces[-1][1]:
            self._paces.clear()  # of an earlier start
        if self._recorder:
            self._recorder.step(time.time(), step)
        is_due = not self._paces or now - self._paces[-1][0] >= progress.EVERY_S
        if not (step and is_due and self._spec.storage):
            return
        self._paces.append((now, step))
        began, first = self._paces[0]
        reached = progress.Progress(
            time=time.time(),
            job=self._job,
            step=step,
            step_s=(now - began) / (step - first) if step > first else None,
            warning=self._apart.words,
        )
        self._write(reached)

    def _write(self, reached: progress.Progress | None = None) -> threading.Thread:
        """Write what is recorded in a thread, one at a time: the nodes are polled meanwhile."""
        if self._writing and self._writing.is_alive():
            return self._writing
        records = {} if reached is None else {runs.PROGRESS_FILE: reached.to_json()}
        if self._recorder:
            records[runs.job_activity(self._job)] = self._recorder.activity.to_json()
        storage, run = self._spec.storage, self._order.run
        self._writing = in_background(write_records, storage, run, records)
        return self._writing

    def _failure(self) -> int | None:
        """Exit code of a job whose program has failed; None where another host may help."""
        reason, code = self._hung, exits.HUNG
        if not self._hung:
            ended = first_failure(seat.ended for seat in self._seats)
            assert ended is not None
            if ended.trouble is not None:
                raise ended.trouble
            node = next(seat.number for seat in self._seats if seat.ended is ended)
            found = cause(self._errors, code=ended.code, node=node, log=ended.log)
            reason, code = found.reason(self._order.run), ended.code
        if hosts := unfit(self._seats):
            say(f"{reason}; the program is started again")
            self._leaving |= {seat.node.id for seat in hosts}
            self._hung = ""
            return None
        self.report(reason)
        if code in exits.OF_THE_SYSTEM and not self._hung:
            say(f"exit code {code} is reserved here: the job's is 1")
            return exits.FAILED
        return code

    @property
    def _job(self) -> str:
        return os.environ.get(ENV_JOB, "")

    @property
    def _errors(self) -> list[Error]:
        """Errors that the program's processes have noted, on all nodes."""
        return [error for seat in self._seats if seat.ended for error in seat.ended.errors]

    @property
    def _hidden(self) -> str:
        """Failures inside the command on any node, although it has ended with 0."""
        return listed([line for seat in self._seats if seat.ended for line in seat.ended.hidden])

    def _end_all(self, within_s: float = times.COMMAND_STOP_S) -> list[str]:
        """End the program wherever it runs, and wait until its files are saved: all, unless the job
        must end.

        Args:
            within_s: seconds between SIGTERM and SIGKILL.

        Returns:
            What is lost, in words: an item for each node that has lost something.
        """
        until = math.inf
        while not all(seat.is_over for seat in self._seats) and time.monotonic() < until:
            if self._stopped:
                most_s = within_s + times.FILES_SAVE_S + times.FILES_SLACK_S / 2
                until = min(until, time.monotonic() + most_s)
            for seat in self._seats:
                # Again and again: the job may have to end meanwhile.
                seat.launcher.stop.remote(
                    within_s, *([times.FILES_SAVE_S] if self._stopped else [])
                )
            self._look()
        lost = [seat.lost for seat in self._seats if seat.start >= 0 and seat.lost]
        for text in lost:
            say(f"warning: not saved: {text}")
        return lost


def main() -> int:
    """Run what the head says; return the exit code of the job."""
    spec = LaunchSpec.from_json(os.environ[ENV_PROGRAM])
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # every ref is awaited
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    group = NodeGroup(spec)
    # After ray.init, which sets its own handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, group.stop)
    try:
        return run(group)
    finally:
        ray.shutdown()


def run(group: NodeGroup) -> int:
    """Run the program; return the exit code of the job, also where it could not be started."""
    try:
        return group.run()
    except (InputError, UnreachableError) as error:
        code = faults.exit_code(error)
        if code == exits.BAD_INPUT:
            group.report(f"failed: {error}")
        else:  # it is tried again
            say(f"error: {error}")
        return code


if __name__ == "__main__":
    # Ray prints the last twenty lines of a lost node's own log there, again and again.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        sys.exit(main())
