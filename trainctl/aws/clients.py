"""Clients of boto3, one per service, created on first use: a command pays only for its own."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boto3 import Session
    from botocore.exceptions import ClientError
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


class Clients:
    """Typed clients of one session, all with the same retries and timeouts."""

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
    def cloudformation(self) -> "CloudFormationClient":
        return self._session.client("cloudformation", config=self._config)

    @cached_property
    def ec2(self) -> "EC2Client":
        return self._session.client("ec2", config=self._config)

    @cached_property
    def fsx(self) -> Any:  # its types are not among the development requirements
        return self._session.client("fsx", config=self._config)

    @cached_property
    def ecr(self) -> "ECRClient":
        return self._session.client("ecr", config=self._config)

    @cached_property
    def ecs(self) -> "ECSClient":
        return self._session.client("ecs", config=self._config)

    @cached_property
    def iam(self) -> "IAMClient":
        return self._session.client("iam", config=self._config)

    @cached_property
    def functions(self) -> "LambdaClient":
        return self._session.client("lambda", config=self._config)

    @cached_property
    def logs(self) -> "CloudWatchLogsClient":
        return self._session.client("logs", config=self._config)

    @cached_property
    def s3(self) -> "S3Client":
        return self._session.client("s3", config=self._config)

    @cached_property
    def secrets(self) -> "SecretsManagerClient":
        return self._session.client("secretsmanager", config=self._config)

    @cached_property
    def service_quotas(self) -> "ServiceQuotasClient":
        return self._session.client("service-quotas", config=self._config)

    @cached_property
    def ssm(self) -> "SSMClient":
        return self._session.client("ssm", config=self._config)

    @cached_property
    def stepfunctions(self) -> "SFNClient":
        return self._session.client("stepfunctions", config=self._config)

    @cached_property
    def sts(self) -> "STSClient":
        return self._session.client("sts", config=self._config)


def code_of(error: "ClientError") -> str:
    """AWS's code of an error, such as ``NoSuchKey``."""
    return error.response.get("Error", {}).get("Code", "")
