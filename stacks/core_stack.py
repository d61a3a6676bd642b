"""CoreStack: what outlives a training cluster: the network, the bucket, the image repositories.

TrainingStack may be destroyed and rebuilt every day; this stack should not be. Nothing here costs
money per GPU, and nothing here knows that Ray exists.
"""

from typing import Any

import aws_cdk as cdk
from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_servicediscovery as servicediscovery
from constructs import Construct

from contract import nodes, runs
from contract import outputs as stack_outputs
from stacks import findings, rights
from stacks.custom_resources import contain_custom_resources
from stacks.log_groups import log_group
from stacks.settings import Settings

GITHUB_TOKENS = "token.actions.githubusercontent.com"
# Records of a run are small and stay where they are; checkpoints and models are what costs.
LARGE_FILE_BYTES = 1024 * 1024


class CoreStack(cdk.Stack):
    """One-zone VPC behind a NAT gateway, the bucket, and the repositories of the two images."""

    vpc: ec2.IVpc
    training_subnets: ec2.SelectedSubnets
    bucket: s3.IBucket
    repositories: dict[str, ecr.Repository]
    namespace: servicediscovery.PrivateDnsNamespace

    def __init__(self, scope: Construct, id_: str, *, settings: Settings, **kwargs: Any) -> None:
        super().__init__(
            scope,
            id_,
            description="Distributed training: network, bucket and image repositories",
            **kwargs,
        )
        # What exists is used as it is: its routes, endpoints, flow logs and rules are its owner's.
        self.bucket = (
            s3.Bucket.from_bucket_name(self, "Bucket", settings.bucket)
            if settings.bucket
            else self._bucket(settings)
        )
        self.vpc = self._existing_network(settings) if settings.vpc_id else self._network(settings)
        self.training_subnets = self.vpc.select_subnets(subnet_group_name="Training")
        self.repositories = {node: self._repository(node) for node in (nodes.HEAD, nodes.WORKER)}
        # Whether TrainingStack needs both depends on its settings, and an export that is in use
        # cannot go: without this, a change of them would have to take two deploys.
        for repository in self.repositories.values():
            self.export_value(repository.repository_name)
        # The head registers here as head.<namespace>, for the workers of a standing cluster.
        self.namespace = servicediscovery.PrivateDnsNamespace(
            self,
            "Namespace",
            name=settings.domain,
            vpc=self.vpc,
            description="Nodes of the training cluster",
        )
        outputs = {
            stack_outputs.BUCKET: self.bucket.bucket_name,
            stack_outputs.VPC: self.vpc.vpc_id,
            stack_outputs.NAMESPACE: self.namespace.namespace_name,
            stack_outputs.SUBNET: self.training_subnets.subnet_ids[0],
        }
        for node, name in stack_outputs.REPOSITORIES.items():
            outputs[name] = self.repositories[node].repository_uri
        if settings.github_repository:
            outputs[stack_outputs.PUSH_ROLE] = self._image_push_role(settings).role_arn
            outputs[stack_outputs.PUSH_FROM] = settings.github_repository
        for name, value in outputs.items():
            cdk.CfnOutput(self, name, value=value)
        contain_custom_resources(self, settings=settings)

    def _existing_network(self, settings: Settings) -> ec2.IVpc:
        vpc = ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=settings.vpc_id,
            availability_zones=[settings.availability_zone],
            private_subnet_ids=[settings.subnet_id],
            private_subnet_names=["Training"],
        )
        cdk.Annotations.of(vpc).acknowledge_warning(
            "@aws-cdk/aws-ec2:noSubnetRouteTableId", "No route is added to it."
        )
        return vpc

    def _network(self, settings: Settings) -> ec2.Vpc:
        # One zone on purpose: gradients that cross zones are slow and billed per GB, and a cluster
        # placement group cannot span two. The public subnet only holds the NAT gateway.
        zone = settings.availability_zone
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(settings.vpc_cidr),
            availability_zones=[zone] if zone else None,
            max_azs=None if zone else 1,
            nat_gateways=1,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="Nat",
                    subnet_type=ec2.SubnetType.PUBLIC,
                    cidr_mask=28,
                    map_public_ip_on_launch=False,
                ),
                ec2.SubnetConfiguration(
                    name="Training", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS
                ),
            ],
            restrict_default_security_group=True,
        )
        _pin(vpc, "Vpc")
        # Free, and it carries checkpoints, data and the layers of ECR's images past the NAT
        # gateway, which bills every GB.
        endpoint = vpc.add_gateway_endpoint(
            "S3Endpoint", service=ec2.GatewayVpcEndpointAwsService.S3
        )
        self._limit_s3_endpoint(endpoint)
        if settings.interface_endpoints:
            self._interface_endpoints(vpc, settings)

        group = log_group(self, "FlowLogs", settings=settings)
        role = iam.Role(
            self,
            "FlowLogRole",
            description="Flow logs of the VPC: write to their log group",
            assumed_by=rights.of_this_account(self, "vpc-flow-logs.amazonaws.com"),
        )
        vpc.add_flow_log(
            "FlowLog",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(group, role),
            max_aggregation_interval=ec2.FlowLogMaxAggregationInterval.TEN_MINUTES,
        )
        return vpc

    def _limit_s3_endpoint(self, endpoint: ec2.GatewayVpcEndpoint) -> None:
        """Nodes read from any bucket, as images and packages need, and write into their own."""
        own = [self.bucket.bucket_arn, self.bucket.arn_for_objects("*")]
        reading = rights.allow("Read", "s3:Get*", "s3:List*", on=["*"])
        for statement in (reading + rights.allow("OwnBucket", "s3:*", on=own)).statements:
            statement.add_any_principal()
            endpoint.add_to_policy(statement)

    def _interface_endpoints(self, vpc: ec2.Vpc, settings: Settings) -> None:
        group = ec2.SecurityGroup(
            self,
            "EndpointSecurityGroup",
            vpc=vpc,
            description="AWS endpoints: HTTPS from inside the VPC",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(
            ec2.Peer.ipv4(settings.vpc_cidr), ec2.Port.HTTPS, "HTTPS from the VPC"
        )
        services = {
            "EcrApi": ec2.InterfaceVpcEndpointAwsService.ECR,
            "EcrDocker": ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER,
            "Logs": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
            "SsmMessages": ec2.InterfaceVpcEndpointAwsService.SSM_MESSAGES,
        }
        for name, service in services.items():
            vpc.add_interface_endpoint(
                f"{name}Endpoint",
                service=service,
                security_groups=[group],
                subnets=ec2.SubnetSelection(subnet_group_name="Training"),
                open=False,
            )

    def _bucket(self, settings: Settings) -> s3.Bucket:
        keep = settings.retain_bucket
        rules = [
            s3.LifecycleRule(
                id="stale-uploads", abort_incomplete_multipart_upload_after=Duration.days(1)
            )
        ]
        archive, expire = settings.archive_after_days, settings.expire_after_days
        if archive or expire:
            rules.append(
                s3.LifecycleRule(
                    id="old-checkpoints",
                    prefix=f"{runs.RUNS_PREFIX}/",
                    object_size_greater_than=LARGE_FILE_BYTES,
                    # Nothing is lost: a run resumes from here as before, only reading it costs
                    # more.
                    transitions=[
                        s3.Transition(
                            storage_class=s3.StorageClass.GLACIER_INSTANT_RETRIEVAL,
                            transition_after=Duration.days(archive),
                        )
                    ]
                    if archive
                    else None,
                    expiration=Duration.days(expire) if expire else None,
                )
            )
        bucket = s3.Bucket(
            self,
            "Bucket",
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            encryption=s3.BucketEncryption.S3_MANAGED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            # See docs/security.md: "What a job may delete".
            versioned=False,
            removal_policy=RemovalPolicy.RETAIN if keep else RemovalPolicy.DESTROY,
            auto_delete_objects=not keep,
            lifecycle_rules=rules,
        )
        _pin(bucket, "Bucket")
        resource = bucket.node.default_child
        assert isinstance(resource, s3.CfnBucket)
        if archive or expire:
            # CloudFormation's schema has text here, and CDK writes a number.
            resource.add_property_override(
                "LifecycleConfiguration.Rules.1.ObjectSizeGreaterThan", str(LARGE_FILE_BYTES)
            )
        findings.accept(bucket, findings.BUCKET)
        return bucket

    def _repository(self, node: str) -> ecr.Repository:
        repository = ecr.Repository(
            self,
            f"{node.capitalize()}Repository",
            # A tag never changes its meaning. Tagged images do not expire: ECR does not know which
            # of them is deployed, and a change of sources adds only a few MB.
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            image_scan_on_push=True,
            removal_policy=RemovalPolicy.DESTROY,
            empty_on_delete=True,
            lifecycle_rules=[
                ecr.LifecycleRule(
                    rule_priority=1,
                    description="Layers of failed pushes",
                    tag_status=ecr.TagStatus.UNTAGGED,
                    max_image_age=Duration.days(7),
                ),
            ],
        )
        _pin(repository, f"{node.capitalize()}Repository")
        return repository

    def _image_push_role(self, settings: Settings) -> iam.Role:
        """The role that the workflow of one branch of one repository may assume."""
        arn = settings.github_oidc_provider_arn
        if not arn:
            arn = iam.OidcProviderNative(
                self,
                "GitHub",
                url=f"https://{GITHUB_TOKENS}",
                client_ids=["sts.amazonaws.com"],
                # An account has one, which others may have come to use.
                removal_policy=RemovalPolicy.RETAIN,
            ).oidc_provider_arn
        owner, _, name = settings.github_repository.partition("/")
        # Repositories made or renamed since July 2026 have ids in their subject. None of the names
        # can hold "@", "/" or ":", so a wildcard stands for an id and nothing else.
        subjects = [
            f"repo:{repository}:ref:refs/heads/{settings.github_branch}"
            for repository in dict.fromkeys(
                (f"{owner}/{name}", f"{_with_id(owner)}/{_with_id(name)}")
            )
        ]
        role = iam.Role(
            self,
            "ImagePushRole",
            description=f"Pushes images from {settings.github_repository}",
            assumed_by=iam.WebIdentityPrincipal(
                arn,
                {
                    "StringEquals": {f"{GITHUB_TOKENS}:aud": "sts.amazonaws.com"},
                    "StringLike": {f"{GITHUB_TOKENS}:sub": subjects},
                },
            ),
            max_session_duration=Duration.hours(1),
        )
        rights.of_image_push([*self.repositories.values()]).grant(role)
        return role


def _with_id(name: str) -> str:
    """The name of an owner or repository with GitHub's id of it; a wildcard where it has none."""
    return name if "@" in name else f"{name}@*"


def _pin(construct: Construct, logical_id: str) -> None:
    """Fix the logical id: should this class move, CloudFormation must not replace the resource."""
    resource = construct.node.default_child
    assert isinstance(resource, cdk.CfnElement)
    resource.override_logical_id(logical_id)
