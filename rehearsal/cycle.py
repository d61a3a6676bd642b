"""Up and down of the whole system on one machine.

The unchanged CDK app on a local AWS, the images of production as real containers, the command line
that people use. ``trainctl local`` is this module; ``rehearsal.rehearse`` runs jobs in between.

Everything that the rehearsal makes carries its name: containers and the network by a label,
processes by their environment. Taking it away looks for the name, so it works after any kind of
end.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypedDict

from containers import publish
from contract import outputs as stack_outputs
from contract.errors import ReportedError
from contract.images import content_tag
from contract.nodes import HEAD, WORKER
from rehearsal import cdk, children, image_builds, local_aws
from rehearsal.cdk import Cdk
from rehearsal.children import Steps, interruptible, uninterrupted
from rehearsal.engine import RUN_GB, Engine, check_space, find_engine
from rehearsal.inventory import Inventory, account_at, difference, inventory
from rehearsal.local_aws import ROOT, LocalAws, is_healthy

#: With the two that ``trainctl local`` and the benchmarks need beside a rehearsal.
__all__ = (
    "SETTINGS",
    "Rehearsal",
    "RehearsalError",
    "Steps",
    "bring_up",
    "build_images",
    "take_away",
    "uninterrupted",
    "up",
)

#: Every deploy of the rehearsal: no GPU, and a bucket that goes with it.
SETTINGS: Final = {"preset": "cpu", "retain_bucket": "false"}


class State(TypedDict, total=False):
    """State that ``up`` saves for later commands."""

    endpoint: str
    """Where the local AWS answers."""
    registry: str
    """``host:port`` in place of ECR; "": the images are in the engine itself."""
    image_tag: str
    """Tag of the running images, written once all of it is up."""
    before: Inventory
    """Resources in the account before the stacks were deployed."""
    digests: dict[str, str]
    """Repository -> digest of the image that was pushed there."""


class RehearsalError(ReportedError):
    """The rehearsal did not show what it must show; the message says what it showed."""


def check_installed() -> None:
    """Look for all that ``make local`` installs.

    Raises:
        RehearsalError: something is missing; the message has the one command that installs it.
    """
    library = ".venv/lib/python*/site-packages/aws_cdk"
    found = {
        f"the local AWS ({local_aws.PYTHON})": local_aws.PYTHON.exists(),
        f"the CDK command line ({cdk.COMMAND})": cdk.COMMAND.exists(),
        "the CDK library (aws_cdk)": any(ROOT.glob(library)),
    }
    if missing := [what for what, is_there in found.items() if not is_there]:
        raise RehearsalError(
            f"not installed in {ROOT}: {', '.join(missing)}. Run `make local` there: it installs "
            "what is missing and brings up the local deployment"
        )


def read_state(file: Path) -> Any:
    """State that ``write_state`` has saved; empty if there is none."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def write_state(file: Path, values: Mapping[str, object]) -> None:
    """Add to a saved state; a kill leaves the old one or the new one."""
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps({**read_state(file), **values}, indent=1))
    temporary.replace(file)


