"""One deployment: the two stacks in an account and region, and what they contain.

It is found by the outputs of its stacks, so the command line needs no settings of its own; at a
local AWS it finds a local deployment the same way.
"""

import os
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

from contract import nodes
from contract import outputs as stack_outputs
from trainctl.aws.account import Account
from trainctl.aws.clients import Clients
from trainctl.aws.cluster import StandingCluster
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.files import Bucket, EmptyBucket
from trainctl.aws.jobs import Jobs
from trainctl.aws.logs import NodeLogs
from trainctl.aws.sessions import Sessions
from trainctl.aws.shape import Shape

if TYPE_CHECKING:
    from boto3 import Session

#: Stacks, in the order in which they are deployed.
_IN_ORDER: Final = (stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK)
#: No account of AWS has this number; the rehearsal's local AWS has.
LOCAL_ACCOUNT: Final = "000000000000"
#: Console domains of regions with a separate console, by the beginning of their names.
_CONSOLES: Final = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}


class NotDeployedError(CliError):
    """A stack is not there; ``missing``: it, and those that need it."""

    def __init__(self, message: str, missing: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class NotReadyError(CliError):
    """A stack is being changed, or a change of it has failed."""

    def __init__(self, message: str, *, is_changing: bool) -> None:
        super().__init__(message)
        self.is_changing = is_changing
        self.missing: tuple[str, ...] = ()
        """Stacks of which nothing is left, and which the next deploy makes anew."""


def open_session(*, profile: str | None, region: str | None) -> "Session":
    """A session of boto3 with a profile and region, as the AWS CLI takes them.

    Raises:
        UsageError: no region is set.
        botocore's errors, which ``trainctl.aws.errors`` explains.
    """
    import boto3

    # boto3 reads only AWS_DEFAULT_REGION; the AWS CLI and the CDK read this one first.
    region = region or os.environ.get("AWS_REGION")
    session = boto3.Session(profile_name=profile, region_name=region)
    if not session.region_name:
        raise UsageError("no region is set: give --region, or set AWS_REGION")
    return session


class Deployment:
    """The two stacks in one account and region. Each part looks up its names when first used."""

    def __init__(self, session: "Session", *, profile: str | None = None) -> None:
        self._clients, self._profile = Clients(session), profile
        self.region: str = session.region_name
        # Before anything else: it tells bad credentials from stacks that are not there.
        caller = self._clients.sts.get_caller_identity()
        self.account_id: str = caller["Account"]
        self.user: str = caller["Arn"].rpartition("/")[2].rpartition(":")[2]
        """Name of the user or role session whose credentials these are."""
        self._not_ready: list[NotReadyError] = []
        self._gone: list[str] = []
        self._core = self._outputs(stack_outputs.CORE_STACK)
        self._training = self._outputs(stack_outputs.TRAINING_STACK)

    @classmethod
    def find(cls, *, profile: str | None, region: str | None, to_start: bool = False) -> Self:
        """The deployment of a profile and region, as the AWS CLI takes them.

        Args:
            profile: of the AWS configuration.
            region: of the deployment.
            to_start: fail unless jobs and nodes can be started. What is there can be looked at,
                and stopped, while the stacks are changed and after that has failed.

        Raises:
            CliError: the stacks are not there, are being made, or are not ready.
            botocore's errors, which ``trainctl.aws.errors`` explains.
        """
        found = cls(open_session(profile=profile, region=region), profile=profile)
        if to_start:
            found.check_ready()
        return found

    def check_ready(self) -> None:
        """
        Raises:
            NotReadyError: a stack is being changed, or a change of it has failed.
        """
        if self._not_ready:
            error = self._not_ready[0]
            error.missing = tuple(self._gone)
            raise error

    def _outputs(self, stack: str) -> dict[str, str]:
        from botocore.exceptions import ClientError

        try:
            (found,) = self._clients.cloudformation.describe_stacks(StackName=stack)["Stacks"]
        except ClientError as error:
            if "does not exist" not in str(error):
                raise
            missing = (*self._gone, *_IN_ORDER[_IN_ORDER.index(stack) :])
            if changing := [each for each in self._not_ready if each.is_changing]:
                # A deploy has come to the first stack, or a destroy: the other one is to wait for.
                changing[0].missing = missing
                raise changing[0] from None
            raise NotDeployedError(
                f"{stack} is not deployed in account {self.account_id}, region {self.region}: "
                "deploy it (make deploy), or name another --profile or --region",
                missing,
            ) from None
        status = found["StackStatus"]
        if status.endswith("IN_PROGRESS") and "CLEANUP" not in status:
            said = f"{stack} is being changed ({status}): wait until that has ended"
            self._not_ready.append(NotReadyError(said, is_changing=True))
        elif status.endswith("FAILED") or status == "ROLLBACK_COMPLETE":
            if status == "ROLLBACK_COMPLETE":  # its creation failed
                self._gone.append(stack)
            said = (
                f"{stack} is not usable ({status}): look at its events (aws cloudformation "
                f"describe-stack-events --stack-name {stack}), then make deploy"
            )
            self._not_ready.append(NotReadyError(said, is_changing=False))
        return {each["OutputKey"]: each["OutputValue"] for each in found.get("Outputs", [])}

    def output(self, name: str) -> str:
        """An output of either stack. Raises CliError: another version deployed them."""
        found = self._training.get(name) or self._core.get(name)
        if found is None:
            self.check_ready()
            raise CliError(
                f"the deployed stacks have no output {name}: another version of this project has "
                "deployed them; make deploy brings them up to date"
            )
        return found

    @property
    def is_local(self) -> bool:
        """True if this is a rehearsal on this machine."""
        return self.account_id == LOCAL_ACCOUNT

    @cached_property
    def shape(self) -> Shape:
        try:
            return Shape.from_json(self.output(stack_outputs.SHAPE))
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CliError(
                f"the output {stack_outputs.SHAPE} is not understood ({error}): another version of "
                "this project has deployed the stacks; make deploy brings them up to date"
            ) from None

    # --- its parts ------------------------------------------------------------------------------
    @cached_property
    def cluster(self) -> StandingCluster:
        services = {
            nodes.HEAD: self.output(stack_outputs.HEAD_SERVICE),
            nodes.WORKER: self.output(stack_outputs.WORKER_SERVICE),
        }
        cluster = self.output(stack_outputs.CLUSTER)
        return StandingCluster(
            self._clients,
            cluster=cluster,
            services=services,
            keeper=self.output(stack_outputs.KEEPER),
        )

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(
            self._clients,
            machine=self.output(stack_outputs.JOBS),
            cluster=self.output(stack_outputs.CLUSTER),
            task_events=self.output(stack_outputs.TASK_EVENTS),
        )

    @cached_property
    def logs(self) -> NodeLogs:
        return NodeLogs(self._clients, group=self.output(stack_outputs.LOG_GROUP))

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(self._clients, name=self.output(stack_outputs.BUCKET))

    @cached_property
    def sessions(self) -> Sessions:
        cluster = self.output(stack_outputs.CLUSTER)
        return Sessions(self._clients, cluster=cluster, region=self.region, profile=self._profile)

    @cached_property
    def ray_token(self) -> str:
        """Token that Ray's dashboard asks for."""
        secret = self.output(stack_outputs.RAY_TOKEN)
        return self._clients.secrets.get_secret_value(SecretId=secret)["SecretString"]

    @property
    def console(self) -> str:
        """Address of the console page with the deployment's CloudWatch dashboard."""
        domain = next(
            (domain for prefix, domain in _CONSOLES.items() if self.region.startswith(prefix)),
            f"{self.region}.console.aws.amazon.com",
        )
        name = self.output(stack_outputs.DASHBOARD)
        return f"https://{domain}/cloudwatch/home?region={self.region}#dashboards/dashboard/{name}"

    @cached_property
    def account(self) -> Account:
        return Account(self._clients)


class Undeployed(Deployment):
    """A deployment that has not been made, for the price of a job on it: needs no account."""

    def __init__(self, shape: Shape, *, region: str) -> None:
        self.shape, self.region, self.user = shape, region, ""
        self.bucket = EmptyBucket()
