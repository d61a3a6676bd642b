"""What must exist in an account and region before a job can run there; ``doctor`` asks."""

from trainctl.aws.clients import Clients, code_of


class Account:
    """One account and region."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def has_image(self, repository: str, tag: str) -> bool:
        """Whether a repository of ECR has an image with this tag."""
        from botocore.exceptions import ClientError

        try:
            self._clients.ecr.describe_images(
                repositoryName=repository, imageIds=[{"imageTag": tag}]
            )
        except ClientError as error:
            if code_of(error) != "ImageNotFoundException":
                raise
            return False
        return True

    def zone(self, subnet: str) -> str:
        """Availability zone of a subnet."""
        found = self._clients.ec2.describe_subnets(SubnetIds=[subnet])
        return found["Subnets"][0]["AvailabilityZone"]

    def offers(self, instance_type: str, zone: str) -> bool:
        """Whether an instance type is offered in a zone."""
        found = self._clients.ec2.describe_instance_type_offerings(
            LocationType="availability-zone",
            Filters=[
                {"Name": "instance-type", "Values": [instance_type]},
                {"Name": "location", "Values": [zone]},
            ],
        )
        return bool(found["InstanceTypeOfferings"])

    def parameter(self, name: str) -> str | None:
        """A parameter of Systems Manager; None when there is none with this name."""
        from botocore.exceptions import ClientError

        try:
            found = self._clients.ssm.get_parameter(Name=name)
        except ClientError as error:
            if code_of(error) != "ParameterNotFound":
                raise
            return None
        return found["Parameter"]["Value"]

    def ec2_quota(self, code: str) -> float:
        """A service quota of EC2, by its code."""
        found = self._clients.service_quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        return found["Quota"]["Value"]

    def has_role(self, name: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            self._clients.iam.get_role(RoleName=name)
        except ClientError as error:
            if code_of(error) != "NoSuchEntity":
                raise
            return False
        return True

    def has_secret(self, name: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            self._clients.secrets.describe_secret(SecretId=name)
        except ClientError as error:
            if code_of(error) != "ResourceNotFoundException":
                raise
            return False
        return True
