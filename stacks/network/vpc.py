"""The VPC: one zone behind a NAT gateway, or one that exists."""

from aws_cdk import Annotations
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from stacks import findings, rights
from stacks.log_groups import log_group

#: Name of the subnets of all hosts.
TRAINING = "Training"
#: CDK's warning about a subnet that is not its own, and why it is accepted.
_NO_ROUTES = ("@aws-cdk/aws-ec2:noSubnetRouteTableId", "No route is added to it.")


def existing_vpc(
    scope: Construct, *, vpc_id: str, subnet_id: str, availability_zone: str
) -> ec2.IVpc:
    """A VPC that is used as it is: its routes, endpoints, flow logs and rules are its owner's."""
    vpc = ec2.Vpc.from_vpc_attributes(
        scope,
        "Vpc",
        vpc_id=vpc_id,
        availability_zones=[availability_zone],
        private_subnet_ids=[subnet_id],
        private_subnet_names=[TRAINING],
    )
    Annotations.of(vpc).acknowledge_warning(*_NO_ROUTES)
    return vpc


def new_vpc(scope: Construct, *, cidr: str, availability_zone: str) -> ec2.Vpc:
    """A VPC with flow logs; without a zone CloudFormation chooses one."""
    # One zone on purpose: gradients that cross zones are slow and billed per GB, and a cluster
    # placement group cannot span two. The public subnet only holds the NAT gateway.
    vpc = ec2.Vpc(
        scope,
        "Vpc",
        ip_addresses=ec2.IpAddresses.cidr(cidr),
        availability_zones=[availability_zone] if availability_zone else None,
        max_azs=None if availability_zone else 1,
        nat_gateways=1,
        subnet_configuration=[
            ec2.SubnetConfiguration(
                name="Nat",
                subnet_type=ec2.SubnetType.PUBLIC,
                cidr_mask=28,
                map_public_ip_on_launch=False,
            ),
            ec2.SubnetConfiguration(name=TRAINING, subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS),
        ],
        restrict_default_security_group=True,
    )
    group = log_group(scope, "FlowLogs")
    role = iam.Role(
        scope,
        "FlowLogRole",
        description="Flow logs of the VPC: write to their log group",
        assumed_by=rights.of_this_account(scope, "vpc-flow-logs.amazonaws.com"),
    )
    vpc.add_flow_log(
        "FlowLog",
        destination=ec2.FlowLogDestination.to_cloud_watch_logs(group, role),
        max_aggregation_interval=ec2.FlowLogMaxAggregationInterval.TEN_MINUTES,
    )
    return vpc


def existing_subnet(scope: Construct, id_: str, *, subnet_id: str, zone: str) -> ec2.ISubnet:
    """A subnet that is used as it is."""
    subnet = ec2.Subnet.from_subnet_attributes(
        scope, id_, subnet_id=subnet_id, availability_zone=zone
    )
    Annotations.of(subnet).acknowledge_warning(*_NO_ROUTES)
    return subnet


def add_subnet(
    scope: Construct, vpc: ec2.IVpc, *, zone: str, cidr: str
) -> tuple[ec2.ISubnet, ec2.CfnSubnetRouteTableAssociation]:
    """Add a private subnet in another zone to our VPC, with the routes of the training subnet: by
    the one NAT gateway, for which AWS bills what crosses zones, and by S3's endpoint.

    Returns:
        The subnet, and what must be there while hosts use the network.
    """
    subnet = ec2.CfnSubnet(
        scope,
        f"Subnet-{zone[-1]}",
        vpc_id=vpc.vpc_id,
        availability_zone=zone,
        cidr_block=cidr,
        map_public_ip_on_launch=False,
    )
    findings.accept(subnet, findings.ZONE)
    routes = ec2.CfnSubnetRouteTableAssociation(
        scope,
        f"Routes-{zone[-1]}",
        subnet_id=subnet.ref,
        route_table_id=training_subnets(vpc).subnets[0].route_table.route_table_id,
    )
    return existing_subnet(scope, f"Zone-{zone[-1]}", subnet_id=subnet.ref, zone=zone), routes


def training_subnets(vpc: ec2.IVpc) -> ec2.SelectedSubnets:
    """The subnet of all hosts, but those of pools in other zones."""
    return vpc.select_subnets(subnet_group_name=TRAINING)


def add_s3_endpoint(vpc: ec2.Vpc, *, bucket: s3.IBucket) -> None:
    """Reach S3 for free: checkpoints, data and the layers of ECR's images do not pass the NAT
    gateway, which bills every GB.

    Nodes read from any bucket, as images and packages need, and write into ``bucket`` only.
    """
    endpoint = vpc.add_gateway_endpoint("S3Endpoint", service=ec2.GatewayVpcEndpointAwsService.S3)
    own = [bucket.bucket_arn, bucket.arn_for_objects("*")]
    reading = rights.allow("Read", "s3:Get*", "s3:List*", on=["*"])
    for statement in (reading + rights.allow("OwnBucket", "s3:*", on=own)).statements:
        statement.add_any_principal()
        endpoint.add_to_policy(statement)
