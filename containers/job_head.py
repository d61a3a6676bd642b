"""Head of a job: a Ray cluster that lives as long as one command and starts its own workers.

    python -m containers job

Ray runs here with its autoscaler, which starts worker tasks on ECS (``containers.autoscaler``). The
command runs beside it; its exit code is the container's. At the deadline, or if the minimum number
of workers never joins, the command gets SIGTERM and time to save before Ray stops.
"""

import contextlib
import functools
import hashlib
import json
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from containers import node
from containers.decisions import CANNOT_PREPARE, Decisions, Observation
from containers.host import machine
from containers.host.machine import Clock, say
from containers.node import NodeConfig
from containers.program.files import scalars
from containers.program.files.program_files import Mirror, open_mirror
from containers.program.files.s3_files import ERRORS as BUCKET_ERRORS
from containers.program.files.s3_files import PreparationStopped, open_bucket, report
from containers.program.files.selection import shortfall
from containers.program.start import code as user_code
from containers.program.start import host_cache, shell
from containers.program.start.on_node import (
    ENV_PROGRAM,
    NAMES,
    NOTED_ERRORS,
    LaunchSpec,
    prepare_head,
)
from containers.program.start.process import ProgramProcess, own_output
from containers.program.start.questions import Questions
from containers.program.start.ray_defaults import OWN_STORAGE
from containers.program.watch.cause import LogEnd, cause, errors_in, hidden, success
from containers.program.watch.signs import hung
from containers.ray_head import (
    JobConfig,
    RayHead,
    for_autoscaler,
    for_ray,
    in_pool,
    worker_provider,
)
from containers.ray_watch import RayWatch
from contract import exits, faults, runs, times
from contract.errors import InputError
from contract.files import WORK
from contract.job import LAUNCH, LOOK, Life, Placement
from contract.nodes import (
    ENV_HOST_CHECK,
    ENV_LOG,
    ENV_RUN,
    ENV_STORAGE,
    ENV_TRAINS,
    ENV_WORKER_TASK,
    GCS_PORT,
    HEAD,
    Range,
)
from contract.text import counted, duration, listed
from store.bucket import Bucket

#: Poll interval for cheap local checks, in seconds.
_POLL_S: Final = 0.1
#: ``ray start --block`` looks at Ray's processes every second.
_RAY_ENDS_S: Final = 3.0