class Rehearsal:
    """One checkout's rehearsal; another checkout has another name and does not see it."""

    def __init__(self, engine: Engine, *, folder: Path | None = None) -> None:
        """``folder``: of a second rehearsal of this checkout; None: the first one's."""
        self.engine = engine
        self.folder = folder or ROOT / ".rehearsal"
        self.name = f"ecs-train-{hashlib.sha256(str(folder or ROOT).encode()).hexdigest()[:8]}"
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
    def state(self) -> State:
        """State saved by the last ``up``; empty if nothing is up."""
        found: State = read_state(self._state_file)
        return found

    def _remember(self, values: State) -> None:
        self.folder.mkdir(exist_ok=True)
        write_state(self._state_file, values)

    def environment(self) -> dict[str, str]:
        """Variables that send AWS clients of this machine to the local AWS.

        Raises:
            RehearsalError: nothing is up.
        """
        endpoint = self.state().get("endpoint")
        if not endpoint:
            raise RehearsalError("no local deployment is up: trainctl local up")
        return LocalAws(endpoint=endpoint, log=self.folder / "aws" / "log", pid=0).environment()

    def is_up(self) -> bool:
        """True if ``up`` has completed and the local AWS answers."""
        state = self.state()
        return bool(state.get("image_tag")) and is_healthy(state["endpoint"])

    def status(self) -> dict[str, str | bool | int]:
        """Summary of the running parts, for people and for ``--json``."""
        state = self.state()
        endpoint = state.get("endpoint", "")
        return {
            "name": self.name,
            "aws": endpoint,
            "aws_answers": bool(endpoint) and is_healthy(endpoint),
            "registry": state.get("registry", ""),
            "image_tag": state.get("image_tag", ""),
            **{kind: len(found) for kind, found in self._there().items()},
        }

    def _there(self) -> dict[str, Sequence[object]]:
        """Processes, containers and networks of the rehearsal on this machine, by kind."""
        return {
            "processes": children.find(self.name),
            "containers": self.engine.labelled("container", self.name),
            "networks": self.engine.labelled("network", self.name),
        }

    # --- up -----------------------------------------------------------------------------------
    def up(self, steps: Steps, *, settings: Mapping[str, str] = SETTINGS) -> None:
        """Bring up the local AWS, the images and the stacks; what an interrupted call has brought
        up is kept."""
        # Processes started from here are found by it, should this one be killed.
        os.environ[children.NAME] = self.name
        self.folder.mkdir(exist_ok=True)
        steps.say(f"in detail: tail -f {self.log}")
        with steps.step("check the Docker Engine and what must be installed"):
            check_installed()
            check_space(self.engine, needed_gb=RUN_GB, what="the containers need")
        if (endpoint := self.state().get("endpoint")) and is_healthy(endpoint):
            with steps.step("continue with the local AWS that is up"):
                environment = self.environment()
        else:
            # A state of the local AWS that an interrupted start has left would be loaded again.
            if any(self._there().values()) or self._state_file.exists():
                with uninterrupted():
                    self.down(Steps(1))
                self.folder.mkdir(exist_ok=True)
            environment = self.start(steps).environment()
        tag = content_tag(ROOT)
        docker = self.docker()
        with steps.step("build the images of head and worker"):
            built = image_builds.build(self.engine, docker, image_tag=tag, say=steps.say)
        with steps.step("deploy CoreStack and TrainingStack"):
            self.deploy(environment, image_tag=tag, settings=settings)
        with steps.step("push the images"):
            for node, image in built.items():
                self._push(docker, image, self._repository(node), tag)
        self._remember({"image_tag": tag})

    def start(self, steps: Steps) -> LocalAws:
        """Start the local AWS on a network of its own, and the image registry."""
        with steps.step("start the local AWS and the image registry"):
            gateway = self.engine.make_network(self.name)
            store = ""
            if image_builds.registry_program():
                store = image_builds.start_registry(self.folder / "registry", name=self.name)
            else:
                steps.say("no docker-registry here: the nodes take the images from the engine")
            aws = local_aws.start_detached(
                self.folder / "aws",
                host=gateway,
                # MiniStack removes what an earlier one with the same port has left in the engine:
                # with a fixed port, the containers of another checkout.
                port=0,
                containers=local_aws.Containers(
                    name=self.name,
                    engine=self.engine.address,
                    network=self.name,
                    registry=store,
                ),
            )
            self._remember({"endpoint": aws.endpoint, "registry": store})
        return aws

    def deploy(
        self, environment: Mapping[str, str], *, image_tag: str, settings: Mapping[str, str]
    ) -> None:
        """``cdk bootstrap`` and ``cdk deploy`` of both stacks."""
        command_line = self._cdk(environment)
        # What stays in an account counts as there before.
        command_line.bootstrap()
        if "before" not in self.state():
            self._remember({"before": inventory(environment["AWS_ENDPOINT_URL"])})
        command_line.deploy({**settings, "image_tag": image_tag})

    def _cdk(self, environment: Mapping[str, str]) -> Cdk:
        mark = {children.NAME: self.name}
        return Cdk(self.folder, {**environment, **mark}, log=self.log)

    def docker(self) -> image_builds.QuietDocker:
        """For the functions of ``containers.publish``."""
        return image_builds.QuietDocker(
            client=self.engine.client,
            environment=self.engine.environment(),
            name=self.name,
            log=self.log,
        )

    def _repository(self, node: str) -> str:
        """URI of a node's image repository, as the stacks name it."""
        return self.outputs(stack_outputs.CORE_STACK)[stack_outputs.REPOSITORIES[node]]

    def outputs(self, stack: str) -> dict[str, str]:
        """Outputs of a deployed stack."""
        return account_at(self.state()["endpoint"]).outputs(stack)

    def bucket(self) -> str:
        """Name of the deployment's bucket."""
        return self.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]

    def _push(self, docker: publish.Docker, image: str, repository: str, tag: str) -> None:
        """Push as the pipeline does; without a registry, the engine itself is the place."""
        store, path = self.state()["registry"], repository.partition("/")[2]
        name = f"{store}/{path}:{tag}" if store else f"{path}:{tag}"
        self.engine("tag", image, name)
        # ECR's own list, which trainctl asks; it takes any manifest here.
        account_at(self.state()["endpoint"]).client("ecr").put_image(
            repositoryName=path, imageTag=tag, imageManifest="{}"
        )
        if store:
            digest = publish.push(docker, name)
            # Only the registry has it under this name now: what a node runs was pulled from there.
            self.engine("image", "rm", "--no-prune", name)
            self._remember({"digests": self.state().get("digests", {}) | {path: digest}})

    def shell(self) -> dict[str, str]:
        """Environment of a shell whose AWS and Docker Engine are those of the rehearsal."""
        own = {
            "DOCKER_HOST": self.engine.address,
            children.NAME: self.name,
            "PYTHONPATH": str(ROOT),  # trainctl, in any working directory
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        return kept | self.environment() | own

    def running(self) -> Sequence[object]:
        """Containers of tasks."""
        return self.engine.labelled("container", self.name)

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
            found = children.end(self.name, timeout_s=10)
            found += self.engine.remove(self.name)
            self._forget_pulled_images()
            self._tidy(keep_logs=keep_logs, keep_images=keep_images)
            if keep_logs:
                steps.say(f"what every part has said is in {self.folder}")
        left = self._there()
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
            names = (
                "ecs-train-head",
                "ecs-train-worker",
                image_builds.DEBIAN_IMAGE,
                image_builds.WHEELS_IMAGE,
            )
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
                # Of this rehearsal only: another checkout may be pushing to a registry of its own.
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


def up() -> None:
    """Bring everything up, or continue an earlier call.

    Raises:
        RehearsalError: a local deployment is up already, which stays as it is.
    """
    rehearsal = Rehearsal.here()
    if rehearsal.is_up():
        raise RehearsalError(
            "a local deployment is up already: trainctl local status shows it, trainctl local "
            "down removes it"
        )
    with interruptible():
        bring_up(rehearsal, Steps(5))


def bring_up(rehearsal: Rehearsal, steps: Steps) -> None:
    """Bring it up; after a failure or Ctrl-C what is up stays."""
    try:
        rehearsal.up(steps)
    except BaseException:
        kept = "what is up stays: the same command continues, trainctl local down removes it"
        print(f"\n{kept}", file=sys.stderr)
        raise


def build_images() -> dict[str, str]:
    """Build the images and start nothing, so that the next rehearsal finds them; return the names
    in the engine by node."""
    rehearsal = Rehearsal.here()
    rehearsal.folder.mkdir(exist_ok=True)  # for the log
    steps = Steps(1)
    steps.say(f"in detail: tail -f {rehearsal.log}")
    with interruptible(), steps.step("build the images of head and worker"):
        return image_builds.build(
            rehearsal.engine,
            rehearsal.docker(),
            image_tag=content_tag(ROOT),
            say=steps.say,
        )


def take_away(rehearsal: Rehearsal, *, keep_logs: bool = False) -> None:
    """Take all of it away; Ctrl-C does not interrupt that."""
    print("", file=sys.stderr)
    with uninterrupted():
        rehearsal.down(Steps(1), keep_logs=keep_logs)
