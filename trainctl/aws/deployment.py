"""One deployment: the two stacks in an account and region, and what they contain.

It is found by the outputs of its stacks, so the command line needs no settings of its own; at a
local AWS it finds a local deployment the same way.
"""

import json
import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

from contract import nodes
from contract import outputs as stack_outputs
from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from trainctl.aws.account import Account
from trainctl.aws.clients import Clients, unless
from trainctl.aws.deployment_bucket import DeploymentBucket, EmptyBucket
from trainctl.aws.errors import CliError
from trainctl.aws.jobs import Jobs
from trainctl.aws.logs import NodeLogs
from trainctl.aws.sessions import Sessions
from trainctl.aws.standing_cluster import StandingCluster

if TYPE_CHECKING:
    from boto3 import Session

#: State of a stack whose creation has failed, and of which nothing is left.
_NOT_CREATED: Final = "ROLLBACK_COMPLETE"
#: No account of AWS has this number; the rehearsal's local AWS has.
LOCAL_ACCOUNT: Final = "000000000000"
#: Console domains of regions with a separate console, by the beginning of their names.
_CONSOLES: Final = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}


class StacksError(CliError):
    """The stacks are not there, are being changed, or a change of them has failed."""

    def __init__(self, message: str, *, state: str, missing: tuple[str, ...]) -> None:
        """
        Args:
            state: ``missing``, ``changing`` or ``failed``.
            missing: stacks that are not there, or of which nothing is left: the next deploy makes
                them anew.
        """
        super().__init__(message)
        self.state, self.missing = state, missing


def open_session(*, profile: str | None, region: str | None) -> "Session":
    """A session of boto3 with a profile and region, as the AWS CLI takes them.

    Raises:
        botocore's errors, which ``trainctl.aws.errors`` explains.
    """
    import boto3
    from botocore.config import Config
    from botocore.configprovider import ConstantProvider
    from botocore.exceptions import NoCredentialsError, NoRegionError
    from botocore.session import get_session

    own = get_session()
    # A laptop without an account or a network reports that within two seconds. This counts for the
    # request that comes first (Clients.caller), and for those that fetch or renew credentials.
    once = Config(connect_timeout=1.2, read_timeout=10, retries={"total_max_attempts": 1})
    own.set_default_client_config(once)
    if "AWS_METADATA_SERVICE_TIMEOUT" not in os.environ:
        # Outside EC2 nothing may answer at the address of its credentials, which is asked twice.
        store = own.get_component("config_store")
        store.set_config_provider("metadata_service_timeout", ConstantProvider(0.5))
    # boto3 reads only AWS_DEFAULT_REGION; the AWS CLI and the CDK read this one first.
    region = region or os.environ.get("AWS_REGION")
    session = boto3.Session(profile_name=profile, region_name=region, botocore_session=own)
    if not session.region_name:
        raise NoRegionError if session.get_credentials() else NoCredentialsError
    return session


