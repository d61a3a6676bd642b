"""Clients of boto3, one per service, created on first use: a command pays only for its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from contract import faults

if TYPE_CHECKING:
    from boto3 import Session
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_cloudformation import CloudFormationClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ecr import ECRClient
    from mypy_boto3_ecs import ECSClient
    from mypy_boto3_iam import IAMClient
    from mypy_boto3_lambda import LambdaClient
    from mypy_boto3_logs import CloudWatchLogsClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_secretsmanager import SecretsManagerClient
    from mypy_boto3_service_quotas import ServiceQuotasClient
    from mypy_boto3_ssm import SSMClient
    from mypy_boto3_stepfunctions import SFNClient
    from mypy_boto3_sts import STSClient
    from mypy_boto3_sts.type_defs import GetCallerIdentityResponseTypeDef

#: Services that boto3 calls by another name.
_SERVICES: Final = {
    "functions": "lambda",
    "secrets": "secretsmanager",
    "service_quotas": "service-quotas",
}


class Clients:
    """Typed clients of one session, all with the same retries and timeouts."""

    autoscaling: "AutoScalingClient"
    cloudformation: "CloudFormationClient"
    ec2: "EC2Client"
    ecr: "ECRClient"
    ecs: "ECSClient"
    iam: "IAMClient"
    functions: "LambdaClient"
    logs: "CloudWatchLogsClient"
    s3: "S3Client"
    secrets: "SecretsManagerClient"
    service_quotas: "ServiceQuotasClient"
    sns: Any
    ssm: "SSMClient"
    stepfunctions: "SFNClient"
    sts: "STSClient"

    def __init__(self, session: "Session") -> None:
        from botocore.config import Config

        self._session = session
        # botocore repeats the same body, so a repeated start with a client token starts nothing
        # twice.
        self._config = Config(
            retries={"mode": "standard", "total_max_attempts": 6},
            connect_timeout=10,
            read_timeout=30,
        )

    @cached_property
    def caller(self) -> "GetCallerIdentityResponseTypeDef":
        """Account and user of the credentials, asked for once and at once (``open_session``)."""
        from botocore.exceptions import ClientError, HTTPClientError

        try:
            return self._session.client("sts").get_caller_identity()
        except (ClientError, HTTPClientError):
            # AWS, or a proxy, is reached; it may be busy, or slow at TLS.
            return self.sts.get_caller_identity()

    def __getattr__(self, name: str) -> Any:
        """Make the client of a service when it is first used."""
        if name not in Clients.__annotations__:
            raise AttributeError(name)
        session: Any = self._session  # its types know services by literal names only
        client = session.client(_SERVICES.get(name, name), config=self._config)
        setattr(self, name, client)
        return client


@contextmanager
def unless(*codes: str) -> Iterator[None]:
    """Leave the block where AWS answers with one of these errors: the thing is not there."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if faults.code_of(error) not in codes:
            raise