# --- the job --------------------------------------------------------------------------------------
class JobHead:
    """Runs one job until its command ends, or has to."""

    def __init__(
        self,
        config: JobConfig,
        ray: RayHead,
        environment: Mapping[str, str],
        *,
        spawn: Callable[..., ProgramProcess] = ProgramProcess,
        make_mirror: Callable[..., Mirror] = open_mirror,
        make_questions: Callable[..., Questions] = Questions,
        client: Any = None,
        clock: Clock = time,
    ) -> None:
        """
        Args:
            ray: of this job; not started yet.
            environment: of the command, but for what this class adds.
            spawn: starts a command.
            make_mirror: of a program's folders and the address of their copy.
            make_questions: about a program on nodes.
            client: of S3, for what nodes tell each other there; boto3's by default.
        """
        self._config, self._ray, self._clock = config, ray, clock
        self._spawn, self._make_mirror, self._make_questions = spawn, make_mirror, make_questions
        self._client, self._ask_worker_at = client, 0.0
        self._trains = environment.get(ENV_TRAINS, "1") == "1"
        self._storage = environment.get(ENV_STORAGE, "")
        self._environment = environment
        self._is_stopped = self._is_unfit = self._is_alone = False
        self._own_code = 0  # of the command itself
        self._outlived: dict[int, list[str]] = {}  # what still ran at its end
        launches = config.spec.command[1:3] == ("-m", LAUNCH)
        needs_nodes = config.spec.nodes.low > 0
        self._waits = self._looks = bool(config.spec.recipe) and needs_nodes and launches
        """True if the command waits for its nodes, and data and model are checked before they are
        requested."""
        self._asks = config.spec.on == Placement.NODES and bool(config.spec.code)
        """True if the program's environment is asked whether it can start."""
        self._holds = self._looks or (self._asks and needs_nodes)
        """True if workers are requested only after that."""
        self._decisions = Decisions(config.spec, config.deadline, clock.monotonic())
        self._has_released = False
        self._phases: dict[str, float] = {}
        self._mirror: Mirror | None = None
        self._log_end = LogEnd()
        self._is_ending = False  # to end, and has little time left
        self._watch: RayWatch | None = None
        self._silence = ""  # of a program that hangs
        self._ending: int | None = None  # exit code, of a reason to end before the command runs

    def run(self) -> int:
        """Return the container's exit code."""
        if self._config.spec.code:
            # Of an earlier attempt: another node may do better.
            user_code.forget_failure_of_worker(self._config.spec.code, client=self._client)
        self._ray.start()
        if self._holds and self._has_passed():
            self._looks = self._asks = self._holds = False
        self._decisions.is_held = self._holds
        if not self._holds:
            self._ray.request()
        code = exits.FAILED
        try:
            code = self._until_end()
            return code
        except Exception as error:
            code = faults.exit_code(error)
            raise
        finally:
            # Their hosts wait for the next head, or are kept; the keeper ends their tasks.
            is_kept = self._config.spec.keep_s > 0 or code in exits.TRIED_AGAIN
            self._ray.end(keeps_workers=is_kept)

    def _until_end(self) -> int:
        # A process of Ray may still write there when it is removed.
        with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
            return self._run_in(Path(folder))

    def stop(self) -> None:
        """End the job soon: this container has been told to stop."""
        self._is_stopped = True
        if self._mirror:
            self._mirror.hurry(self._config.spec.grace_s + times.FILES_SAVE_S)

    def report_life(self) -> None:
        """Report to the keeper that this head runs: ECS may never notice that its container is
        gone."""
        if self._storage.startswith("s3://"):
            is_complete = self._decisions.capacity_at is not None
            life = Life(at=self._clock.time(), is_complete=is_complete, phases=dict(self._phases))
            with contextlib.suppress(*BUCKET_ERRORS):  # reported again soon
                key = runs.job_life(self._config.spec.run, self._config.job)
                self._reports.put(key, life.to_json().encode())
                if with_run := self._config.spec.with_run:
                    end = runs.job_record(with_run, self._config.spec.after)
                    self._is_alone = self._reports.get(end) is not None

    def _note(self, phase: str) -> None:
        """Report that a part of the start is over."""
        if phase not in self._phases:
            self._phases[phase] = self._clock.time()
            machine.in_background(self.report_life)

    @functools.cached_property
    def _reports(self) -> Bucket:
        # Made once, in the main thread: boto3's session is not safe in several.
        return open_bucket(self._storage, self._client)

    def leave_host(self) -> None:
        """End the job soon: the head's own host is not fit."""
        self._is_unfit = True

    def _until_up(self) -> int | None:
        """Wait until Ray is up, then for workers; an exit code where it does not come up."""
        began = self._clock.monotonic()
        # Its port alone is not enough: the head is a node of its own cluster some seconds later.
        while not self._ray.is_up:
            if (early := self._reason_to_end()) is not None:
                return early
            if self._clock.monotonic() - began > times.RAY_START_S:
                self._say_of_ray(f"Ray did not start within {times.RAY_START_S} s")
                return exits.RAY_FAILED
            self._clock.sleep(_POLL_S)
        self._note("Ray")
        if self._holds:
            self._decisions.begin(self._clock.monotonic())
        return None

    def _run_in(self, folder: Path) -> int:
        spec, work = self._config.spec, folder / WORK
        work.mkdir()
        try:
            # Ray starts meanwhile.
            own = user_code.prepare(spec, work, should_stop=self._must_end)
            self._note("packages")
            if self._asks:
                self._check_program(work, own)
            until = self._until_nodes if self._waits else self._until_up
            if not self._looks and (early := until()) is not None:
                return early
            spawn = self._spawner(work, own)
            # The laptop counted a recipe's workers, and a program on nodes asks Ray for nothing.
            if spec.uses_ray:
                self._watch = RayWatch(self._config, self._ray, self._clock.monotonic())
            command = spawn(LOOK) if self._looks else spawn()
        except PreparationStopped:
            return exits.FAILED if self._ending is None else self._ending
        except InputError as error:
            if self._mirror:
                self._mirror.close()  # or it would save that the folder is gone
            if not faults.is_full(error):
                self._report(f"failed: {error}")
            raise
        read_last = self._read_scalars(folder)
        try:
            code = self._wait(command)
            if self._looks and code == exits.OK and not self._is_ending:
                self._pass()
                early = self._until_nodes()
                if early is None:
                    command = spawn()
                code = self._wait(command) if early is None else early
        finally:
            command.end()  # what it has left behind writes no more
            is_saved = self._save_files()
            read_last()
        return self._concluded(code, folder, is_saved=is_saved)

    def _read_scalars(self, folder: Path) -> Callable[[], None]:
        """As ``scalars.start``, of a program that runs here."""
        if self._mirror is None:  # a recipe's, or on other nodes
            return lambda: None
        record = f"{self._storage}/{runs.run_prefix(self._config.spec.run)}"
        return scalars.start(folder, open_bucket(record, self._client), say)

    def _concluded(self, code: int, folder: Path, *, is_saved: bool) -> int:
        """Explain the end of the command, and hold the hosts if it has failed; the exit code."""
        is_explained = self._config.spec.on == Placement.HEAD and not self._is_ending
        if code == exits.OK and not is_saved:
            code = exits.FILES_LOST
        elif is_explained and code not in exits.TRIED_AGAIN:
            self._tell_why(folder, has_failed=code != exits.OK)
        if not (self._is_ending or self._is_stopped):  # also while it saved its files
            self._hold(code)
        return code

    def _hold(self, code: int) -> None:
        """Keep the hosts of a job that has failed for as long as its user wants to look at them."""
        job, run = self._config.job, self._config.spec.run
        hold = self._decisions.hold(code, self._clock.time())
        if hold is None or not self._storage.startswith("s3://"):
            return
        try:  # the keeper ends the hosts if this head does not
            self._reports.put(runs.job_hold(run, job), hold.to_json().encode())
        except BUCKET_ERRORS as error:
            say(f"the hosts are not held: {faults.text(error)}")
            return
        left = duration(round(hold.until - hold.since))
        say(
            f"the command has failed; the hosts stay for {left}: trainctl shell {job} opens a "
            f"shell, and trainctl stop {job} ends this"
        )
        kept: int | None = None
        while self._clock.time() < hold.until and not self._is_stopped:
            there = self._ray.size.num_nodes - 1 if self._ray.size else 0
            if kept is None or there < kept:
                kept = there  # no other host comes for one that goes
                self._ray.scale(least=kept, most=kept)
            self._clock.sleep(_POLL_S)

    def _spawner(self, work: Path, own: Mapping[str, str]) -> Callable[..., ProgramProcess]:
        """Function that starts the job's command, with more words at its end.

        Args:
            work: folder with the job's code.
            own: variables of the job.

        Raises:
            InputError: by the function: there is no such program.
            PreparationStopped: the job has to end before its files are restored.
        """
        spec, words, place = self._config.spec, self._config.spec.command, None
        if spec.on == Placement.NODES:
            words = (sys.executable, "-m", "containers.program.start.supervisor")
            launch_spec = LaunchSpec(
                order=spec, variables=own, storage=self._storage, deadline=self._config.deadline
            )
            variables = {ENV_PROGRAM: launch_spec.to_json()}
        else:
            place = work if spec.code else None
            variables, mirror = prepare_head(
                spec, own, place, self._environment, make_mirror=self._make_mirror
            )
            if mirror:
                mirror.restore(should_stop=self._must_end)
                mirror.start()
                self._mirror = mirror
            say(f"running {shlex.join(words)}")
        variables = {**self._environment, **variables, ENV_RUN: spec.run}
        variables["RAY_ADDRESS"] = f"{self._ray.address}:{GCS_PORT}"
        if place:
            shell.note(place, variables, place=work.parent.with_name(shell.PLACE.name))

        def spawn(*more: str) -> ProgramProcess:
            try:
                return self._spawn(
                    (*words, *more), folder=place, environment=variables, emit=self._hear
                )
            except OSError as error:
                raise InputError(f"{words[0]} cannot be run: {error.strerror}") from None

        return spawn

    def _check_program(self, work: Path, variables: Mapping[str, str]) -> None:
        """Request the workers of a program that can start there.

        Raises:
            InputError: it certainly cannot.
        """
        config, nodes = self._config, self._config.spec.nodes
        self._make_questions(
            words=config.spec.command,
            work=work,
            variables=variables,
            nodes=Range(nodes.low + self._trains, nodes.high + self._trains),
            gpus=config.worker_gpus,
        ).check()
        self._pass()

    @property
    def _passed(self) -> str:
        """Key of the mark of all jobs about which the head asks the same."""
        spec = self._config.spec
        words = [each for each in spec.command if each != spec.run]
        # Another image has another revision of the task definition.
        task, gpus = self._environment.get(ENV_WORKER_TASK, ""), self._config.worker_gpus
        asked = [task, spec.code_sha256, words, str(spec.nodes), dict(spec.variables), gpus]
        return runs.passed(hashlib.sha256(json.dumps(asked).encode()).hexdigest())

    def _has_passed(self) -> bool:
        """True if a job like this one has passed the head's questions before."""
        with contextlib.suppress(*BUCKET_ERRORS):
            return self._reports.get(self._passed) is not None
        return False

    def _pass(self) -> None:
        """Request the workers, unless they have been: the head's questions are answered."""
        self._note("questions")
        if self._holds:
            self._ray.request()
        with contextlib.suppress(*BUCKET_ERRORS):
            self._reports.put(self._passed, b"")

    def _until_nodes(self) -> int | None:
        """Wait for Ray and a recipe's worker nodes; an exit code where that fails."""
        # Its command would keep the head's processors busy meanwhile.
        code = self._until_up()
        while code is None and self._decisions.is_short:
            self._clock.sleep(_POLL_S)
            code = self._reason_to_end()
        self._is_ending = code is not None
        return code

    def _hear(self, line: str) -> None:
        """A line that the command has printed."""
        print(line, flush=True)
        self._log_end.hear(line)
        if self._watch:
            self._watch.hear(line)

    def _tell_why(self, folder: Path, *, has_failed: bool) -> None:
        """Report why the command has failed, or what it has passed over in the job's folder."""
        run, errors = self._config.spec.run, errors_in(folder / NOTED_ERRORS)
        if has_failed:
            reason = cause(errors, code=self._own_code, log=self._log_end).reason(run)
            self._report(hung(self._silence, errors, run) if self._silence else reason)
            return
        passed_over = listed(hidden(folder / NOTED_ERRORS, self._outlived))
        lack = "" if (folder / NAMES / OWN_STORAGE).exists() else self._lack_of_files()
        if reason := success(errors, run, "; ".join(filter(None, (passed_over, lack)))):
            self._report(reason)

    def _lack_of_files(self) -> str:
        """Warning about unsaved files of the program on the head; "" if none are missing."""
        if self._mirror is None:
            return ""
        with contextlib.suppress(*BUCKET_ERRORS):
            if self._reports.keys(runs.ray_prefix(self._config.spec.run)):
                return ""  # Ray has saved something
        return shortfall(self._mirror.newest_ns, self._clock.time())

    def _must_end(self) -> bool:
        """True if there is a reason to end before the command runs; logs it once."""
        if self._ending is None:
            self._ending = self._reason_to_end()
        return self._ending is not None

    def _save_files(self) -> bool:
        """Save what the command on the head wrote last; return whether all of it is saved."""
        if self._mirror is None:
            return True
        left = 0 if self._is_ending else self._config.deadline - self._clock.time()
        is_saved = self._mirror.save(max(times.FILES_SAVE_S, left))
        self._mirror.close()
        if not is_saved:
            what = f"{counted(len(self._mirror.lost), 'file')}: {listed(self._mirror.lost)}"
            if self._mirror.is_replaced:
                what = "another job has taken over the files of the run"
            self._report(f"files lost: {what}")
        return is_saved

    def _report(self, reason: str) -> None:
        run, job = self._config.spec.run, self._config.job
        report(reason, storage=self._storage, run=run, job=job, client=self._client)

    def _release_unused(self) -> None:
        """Release worker nodes that have had nothing to do since all had joined."""
        spec, began = self._config.spec, self._decisions.capacity_at
        if began is None or self._has_released:
            return
        if self._clock.monotonic() - began < spec.idle_s:
            return
        idle = sum(each >= spec.idle_s for each in self._ray.demand.idle_s)
        if not idle:
            return  # yet; one that works now may be done later
        self._has_released = True
        self._ray.scale(least=0)
        nodes = "1 worker node has" if idle == 1 else f"{idle} worker nodes have"
        say(
            f"{nodes} had nothing to do for {spec.idle_s} s and will be released; the command "
            "runs on the head, and only Ray brings its work to other nodes (--on nodes runs it "
            "on every node)"
        )

    def _wait(self, command: ProgramProcess) -> int:
        """Exit code of the command, or of what ended it."""
        code: int | None = None
        while command.poll() is None and code is None:
            self._clock.sleep(_POLL_S)
            code = self._reason_to_end()
            self._release_unused()
        if code is not None:
            self._is_ending = code != exits.HUNG  # after which there is time to save
            if code == exits.NO_CAPACITY:
                # Nothing trains any more: release the nodes while the command ends.
                self._ray.scale(least=0, most=0)
                self._ray.release_workers()
            until = self._clock.monotonic() + self._stop_s()
            command.terminate()
            command.wait(lambda: until)
            command.end(lambda: until)
            return code
        self._outlived = command.outlived()
        own = self._own_code = command.end()
        if own != exits.OK and self._has_lost_ray():
            return exits.RAY_FAILED
        spec, why = self._config.spec, ""
        if own == exits.NO_CAPACITY and spec.on == Placement.NODES and spec.code:
            # A node may have come in place of a lost one, and found packages gone.
            why = user_code.failure_of_worker(spec.code, client=self._client)
        if why:
            self._report(CANNOT_PREPARE + why)
            return exits.BAD_INPUT
        code, changed = self._decisions.exit_code(own)
        if changed:
            say(changed)
        return code

    def _has_lost_ray(self) -> bool:
        """True if Ray has ended; the command may notice, and fail, a moment earlier."""
        until = self._clock.monotonic() + _RAY_ENDS_S
        while (code := self._ray.poll()) is None and self._clock.monotonic() < until:
            self._clock.sleep(_POLL_S)
        if code is not None:
            self._say_of_ray(f"Ray ended on its own (exit code {code})")
        return code is not None

    def _stop_s(self) -> int:
        """Seconds that the command may take to end."""
        if self._config.spec.recipe:
            return times.RECIPE_STOP_S  # it saves a checkpoint
        if self._config.spec.on == Placement.NODES:
            # The programs end, and then their files are saved.
            return self._config.spec.grace_s + times.FILES_SAVE_S + times.FILES_SLACK_S
        return self._config.spec.grace_s

    def _reason_to_end(self) -> int | None:
        """Exit code of a job that must not continue, with the reason logged; None while it may."""
        now = self._clock.monotonic()
        if self._watch:
            with contextlib.suppress(Exception):  # Ray is busy or ends, which is seen here too
                written_ns = self._mirror.worked_ns if self._mirror else 0
                self._silence = self._watch.check(now, written_ns)
        size, was_short = self._ray.size, self._decisions.is_short
        found = self._decisions.decide(
            Observation(
                now=self._clock.time(),
                monotonic=now,
                num_workers=size.num_nodes - 1 if size else None,
                ray_code=self._ray.poll(),
                is_stopped=self._is_stopped,
                is_replaced=self._mirror is not None and self._mirror.is_replaced,
                is_unfit=self._is_unfit,
                is_alone=self._is_alone,
                silence=self._silence,
                demand=self._ray.demand.reason,
                failure=self._failure_of_worker(now) if self._decisions.waits else None,
                failed_starts=self._ray.failed_starts,
            )
        )
        if was_short and not self._decisions.is_short:
            if self._config.spec.nodes.low:
                self._note("workers")
            if self._config.spec.code:
                # The others could prepare it: why one could not explains no later loss.
                user_code.forget_failure_of_worker(self._config.spec.code, client=self._client)
        if found is None:
            return None
        code, text = found
        if code in (exits.BAD_INPUT, exits.FAILED):
            self._report(text)
        elif code == exits.RAY_FAILED:
            self._say_of_ray(text)
        elif text:
            say(text)
        return code

    def _failure_of_worker(self, now: float) -> str | None:
        """Reason why a worker node could not prepare and join; asks the bucket now and then."""
        code = self._config.spec.code
        if not code or now < self._ask_worker_at:
            return None
        self._ask_worker_at = now + times.WORKER_ASKED_S
        return user_code.failure_of_worker(code, client=self._client) or None

    def _say_of_ray(self, what: str) -> None:
        say("\n".join([f"{what}; its last lines:", *self._ray.last_lines()]))


