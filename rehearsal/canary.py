"""``make canary``: the first deployment in an account, small, and gone within two hours.

Preset ``cpu`` is deployed under a name of its own. A recipe, a program on two nodes and a Ray
program run at once, and a host below the recipe is terminated; a deploy changes three settings; the
stacks are destroyed, and the account is compared with what was there before. ``rehearsal.answers``
writes what AWS answered meanwhile; nothing sends it. With ``--gpu``, one g5.xlarge runs NCCL and a
recipe instead, and what hosts and jobs report is printed beside the plan.

A state file is written before anything is made. After any kind of end, the next start cleans up and
does no more. Not for a deployment that people use: everything of this name is destroyed.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from contract import outputs as stack_outputs
from contract.runs import METRICS_FILE, RUNS_PREFIX
from rehearsal import children
from rehearsal.answers import Answers
from rehearsal.cdk import Cdk
from rehearsal.children import Steps, interruptible, uninterrupted
from rehearsal.cycle import SETTINGS, RehearsalError, read_state, write_state
from rehearsal.inventory import AccountClients, difference, inventory
from rehearsal.local_aws import ROOT
from rehearsal.rehearse import run_lines
from training.record.events import Resume, parse_metrics

NAME: Final = "canary"
CORE, TRAINING = stack_outputs.stacks(NAME)
MOST_S: Final = 7200
#: Between two looks at tasks and hosts.
EVERY_S: Final = 10
#: Three jobs at once: three heads, four workers, all m5.large. Container Insights makes a log group
#: that stays.
_ALIKE: Final = {**SETTINGS, "deployment": NAME, "container_insights": "false"}
DEPLOYED: Final = {**_ALIKE, "max_heads": "3", "max_workers": "4"}
CHANGED: Final = {
    **DEPLOYED,
    "max_workers": "5",
    "log_retention_days": "14",
    "max_jobs_per_user": "2",
}
RECIPE: Final = "canary-recipe"
#: Three times this, and 30 cents for NAT gateway, disks and logs: three dollars.
_LIMITS: Final = "--yes --max-hours 1.5 --max-cost 0.9"
_PROGRAM: Final = "trainctl submit --code examples/ddp --nodes"
_RAY: Final = "import ray; print(ray.get(ray.remote(lambda: ray.cluster_resources()).remote()))"
LINES: Final = {
    "trainctl doctor": "",
    f"trainctl submit ddp --run {RECIPE} --nodes 1 --preset digits --epochs 20": _LIMITS,
    f"{_PROGRAM} 2 --run canary-program -- torchrun train.py": _LIMITS,
    f"{_PROGRAM} 1 --run canary-ray --on head -- python -c '{_RAY}'": _LIMITS,
    f"trainctl wait {RECIPE}": "",
    "trainctl wait canary-program": "",
    "trainctl wait canary-ray": "",
}
#: What a GPU's host reports, and the recipe's figures, beside what was planned. Twice the limit,
#: and a dollar: five.
_OF_GPU: Final = "--yes --max-hours 1 --max-cost 2"
_NCCL: Final = "import torch; print(torch.version.cuda, torch.cuda.nccl.version())"
FIGURES: Final = {
    "trainctl plan ddp --nodes 1 --preset digits": "",
    f"{_PROGRAM} 1 --run canary-nccl -- python -c '{_NCCL}'": _OF_GPU,
    "trainctl wait canary-nccl": "",
    "trainctl logs canary-nccl": "",
    f"trainctl submit ddp --run {RECIPE} --nodes 1 --preset digits": _OF_GPU,
    f"trainctl wait {RECIPE}": "",
    f"trainctl show {RECIPE}": "",
    f"trainctl cost {RECIPE}": "",
}
QUESTION: Final = (
    "The canary deploys to account {}: {} hosts for short jobs, at most ${} and two hours, then "
    "removes all of it. Continue? [y/N] "
)
NO_IMAGES: Final = (
    "there is no Docker here to build the images: npx cdk deploy CoreStack "
    f"-c deployment={NAME}; where Docker is, TRAIN_DEPLOYMENT={NAME} make images; then make canary"
)
#: Kind of a thing, operation and key of its list, operation and key of its descriptions.
DESCRIBED: Final = (
    ("task", "list_tasks", "taskArns", "describe_tasks", "tasks"),
    (
        *("host", "list_container_instances", "containerInstanceArns"),
        *("describe_container_instances", "containerInstances"),
    ),
)


def push_images(canary: "Canary") -> None:
    """Build the images and push them; those that the registry has stay as they are."""
    command = [sys.executable, "-m", "containers.publish"]
    environment = canary.shell()
    children.run(command, environment=environment, folder=ROOT, log=canary.log, silent_s=MOST_S)


class Canary:
    """One canary; its folder holds its state, its log and what AWS answered."""

    def __init__(self, folder: Path = ROOT / ".canary", *, has_gpu: bool = False) -> None:
        self.folder, self.log, self.file = folder, folder / "log", folder / "answers.jsonl"
        self._state = folder / "state.json"
        self._account = AccountClients("")
        self._cdk = Cdk(folder, {"NODE_OPTIONS": "", **os.environ}, log=self.log, silent_s=MOST_S)
        self._struck = ""
        """The instance that was terminated."""
        self._has_gpu, self._deployed = has_gpu, DEPLOYED
        if has_gpu:
            self._deployed = {**_ALIKE, "preset": "ddp", "max_workers": "1"}

    def run(self, *, is_sure: bool) -> None:
        """Fly, or only clean up after an earlier one.

        Raises:
            RehearsalError: it did not show what it must show, or something is left.
        """
        account = self._account.client("sts").get_caller_identity()["Account"]
        steps = Steps(6 + len(LINES))
        if state := read_state(self._state):
            if state["account"] != account:
                raise RehearsalError(f"{self._state} is of account {state['account']}")
            steps.say("an earlier canary was interrupted: this only cleans up after it")
            self._clean(steps)
            return
        if self._stack(TRAINING):
            raise RehearsalError(f"{TRAINING} exists: another canary runs, or its state is lost")
        if not (shutil.which("docker") or self._stack(CORE)):
            raise RehearsalError(NO_IMAGES)
        answer = "y" if is_sure else ""
        if not is_sure:
            hosts = ("g5.xlarge", 5) if self._has_gpu else ("m5.large", 3)
            print(QUESTION.format(account, *hosts), end="", file=sys.stderr, flush=True)
            with suppress(EOFError):  # without a terminal
                answer = input()
        if answer not in ("y", "yes"):
            raise RehearsalError("nothing was started; --yes answers the question")
        self.folder.mkdir(exist_ok=True)
        steps.say(f"in detail: tail -f {self.log}")
        there = inventory(self._account.endpoint)
        write_state(self._state, {"account": account, "began": time.time(), "before": there})
        line = {"kind": NAME, "id": 0, "at": 0, "every": EVERY_S}
        self.file.write_text(json.dumps(line) + "\n")
        with interruptible():
            try:
                with self._watched():
                    self._fly(steps)
            finally:
                self._clean(steps)
        print(self.file.read_text(), end="")
        steps.say(f"This is {self.file}. Nothing was sent.")

    def shell(self) -> dict[str, str]:
        """Environment of commands, which find the canary's deployment."""
        return {**os.environ, "TRAIN_DEPLOYMENT": NAME, "PYTHONPATH": str(ROOT)}

    def running(self) -> Sequence[object]:
        """Tasks of the canary's cluster."""
        cluster = self._account.outputs(TRAINING)[stack_outputs.CLUSTER]
        return [*self._account.items("ecs", "list_tasks", "taskArns", cluster=cluster)]

    def _stack(self, name: str) -> str:
        """ID of a stack, by which it is known once deleted, too; "" if there is none."""
        with suppress(ClientError):
            client = self._account.client("cloudformation")
            return str(client.describe_stacks(StackName=name)["Stacks"][0]["StackId"])
        return ""

    def _fly(self, steps: Steps) -> None:
        with steps.step("deploy CoreStack and TrainingStack"):
            self._cdk.deploy(self._deployed)
        if shutil.which("docker"):
            with steps.step("push the images, unless the registry has them"):
                push_images(self)
        lines = {"trainctl doctor": "", **FIGURES} if self._has_gpu else LINES
        shown = run_lines(self, steps, lines, folder=ROOT, silent_s=MOST_S, gone_within_s=600)
        if self._has_gpu:
            print("\n".join(f"{line}\n{shown[line]}" for line in FIGURES))
            return
        with steps.step("check that the recipe resumed"):
            self._check_resumed()
        with steps.step("deploy three changed settings"):
            self._cdk.deploy(CHANGED)

    def _check_resumed(self) -> None:
        bucket = self._account.outputs(CORE)[stack_outputs.BUCKET]
        key = f"{RUNS_PREFIX}/{RECIPE}/{METRICS_FILE}"
        body = self._account.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        lines = parse_metrics(body).lines
        if not any(isinstance(each.event, Resume) for each in lines) or not self._struck:
            raise RehearsalError(f"{RECIPE} ended before its host, or did not resume")

    def _clean(self, steps: Steps) -> None:
        """Destroy the stacks. Ctrl-C does not interrupt it; the state stays until nothing is left.

        Raises:
            RehearsalError: something is left.
        """
        state = read_state(self._state)
        answers = Answers(self.file, began=state["began"])
        with uninterrupted():
            stacks = [each for each in map(self._stack, (CORE, TRAINING)) if each]
            with steps.step("destroy the stacks"):
                if stacks:
                    self._cdk.destroy(self._deployed)
            for stack in stacks:
                events = ("cloudformation", "describe_stack_events", "StackEvents")
                for event in self._account.items(*events, StackName=stack):
                    answers.take("event", event, at=event["Timestamp"].timestamp())
            with steps.step("check that nothing is left"):
                left = difference(state["before"], inventory(self._account.endpoint))
            if left:
                raise RehearsalError(
                    f"left by the canary, or made by others meanwhile: {left}. make canary tries "
                    f"again; if it is not the canary's, delete {self._state}"
                )
            self._state.unlink()

    # --- meanwhile
    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Take note of tasks and hosts, terminate one, and interrupt the rest after two hours: on
        the wall clock, which also runs while a laptop sleeps."""
        over, began = threading.Event(), read_state(self._state)["began"]
        answers = Answers(self.file, began=began)

        def watch() -> None:
            while not over.wait(EVERY_S):
                # Not deployed yet, or throttled: the next look tries again.
                with suppress(BotoCoreError, ClientError, KeyError):
                    self._look(answers)
                if time.time() - began > MOST_S:
                    print("two hours are over: the canary ends here", file=sys.stderr)
                    os.kill(os.getpid(), signal.SIGINT)
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, answers: Answers) -> None:
        outputs, items = self._account.outputs(TRAINING), self._account.items
        ecs, cluster = self._account.client("ecs"), outputs[stack_outputs.CLUSTER]
        found: dict[str, list[Any]] = {}
        for kind, listing, key, describe, name in DESCRIBED:
            arns = [*items("ecs", listing, key, cluster=cluster)]
            if kind == "task":
                arns += items("ecs", listing, key, cluster=cluster, desiredStatus="STOPPED")
            asked = {"cluster": cluster, name: arns}
            found[kind] = getattr(ecs, describe)(**asked)[name] if arns else []
        found["machine"] = [
            machine
            for each in items("ec2", "describe_instances", "Reservations")
            for machine in each["Instances"]
            if any(tag["Value"].startswith(TRAINING) for tag in machine.get("Tags", ()))
        ]
        jobs = {"stateMachineArn": outputs[stack_outputs.JOBS]}
        found["execution"] = [*items("stepfunctions", "list_executions", "executions", **jobs)]
        for kind, records in found.items():
            for record in records:
                answers.take(kind, record, at=time.time())
        if not (self._struck or self._has_gpu):
            self._strike(found)

    def _strike(self, found: dict[str, list[Any]]) -> None:
        """Terminate the host of the recipe once there is a checkpoint."""
        hosts = {each["containerInstanceArn"]: each["ec2InstanceId"] for each in found["host"]}
        bucket = self._account.outputs(CORE)[stack_outputs.BUCKET]
        place = {"Bucket": bucket, "Prefix": f"{RUNS_PREFIX}/{RECIPE}/checkpoints/"}
        saved = self._account.items("s3", "list_objects_v2", "Contents", **place)
        # The last file of a checkpoint: without it there is nothing to resume from.
        is_saved = any(each["Key"].endswith("/manifest.json") for each in saved)
        for task in found["task"]:
            host = hosts.get(task.get("containerInstanceArn"))
            if is_saved and host and task.get("startedBy", "").startswith(RECIPE):
                self._struck = host
                self._account.client("ec2").terminate_instances(InstanceIds=[host])