class Deployment:
    """The two stacks in one account and region. Each part looks up its names when first used."""

    is_here = False
    """True if this machine is in its place, which has runs and nothing else."""

    def __init__(
        self, session: "Session", *, profile: str | None = None, name: str | None = None
    ) -> None:
        self._clients, self._profile = Clients(session), profile
        self._stacks = stack_outputs.stacks(name or "")  # in the order of a deploy
        self.region: str = session.region_name
        # Before anything else: it tells bad credentials from stacks that are not there.
        caller = self._clients.caller
        self.account_id: str = caller["Account"]
        # Tags, which have both, take no commas.
        self.user_id: str = caller["UserId"].replace(",", "_")
        """``aws:userid`` of these credentials in a policy."""
        self.user: str = caller["Arn"].replace(",", "_").rpartition("/")[2].rpartition(":")[2]
        """Name of the user or role session whose credentials these are."""
        stacks = {stack: self._stack(stack) for stack in self._stacks}
        self.is_there = all(stacks.values())
        self._error = self._error_of(
            {name: found.get("StackStatus", "") for name, found in stacks.items()}
        )
        self.outputs: dict[str, str] = {
            each["OutputKey"]: each["OutputValue"]
            for found in stacks.values()
            for each in found.get("Outputs", [])
        }

    @classmethod
    def find(
        cls,
        *,
        profile: str | None,
        region: str | None,
        name: str | None = None,
        to_start: bool = False,
    ) -> Self:
        """The deployment of a profile and region, as the AWS CLI takes them.

        Args:
            profile: of the AWS configuration.
            region: of the deployment.
            name: of the deployment, where there are several.
            to_start: fail unless jobs and nodes can be started. What is there can be looked at,
                and stopped, while the stacks are changed and after that has failed.

        Raises:
            CliError: the stacks are not there, are being made, or are not ready.
            botocore's errors, which ``trainctl.aws.errors`` explains.
        """
        found = cls(open_session(profile=profile, region=region), profile=profile, name=name)
        if to_start or not found.is_there:
            found.check_ready()
        return found

    def check_ready(self) -> None:
        """
        Raises:
            StacksError: a stack is being changed, or a change of it has failed.
        """
        if self._error:
            raise self._error

    def _stack(self, name: str) -> Mapping[str, Any]:
        """A stack, as CloudFormation describes it; empty where there is none."""
        with unless("ValidationError"):  # it does not exist: the name itself is valid
            (found,) = self._clients.cloudformation.describe_stacks(StackName=name)["Stacks"]
            return found
        return {}

    def _error_of(self, states: Mapping[str, str]) -> StacksError | None:
        """The reason why nothing can be started, by the state of each stack; "": it is not there.

        A change comes first: a deploy may not have come to the other stack yet.
        """
        missing = tuple(name for name in states if states[name] in ("", _NOT_CREATED))
        for name, state in states.items():
            if state.endswith("IN_PROGRESS") and "CLEANUP" not in state:
                said = f"{name} is being changed ({state}): wait until that has ended"
                return StacksError(said, state="changing", missing=missing)
        for name, state in states.items():
            if not state:
                said = (
                    f"{name} is not deployed in account {self.account_id}, region {self.region}: "
                    "deploy it (make deploy), or name another --profile, --region or --deployment"
                )
                return StacksError(said, state="missing", missing=missing)
            if state.endswith("FAILED") or state == _NOT_CREATED:
                said = (
                    f"{name} is not usable ({state}): look at its events (aws cloudformation "
                    f"describe-stack-events --stack-name {name}), then make deploy"
                )
                return StacksError(said, state="failed", missing=missing)
        return None

    def output(self, name: str) -> str:
        """An output of either stack. Raises CliError: another version deployed them."""
        found = self.outputs.get(name)
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
    def shape(self) -> ClusterShape:
        try:
            return ClusterShape.from_json(self.output(stack_outputs.SHAPE))
        except InputError as error:
            raise CliError(
                f"another version of this project has deployed the stacks ({error}): make deploy "
                "brings them up to date"
            ) from None

    # --- its parts ------------------------------------------------------------------------------
    @cached_property
    def cluster(self) -> StandingCluster:
        return StandingCluster(
            self._clients,
            stack=self._stacks[1],
            cluster=self.output(stack_outputs.CLUSTER),
            services={
                nodes.HEAD: self.output(stack_outputs.HEAD_SERVICE),
                nodes.WORKER: self.output(stack_outputs.WORKER_SERVICE),
            },
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
    def bucket(self) -> DeploymentBucket:
        return DeploymentBucket(f"s3://{self.output(stack_outputs.BUCKET)}", self._clients.s3)

    @cached_property
    def sessions(self) -> Sessions:
        cluster = self.output(stack_outputs.CLUSTER)
        return Sessions(self._clients, cluster=cluster, region=self.region, profile=self._profile)

    @cached_property
    def ray_token(self) -> str:
        """Token that Ray's dashboard asks for."""
        secret = self.output(stack_outputs.RAY_TOKEN)
        return self._clients.secrets.get_secret_value(SecretId=secret)["SecretString"]

    def subscribe(self, address: str) -> bool:
        """Have reports for a mail address sent to it; False: it has not confirmed that yet."""
        found = self._clients.sns.subscribe(
            TopicArn=self.output(stack_outputs.NOTICES),
            Protocol="email",
            Endpoint=address,
            # The same again changes nothing, and sends the mail with the link again.
            Attributes={"FilterPolicy": json.dumps({"to": [address]})},
        )
        return str(found["SubscriptionArn"]).startswith("arn:")

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

    def __init__(self, shape: ClusterShape, *, region: str) -> None:
        self.shape, self.region, self.user, self.user_id = shape, region, "", ""
        self.bucket = EmptyBucket()