def _repeat(report: Callable[[], None], ended: threading.Event) -> None:
    while not ended.wait(times.HEAD_REPORTS_S):
        report()


def run(environment: Mapping[str, str]) -> int:
    """Run the job that a task's environment describes; return the container's exit code.

    Raises:
        InputError: a variable is missing or wrong, or this is not an ECS task.
    """
    environment = in_pool(environment)
    head = NodeConfig.from_environment(HEAD, environment)
    config = JobConfig.from_environment(environment)
    # Until there is a job to stop, a signal ends this process with the same exit code.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(exits.TERMINATED))
    if faults := node.host_faults(head):
        for fault in faults:
            say(f"not starting: {fault}")
        return exits.BAD_HOST
    host_cache.make_room()
    task = machine.own_task()
    if task is None:
        raise InputError("a job's head starts workers on ECS, so it must run in an ECS task")
    address = machine.own_address()
    interface = machine.interface_of(address)
    say(f"job {config.job}: head on {address}, worker nodes: {config.spec.nodes.words}")
    variables = {
        **node.ray_environment(head, interface, environment),
        "RAY_CLOUD_INSTANCE_ID": task.arn,
        "RAY_NODE_TYPE_NAME": HEAD,
        **for_autoscaler(),
        **for_ray(config.spec),
    }
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        request = Path(folder) / "check"
        variables |= {ENV_LOG: own_output(), ENV_HOST_CHECK: str(request)}
        ray = RayHead(
            config,
            head,
            address=address,
            environment=variables,
            folder=Path(folder),
            provider=worker_provider(config, environment, task=task, address=address),
        )
        job = JobHead(config, ray, variables)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: job.stop())
        node.start_watching_host(head, request, job.leave_host, ended)
        job.report_life()
        machine.in_background(_repeat, job.report_life, ended)
        try:
            return job.run()
        finally:
            ended.set()
