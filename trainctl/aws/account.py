"""Look-ups in an account and region, for the checks of ``doctor`` and ``submit``."""

from functools import cached_property

from trainctl.aws.clients import Clients, unless


class Account:
    """One account and region."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    @cached_property
    def id(self) -> str:
        """Its twelve digits. With bad credentials, botocore's errors."""
        return self._clients.caller["Account"]

    def has_image(self, repository: str, tag: str) -> bool:
        """Check that a repository of ECR has an image with this tag."""
        with unless("ImageNotFoundException"):
            found = self._clients.ecr.describe_images(
                repositoryName=repository, imageIds=[{"imageTag": tag}]
            )
            return bool(found["imageDetails"])
        return False

    def zone(self, subnet: str) -> str:
        """Availability zone of a subnet."""
        (found,) = self._clients.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
        return found["AvailabilityZone"]

    def zones(self) -> set[str]:
        """All zones of the region."""
        found = self._clients.ec2.describe_availability_zones(
            Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}]
        )
        return {each["ZoneName"] for each in found["AvailabilityZones"]}

    def zones_offering(self, instance_type: str) -> set[str]:
        """The zones of the region in which an instance type is offered."""
        pages = self._clients.ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [instance_type]}],
        )
        return {*pages.search("InstanceTypeOfferings[].Location")}

    def parameter(self, name: str) -> str | None:
        """A parameter of Systems Manager; None when there is none with this name."""
        with unless("ParameterNotFound"):
            return self._clients.ssm.get_parameter(Name=name)["Parameter"]["Value"]
        return None

    def quota(self, service: str, code: str) -> float:
        """A service quota, by its code; AWS's default where the account has no value of its own."""
        quotas = self._clients.service_quotas
        with unless("NoSuchResourceException"):
            return quotas.get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]["Value"]
        found = quotas.get_aws_default_service_quota(ServiceCode=service, QuotaCode=code)
        return found["Quota"]["Value"]

    def num_vpcs(self) -> int:
        """VPCs of the region."""
        pages = self._clients.ec2.get_paginator("describe_vpcs").paginate()
        return len([*pages.search("Vpcs[]")])

    def num_addresses(self) -> int:
        """Elastic IP addresses of the region."""
        return len(self._clients.ec2.describe_addresses()["Addresses"])

    def has_secret(self, name: str) -> bool:
        with unless("ResourceNotFoundException"):
            self._clients.secrets.describe_secret(SecretId=name)
            return True
        return False
