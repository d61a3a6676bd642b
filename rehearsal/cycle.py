"""The whole system on one machine: bring it up, train on it, take it away.

The unchanged CDK app on a local AWS, the images of production as real containers, the command line
that people use. ``trainctl local`` and ``make rehearse`` are this module.

Whatever the rehearsal makes carries its name: containers and the network by a label, processes by
their environment. Taking it away looks for the name, so it works after any kind of end.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self

from containers import publish
from contract import outputs as stack_outputs
from contract import runs
from contract.nodes import HEAD, WORKER
from rehearsal import commands, images, local_aws, processes, registry
from rehearsal.cdk import Cdk
from rehearsal.engine import Engine, EngineError, check_space, find_engine
from rehearsal.inventory import account_at, difference, inventory
from rehearsal.local_aws import ROOT, LocalAws, is_healthy

PORT: Final = 4566
WORKERS: Final = 2
#: Every deploy of the rehearsal: no GPU, and a bucket that goes with it.
SETTINGS: Final = {"preset": "cpu", "retain_bucket": "false"}
RECIPE: Final = ("ddp", "--preset", "digits", "--workers", str(WORKERS), "--json")
#: Of a job that has ended, nothing may be left after this long.
GONE_WITHIN_S: Final = 30
#: How much a run in containers may differ from the same run in plain processes.
ACCURACY_TOLERANCE: Final = 0.02


class RehearsalError(RuntimeError):
    """The rehearsal did not show what it must show; the message says what it showed."""


#: What goes wrong without this program being wrong; the message says what to do.
ERRORS: Final = (
    commands.CommandError,
    EngineError,
    images.ImageError,
    local_aws.LocalAwsError,
    publish.PublishError,
    registry.RegistryError,
    RehearsalError,
)


class Steps:
    """Says what is being done, and how long it took, on stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0
        self._is_line_open = False
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._number += 1
        began = time.monotonic()
        self._print(f"[{self._number:2}/{self._total}] {what} ... ", end="")
        self._is_line_open = True
        yield
        self.seconds[what] = time.monotonic() - began
        if not self._is_line_open:
            self._print("        ", end="")
        self._print(f"{self.seconds[what]:.0f} s")
        self._is_line_open = False

    def say(self, text: str) -> None:
        """A line about the step that is going on."""
        if self._is_line_open:
            self._print("")
            self._is_line_open = False
        for line in text.splitlines():
            self._print(f"        {line}")

    @staticmethod
    def _print(text: str, end: str = "\n") -> None:
        print(text, end=end, file=sys.stderr, flush=True)


