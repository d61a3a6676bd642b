"""Look-ups in an account and region, for the checks of ``doctor`` and ``submit``."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainctl.aws.clients import Clients, unless

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import CapacityReservationTypeDef


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
        return str(self.subnet(subnet)["AvailabilityZone"])

    def subnet(self, name: str) -> Mapping[str, Any]:
        """A subnet, as EC2 describes it."""
        return dict(self._clients.ec2.describe_subnets(SubnetIds=[name])["Subnets"][0])

    def routes(self, subnet: str, vpc: str) -> list[Mapping[str, Any]]:
        """Working routes of a subnet: of its own table or, without one, of the VPC's main table."""
        ask = self._clients.ec2.describe_route_tables
        tables = ask(Filters=[{"Name": "association.subnet-id", "Values": [subnet]}])["RouteTables"]
        if not tables:
            tables = ask(
                Filters=[
                    {"Name": "association.main", "Values": ["true"]},
                    {"Name": "vpc-id", "Values": [vpc]},
                ]
            )["RouteTables"]
        return [dict(each) for each in tables[0]["Routes"] if each.get("State") == "active"]

    def dns_names(self, vpc: str) -> bool:
        """True if a VPC answers for the names of a private zone, such as Cloud Map's."""
        ask = self._clients.ec2.describe_vpc_attribute
        support = ask(VpcId=vpc, Attribute="enableDnsSupport")["EnableDnsSupport"]
        names = ask(VpcId=vpc, Attribute="enableDnsHostnames")["EnableDnsHostnames"]
        return support["Value"] and names["Value"]

    def reservation(self, name: str) -> "CapacityReservationTypeDef":
        """A capacity reservation, as EC2 describes it."""
        found = self._clients.ec2.describe_capacity_reservations(CapacityReservationIds=[name])
        (reservation,) = found["CapacityReservations"]
        return reservation

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

    def template(self, stack: str) -> Mapping[str, Any] | None:
        """Template of a deployed stack; None where there is no such stack."""
        with unless("ValidationError"):
            return dict(self._clients.cloudformation.get_template(StackName=stack)["TemplateBody"])
        return None

    def create_only(self, kind: str) -> list[str]:
        """Properties of a resource type whose change replaces a resource, by its schema."""
        if kind.startswith("Custom::"):
            return []
        found = self._clients.cloudformation.describe_type(Type="RESOURCE", TypeName=kind)
        return list(json.loads(found["Schema"]).get("createOnlyProperties", ()))

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

    def has_role(self, name: str) -> bool:
        with unless("NoSuchEntity"):
            self._clients.iam.get_role(RoleName=name)
            return True
        return False

    def has_secret(self, name: str) -> bool:
        with unless("ResourceNotFoundException"):
            self._clients.secrets.describe_secret(SecretId=name)
            return True
        return False
