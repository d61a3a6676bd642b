"""CoreStack: what outlives a training cluster: the network, the bucket, the image repositories.

TrainingStack may be destroyed and rebuilt every day; this stack should not be. Nothing here costs
money per GPU, and nothing here knows that Ray exists.
"""

from typing import Any, TypeVar

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_servicediscovery as servicediscovery
from aws_cdk import aws_sns as sns
from constructs import Construct

from contract import nodes
from contract import outputs as stack_outputs
from stacks.lambda_functions import contain_custom_resources
from stacks.log_groups import retain_logs
from stacks.network import vpc as network
from stacks.people import People
from stacks.settings import Settings
from stacks.storage.bucket import new_bucket
from stacks.storage.image_repositories import image_push_role, image_repository

Pinned = TypeVar("Pinned", bound=cdk.Resource)


class CoreStack(cdk.Stack):
    """One-zone VPC behind a NAT gateway, the bucket, and the repositories of the two images."""

    vpc: ec2.IVpc
    training_subnets: ec2.SelectedSubnets
    bucket: s3.IBucket
    repositories: dict[str, ecr.Repository]
    namespace: servicediscovery.PrivateDnsNamespace
    notices: sns.Topic
    """Topic for notices that jobs have ended, for ``submit --notify``."""

    def __init__(self, scope: Construct, id_: str, *, settings: Settings, **kwargs: Any) -> None:
        super().__init__(
            scope,
            id_,
            description="Distributed training: network, bucket and image repositories",
            **kwargs,
        )
        self.bucket = self._bucket(settings)
        self.vpc = self._vpc(settings)
        self.training_subnets = network.training_subnets(self.vpc)
        self.repositories = {
            node: _pinned(image_repository(self, f"{node.capitalize()}Repository"))
            for node in (nodes.HEAD, nodes.WORKER)
        }
        # Whether TrainingStack needs both depends on its settings, and an export that is in use
        # cannot go: without this, a change of them would have to take two deploys.
        for repository in self.repositories.values():
            self.export_value(repository.repository_name)
        if not settings.vpc_id:  # the same of a pool in another zone
            self.export_value(self.training_subnets.subnets[0].route_table.route_table_id)
        # The head registers here as head.<namespace>, for the workers of a standing cluster.
        self.namespace = servicediscovery.PrivateDnsNamespace(
            self,
            "Namespace",
            name=settings.domain,
            vpc=self.vpc,
            description="Nodes of the training cluster",
        )

        # Here, as each address confirms its subscription once.
        self.notices = sns.Topic(
            self, "Notices", display_name="Training jobs that have ended", enforce_ssl=True
        )
        self.notices.apply_removal_policy(cdk.RemovalPolicy.DESTROY)

        outputs = {
            stack_outputs.NOTICES: self.notices.topic_arn,
            stack_outputs.BUCKET: self.bucket.bucket_name,
            stack_outputs.VPC: self.vpc.vpc_id,
            stack_outputs.NAMESPACE: self.namespace.namespace_name,
            stack_outputs.SUBNET: self.training_subnets.subnet_ids[0],
        }
        for node, name in stack_outputs.REPOSITORIES.items():
            outputs[name] = self.repositories[node].repository_uri
        core, training = stack_outputs.stacks(settings.deployment)
        people = People(
            self,
            "People",
            core=core,
            training=training,
            bucket=self.bucket,
            repositories=self.repositories.values(),
            notices=self.notices.topic_arn,
        )
        for name, policy in people.policies.items():
            outputs[name] = policy.managed_policy_arn
        if settings.github_repository:
            role = image_push_role(
                self,
                github_repository=settings.github_repository,
                branch=settings.github_branch,
                oidc_provider_arn=settings.github_oidc_provider_arn,
                repositories=[*self.repositories.values()],
            )
            outputs[stack_outputs.PUSH_ROLE] = role.role_arn
        for name, value in outputs.items():
            cdk.CfnOutput(self, name, value=value)

        contain_custom_resources(self)
        retain_logs(self, days=settings.log_retention_days)

    def _bucket(self, settings: Settings) -> s3.IBucket:
        if settings.bucket:
            return s3.Bucket.from_bucket_name(self, "Bucket", settings.bucket)
        return _pinned(new_bucket(self, retain=settings.retain_bucket))

    def _vpc(self, settings: Settings) -> ec2.IVpc:
        if settings.vpc_id:
            return network.existing_vpc(
                self,
                vpc_id=settings.vpc_id,
                subnet_id=settings.subnet_id,
                availability_zone=settings.availability_zone,
            )
        zone = settings.availability_zone
        vpc = _pinned(network.new_vpc(self, cidr=settings.vpc_cidr, availability_zone=zone))
        network.add_s3_endpoint(vpc, bucket=self.bucket)
        return vpc


def _pinned(construct: Pinned) -> Pinned:
    """Make the construct's id the logical id: should its class move, CloudFormation must not
    replace the resource."""
    resource = construct.node.default_child
    assert isinstance(resource, cdk.CfnElement)
    resource.override_logical_id(construct.node.id)
    return construct