class Rehearsal:
    """One checkout's rehearsal; another checkout has another name and does not see it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = f"ecs-train-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
        self.folder = ROOT / ".rehearsal"
        self.log = self.folder / "log"
        self._state_file = self.folder / "state.json"

    @classmethod
    def here(cls) -> Self:
        """Raises EngineError: there is no usable Docker Engine, and what to do about it."""
        if not sys.platform.startswith("linux"):
            raise RehearsalError(
                "the rehearsal runs on Linux: elsewhere the Docker Engine is inside a virtual "
                "machine, and its containers do not reach a local AWS on the host"
            )
        return cls(find_engine())

    # --- what there is ------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """What the last ``up`` has written; empty when nothing is up."""
        try:
            found: dict[str, Any] = json.loads(self._state_file.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _remember(self, **values: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        temporary = self._state_file.with_suffix(".part")
        temporary.write_text(json.dumps(self.state() | values, indent=1))
        temporary.replace(self._state_file)

    def environment(self) -> dict[str, str]:
        """Variables that send AWS clients of this machine to the local AWS.

        Raises:
            RehearsalError: nothing is up.
        """
        endpoint = self.state().get("endpoint")
        if not endpoint:
            raise RehearsalError("no local deployment is up: trainctl local up")
        return LocalAws(endpoint=endpoint, log=self.folder / "aws" / "log", pid=0).environment()

    def status(self) -> dict[str, Any]:
        """What is up, for people and for ``--json``."""
        state = self.state()
        endpoint = state.get("endpoint", "")
        return {
            "name": self.name,
            "aws": endpoint,
            "aws_answers": bool(endpoint) and is_healthy(endpoint),
            "registry": state.get("registry", ""),
            "image_tag": state.get("image_tag", ""),
            "processes": len(processes.find(self.name)),
            "containers": len(self.engine.labelled("container", self.name)),
            "networks": len(self.engine.labelled("network", self.name)),
        }

    # --- up -----------------------------------------------------------------------------------
    def up(
        self, steps: Steps, *, standing: bool = True, settings: Mapping[str, str] = SETTINGS
    ) -> None:
        """Bring up the local AWS, the stacks, the images and, if ``standing``, a cluster."""
        # Whatever this starts is found by it, should this process be killed.
        os.environ[processes.NAME] = self.name
        self.folder.mkdir(exist_ok=True)
        with steps.step("check the Docker Engine"):
            check_space(self.engine)
        with steps.step("start the local AWS and the image registry"):
            gateway = self.engine.make_network(self.name)
            store = ""
            if registry.program():
                store = registry.start(self.folder / "registry", name=self.name)
            else:
                steps.say("no docker-registry here: the nodes take the images from the engine")
            aws = local_aws.start_detached(
                self.folder / "aws",
                host=gateway,
                port=PORT,
                containers=local_aws.Containers(
                    name=self.name,
                    engine=self.engine.address,
                    network=self.name,
                    registry=store,
                ),
            )
            self._remember(endpoint=aws.endpoint, registry=store)
        tag = images.tag()
        docker = self._docker()
        with steps.step("build the images of head and worker"):
            built = images.build(self.engine, docker, image_tag=tag, say=steps.say)
        with steps.step("deploy CoreStack and TrainingStack"):
            self.deploy(aws.environment(), image_tag=tag, settings=settings)
        with steps.step("push the images"):
            for node, image in built.items():
                self._push(docker, image, self._repository(node), tag)
        self._remember(image_tag=tag)
        if standing:
            with steps.step(f"bring up the standing cluster: a head, {WORKERS} workers"):
                self.trainctl("cluster", "up", "--workers", str(WORKERS), "--yes")

    def deploy(
        self, environment: Mapping[str, str], *, image_tag: str, settings: Mapping[str, str]
    ) -> None:
        """``cdk bootstrap`` and ``cdk deploy`` of both stacks."""
        cdk = self._cdk(environment)
        cdk.bootstrap()  # stays in an account, and so it counts as there before
        self._remember(before=inventory(environment["AWS_ENDPOINT_URL"]))
        given = {**settings, "image_tag": image_tag}
        context = [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
        stacks = (stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK)
        cdk("deploy", *stacks, "--require-approval", "never", *context)

    def _cdk(self, environment: Mapping[str, str]) -> Cdk:
        mark = {processes.NAME: self.name}
        return Cdk(self.folder, {**environment, **mark}, log=self.log)

    def _docker(self) -> images.Docker:
        return images.Docker(
            client=self.engine.client,
            environment=self.engine.environment(),
            name=self.name,
            log=self.log,
        )

    def _repository(self, node: str) -> str:
        """URI of a node's image repository, as the stacks name it."""
        output = {
            HEAD: stack_outputs.HEAD_REPOSITORY,
            WORKER: stack_outputs.WORKER_REPOSITORY,
        }[node]
        return self.outputs(stack_outputs.CORE_STACK)[output]

    def outputs(self, stack: str) -> dict[str, str]:
        """Outputs of a deployed stack."""
        client = account_at(self.state()["endpoint"]).client("cloudformation")
        (found,) = client.describe_stacks(StackName=stack)["Stacks"]
        return {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}

    def _push(self, docker: images.Docker, image: str, repository: str, tag: str) -> None:
        """Push as the pipeline does; without a registry, the engine itself is the place."""
        store, path = self.state()["registry"], repository.partition("/")[2]
        name = f"{store}/{path}:{tag}" if store else f"{path}:{tag}"
        self.engine("tag", image, name)
        if store:
            digest = publish.push(docker, name)
            # Only the registry has it under this name now: what a node runs was pulled from there.
            self.engine("image", "rm", "--no-prune", name)
            self._remember(digests=self.state().get("digests", {}) | {path: digest})

    # --- run ----------------------------------------------------------------------------------
    def run(self, steps: Steps) -> dict[str, Any]:
        """Train on the standing cluster and look at what came of it; return the figures.

        Raises:
            RehearsalError: it is not what it must be.
        """
        with steps.step("ray status, inside the head"):
            # It shows the autoscaler's last report, which may be some seconds old.
            deadline = time.monotonic() + 20
            while (nodes := self._nodes_of_ray()) != WORKERS + 1:
                if time.monotonic() > deadline:
                    raise RehearsalError(f"ray status shows {nodes} nodes, not {WORKERS + 1}")
                time.sleep(1)
        with steps.step("train the DDP recipe on the two workers"):
            began = time.time()
            command = ("python", "-m", "training.launch", *RECIPE, "--run", "rehearsal")
            result = json.loads(self.trainctl("shell", "--", *command))
        with steps.step("look at the run's record in the bucket"):
            first_step_s = self._check_record(result) - began
        with steps.step("bring down the standing cluster"):
            self.trainctl("cluster", "down", "--yes")
        with steps.step("train the same in plain processes, to compare"):
            local = self._train_locally()
        if abs(local["accuracy"] - result["accuracy"]) > ACCURACY_TOLERANCE:
            raise RehearsalError(
                f"accuracy {result['accuracy']:.4f} in containers, {local['accuracy']:.4f} in "
                f"plain processes: they differ by more than {ACCURACY_TOLERANCE}"
            )
        return {
            "nodes": nodes,
            "hosts_of_the_ranks": result["hosts"],
            "accuracy": result["accuracy"],
            "accuracy_in_plain_processes": local["accuracy"],
            "submit_to_first_step_s": round(first_step_s, 1),
            "images_per_s": result.get("images_per_s"),
            **self._run_job(steps),
        }

    def _run_job(self, steps: Steps) -> dict[str, Any]:
        """A job with nothing there before: it brings its own cluster and takes it away again."""
        with steps.step("trainctl submit: a job that brings its own head and workers"):
            began = time.time()
            options = ("--workers", str(WORKERS), "--run", "job", "--yes", "--follow")
            settings = ("--preset", "digits", "--epochs", "2", "--env", "OMP_NUM_THREADS=1")
            name, _log = self.trainctl("submit", "ddp", *options, *settings).split(maxsplit=1)
            first_step_s = self._first_step("job") - began
        with steps.step("nothing of the job is left"):
            ended = time.monotonic()
            while self.engine.labelled("container", self.name):
                if time.monotonic() > ended + GONE_WITHIN_S:
                    raise RehearsalError(f"{name} has left containers {GONE_WITHIN_S} s after it")
                time.sleep(1)
        found = json.loads(self.trainctl("show", name, "--json"))
        if found["status"] != "succeeded" or found["result"]["status"] != "succeeded":
            raise RehearsalError(f"the job ended as {found}")
        return {
            "job": found["status"],
            "job_submit_to_first_step_s": round(first_step_s, 1),
            "job_gone_after_s": round(time.monotonic() - ended, 1),
            "job_node_seconds": found["node_seconds"],
        }

    def _nodes_of_ray(self) -> int:
        shown = self.trainctl("shell", "--", "ray", "status")
        active = shown.partition("Active:")[2].partition("Pending:")[0]
        counts = [line.split()[0] for line in active.splitlines() if line.strip()]
        return sum(int(count) for count in counts if count.isdecimal())

    def _check_record(self, result: dict[str, Any]) -> float:
        """Look at the run's folder in the bucket; return when the first step was done."""
        if result["status"] != "succeeded" or len({*result["hosts"]}) != WORKERS:
            raise RehearsalError(f"the run ended as {result}")
        account = account_at(self.state()["endpoint"])
        bucket = self.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
        prefix = f"{runs.RUNS_PREFIX}/rehearsal/"
        keys = [
            each["Key"].removeprefix(prefix)
            for each in account.items(
                "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix
            )
        ]
        wanted = (runs.METRICS_FILE, runs.RESULT_FILE, runs.REPORT_FILE)
        lacking = [name for name in wanted if name not in keys]
        if not any(key.startswith(f"{runs.CHECKPOINTS_DIR}/") for key in keys):
            lacking.append(runs.CHECKPOINTS_DIR)
        if lacking:
            raise RehearsalError(
                f"s3://{bucket}/{prefix} lacks {', '.join(lacking)}; it has {keys}"
            )
        return self._first_step("rehearsal")

    def _first_step(self, run: str) -> float:
        """Unix time at which a run's first step was done."""
        s3 = account_at(self.state()["endpoint"]).client("s3")
        bucket = self.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
        key = f"{runs.RUNS_PREFIX}/{run}/{runs.METRICS_FILE}"
        lines = s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode().splitlines()
        for event in map(json.loads, lines):
            if event["type"] == "step":
                return float(event["time"])
        raise RehearsalError(f"{key} has no step")

    def _train_locally(self) -> dict[str, Any]:
        place = self.folder / "runs"
        printed = commands.run(
            [
                *(sys.executable, "-m", "training.launch", *RECIPE, "--local"),
                *("--run", "local", "--storage", str(place), "--overwrite"),
            ],
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            folder=ROOT,
            log=self.log,
        )
        result: dict[str, Any] = json.loads(printed)
        return result

    def trainctl(self, *arguments: str) -> str:
        """The command line as a user gives it; return what it prints on stdout."""
        return commands.run(
            [sys.executable, "-m", "trainctl", *arguments],
            environment={**self._clean_environment(), **self.environment()},
            folder=ROOT,
            log=self.log,
            timeout_s=600,
        )

    def _clean_environment(self) -> dict[str, str]:
        own = {"DOCKER_HOST": self.engine.address, processes.NAME: self.name}
        return {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | own

    # --- down -----------------------------------------------------------------------------------
    def undeploy(self, steps: Steps) -> None:
        """Destroy the stacks; nothing may be left in the account.

        Raises:
            RehearsalError: something is.
        """
        with steps.step("cdk destroy"):
            self._cdk(self.environment())("destroy", "--all", "--force", again=True)
        left = difference(self.state()["before"], inventory(self.state()["endpoint"]))
        if left:
            raise RehearsalError(f"cdk destroy has left: {left}")

    def down(self, steps: Steps, *, keep_logs: bool = False, keep_images: bool = True) -> bool:
        """Take all of the rehearsal away; return whether there was anything.

        Args:
            keep_images: leave the images, in the engine and in the registry's folder, so that the
                next rehearsal need not build and push them.

        Raises:
            RehearsalError: something is still there.
        """
        with steps.step("remove processes, containers and the network"):
            for container in self.engine.labelled("container", self.name):
                self._keep_log(container)
            # The local AWS first: it would replace the containers that are removed.
            found = processes.end(self.name, timeout_s=10)
            found += self.engine.remove(self.name)
            self._forget_pulled_images()
            self._tidy(keep_logs=keep_logs, keep_images=keep_images)
            if keep_logs:
                steps.say(f"what every part has said is in {self.folder}")
        left = {
            "processes": processes.find(self.name),
            "containers": self.engine.labelled("container", self.name),
            "networks": self.engine.labelled("network", self.name),
        }
        if any(left.values()):
            raise RehearsalError(f"still there: {left}")
        return found > 0

    def _tidy(self, *, keep_logs: bool, keep_images: bool) -> None:
        """Empty this rehearsal's folder."""
        kept = {"registry"} if keep_images else set()
        kept |= {"log", "aws"} if keep_logs else set()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name in kept or (keep_logs and path.suffix == ".log"):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not keep_images:
            names = ("ecs-train-head", "ecs-train-worker", images.DEBIAN_IMAGE, images.WHEELS_IMAGE)
            for name in names:
                if found := self.engine("image", "ls", "--quiet", name).split():
                    self.engine("image", "rm", "--force", *found, check=False)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _forget_pulled_images(self) -> None:
        """Names by which images were pulled from a registry that is gone; the images stay."""
        store = self.state().get("registry")
        if not store:
            return
        shown = self.engine("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
        for node in (HEAD, WORKER):
            pulled = [
                name
                for name in shown
                # Of this rehearsal alone: another checkout may be pushing to a registry of its own.
                if name.startswith(f"{store}/corestack-{node}repository-")
            ]
            if pulled:
                self.engine("image", "rm", "--no-prune", *pulled, check=False)

    def _keep_log(self, container: str) -> None:
        if self.folder.is_dir():
            said = subprocess.run(
                [self.engine.client, "logs", container],
                env=self.engine.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            ).stdout
            (self.folder / f"container-{container[:12]}.log").write_bytes(said)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and Ctrl-C both raise KeyboardInterrupt, also where a shell ignores SIGINT."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Cleaning up goes on to its end, however often somebody presses Ctrl-C."""

    def refuse(_number: int, _frame: Any) -> None:
        print("\nalready taking everything down; a moment", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, refuse) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def up() -> None:
    """Bring everything up; after a failure or Ctrl-C, nothing of it is left."""
    rehearsal = Rehearsal.here()
    with interruptible():
        try:
            rehearsal.up(Steps(6))
        except BaseException:
            _take_away(rehearsal, keep_logs=True)
            raise


def rehearse() -> dict[str, Any]:
    """Up, run, down; return the figures. After a failure or Ctrl-C, nothing of it is left."""
    rehearsal = Rehearsal.here()
    began = time.monotonic()
    steps = Steps(15)
    with interruptible():
        try:
            # What an earlier one has left, should it have been killed.
            with uninterrupted():
                rehearsal.down(steps)
            rehearsal.up(steps)
            figures = rehearsal.run(steps)
            rehearsal.undeploy(steps)
        except BaseException:
            _take_away(rehearsal, keep_logs=True)
            raise
        _take_away(rehearsal)
    return {**figures, "seconds": round(time.monotonic() - began), "steps_s": steps.seconds}


def build_images() -> dict[str, str]:
    """Build the images and start nothing, so that the next rehearsal finds them; return the names
    in the engine by node."""
    rehearsal = Rehearsal.here()
    rehearsal.folder.mkdir(exist_ok=True)  # for the log
    with interruptible():
        check_space(rehearsal.engine)
        return images.build(
            rehearsal.engine,
            rehearsal._docker(),
            image_tag=images.tag(),
            say=lambda text: print(text, file=sys.stderr),
        )


def _take_away(rehearsal: Rehearsal, *, keep_logs: bool = False) -> None:
    print("", file=sys.stderr)
    with uninterrupted():
        rehearsal.down(Steps(1), keep_logs=keep_logs)
