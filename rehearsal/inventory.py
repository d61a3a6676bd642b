"""Inventory of an account, to prove that a removed deployment has left nothing.

    before = inventory(aws.endpoint)
    ...  # cdk deploy, cdk destroy
    assert difference(before, inventory(aws.endpoint)) == {}

Only resources count that the real AWS would go on listing, or billing, once their stack is gone:
deleted NAT gateways and deregistered task definitions are listed for a while there, too.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import boto3
from botocore.config import Config

from rehearsal.local_aws import ACCOUNT, REGION

Inventory = dict[str, list[str]]

# What the stacks are made of. Kind -> service, operation, key of the list in the answer, key of the
# name in an item ("" where the item is the name).
LISTS: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "alarm": ("cloudwatch", "describe_alarms", "MetricAlarms", "AlarmName"),
    "dashboard": ("cloudwatch", "list_dashboards", "DashboardEntries", "DashboardName"),
    "stack": ("cloudformation", "describe_stacks", "Stacks", "StackName"),
    "auto scaling group": (
        "autoscaling",
        "describe_auto_scaling_groups",
        "AutoScalingGroups",
        "AutoScalingGroupName",
    ),
    "address": ("ec2", "describe_addresses", "Addresses", "AllocationId"),
    "endpoint": ("ec2", "describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
    "flow log": ("ec2", "describe_flow_logs", "FlowLogs", "FlowLogId"),
    "internet gateway": (
        "ec2",
        "describe_internet_gateways",
        "InternetGateways",
        "InternetGatewayId",
    ),
    "launch template": ("ec2", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    "NAT gateway": ("ec2", "describe_nat_gateways", "NatGateways", "NatGatewayId"),
    "network ACL": ("ec2", "describe_network_acls", "NetworkAcls", "NetworkAclId"),
    "network interface": (
        "ec2",
        "describe_network_interfaces",
        "NetworkInterfaces",
        "NetworkInterfaceId",
    ),
    "placement group": ("ec2", "describe_placement_groups", "PlacementGroups", "GroupName"),
    "route table": ("ec2", "describe_route_tables", "RouteTables", "RouteTableId"),
    "security group": ("ec2", "describe_security_groups", "SecurityGroups", "GroupId"),
    "security group rule": (
        "ec2",
        "describe_security_group_rules",
        "SecurityGroupRules",
        "SecurityGroupRuleId",
    ),
    "subnet": ("ec2", "describe_subnets", "Subnets", "SubnetId"),
    "VPC": ("ec2", "describe_vpcs", "Vpcs", "VpcId"),
    "repository": ("ecr", "describe_repositories", "repositories", "repositoryName"),
    "capacity provider": ("ecs", "describe_capacity_providers", "capacityProviders", "name"),
    "cluster": ("ecs", "list_clusters", "clusterArns", ""),
    "task definition": ("ecs", "list_task_definitions", "taskDefinitionArns", ""),
    "event rule": ("events", "list_rules", "Rules", "Name"),
    "instance profile": (
        "iam",
        "list_instance_profiles",
        "InstanceProfiles",
        "InstanceProfileName",
    ),
    "role": ("iam", "list_roles", "Roles", "RoleName"),
    "function": ("lambda", "list_functions", "Functions", "FunctionName"),
    "log group": ("logs", "describe_log_groups", "logGroups", "logGroupName"),
    "log resource policy": ("logs", "describe_resource_policies", "resourcePolicies", "policyName"),
    "metric filter": ("logs", "describe_metric_filters", "metricFilters", "filterName"),
    "hosted zone": ("route53", "list_hosted_zones", "HostedZones", "Id"),
    "bucket": ("s3", "list_buckets", "Buckets", "Name"),
    "secret": ("secretsmanager", "list_secrets", "SecretList", "ARN"),
    "namespace": ("servicediscovery", "list_namespaces", "Namespaces", "Id"),
    "discovery service": ("servicediscovery", "list_services", "Services", "Id"),
    "subscription": ("sns", "list_subscriptions", "Subscriptions", "SubscriptionArn"),
    "topic": ("sns", "list_topics", "Topics", "TopicArn"),
    "state machine": ("stepfunctions", "list_state_machines", "stateMachines", "stateMachineArn"),
}
#: Arguments of some of the operations.
ARGUMENTS: Final[Mapping[str, dict[str, Any]]] = {
    "NAT gateway": {
        "Filters": [{"Name": "state", "Values": ["pending", "available", "deleting", "failed"]}]
    },
    "task definition": {"status": "ACTIVE"},
}


class AccountClients:
    """Clients of the account at an endpoint, independent of this process's environment; without
    one, of the account that the environment names."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        if endpoint:
            self.session = boto3.Session(
                aws_access_key_id=ACCOUNT, aws_secret_access_key="test", region_name=REGION
            )
            self.config = Config(inject_host_prefix=False, retries={"max_attempts": 1})
        else:
            self.session, self.config = boto3.Session(), Config()
        self.clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        if service not in self.clients:
            make: Any = self.session.client  # typed by the service's name, which varies here
            self.clients[service] = make(
                service, endpoint_url=self.endpoint or None, config=self.config
            )
        return self.clients[service]

    def outputs(self, stack: str) -> dict[str, str]:
        """Outputs of a deployed stack."""
        (found,) = self.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
        return {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}

    def items(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
        """Items under ``key`` on all pages of an operation."""
        client = self.client(service)
        if client.can_paginate(operation):
            for page in client.get_paginator(operation).paginate(**arguments):
                yield from page.get(key, [])
        else:
            yield from getattr(client, operation)(**arguments).get(key, [])


@functools.cache
def account_at(endpoint: str) -> AccountClients:
    # Making twenty clients takes seconds; asking them takes less than one.
    return AccountClients(endpoint)


def inventory(endpoint: str) -> Inventory:
    """Kind of resource -> names of all that there are, sorted. Kinds without any are left out."""
    account = account_at(endpoint)
    found = {
        kind: [
            item[name] if name else item
            for item in account.items(service, operation, key, **ARGUMENTS.get(kind, {}))
        ]
        for kind, (service, operation, key, name) in LISTS.items()
    }
    # An account keeps these: services need them again.
    found["role"] = [name for name in found["role"] if not name.startswith("AWSServiceRoleFor")]
    found["instance"] = [
        instance["InstanceId"]
        for reservation in account.items("ec2", "describe_instances", "Reservations")
        for instance in reservation["Instances"]
        if instance["State"]["Name"] != "terminated"
    ]
    for cluster in found["cluster"]:
        for kind, operation in (("service", "list_services"), ("task", "list_tasks")):
            arns = account.items("ecs", operation, f"{kind}Arns", cluster=cluster)
            found.setdefault(kind, []).extend(arns)
    return {kind: sorted(names) for kind, names in sorted(found.items()) if names}


def difference(before: Inventory, after: Inventory) -> Inventory:
    """Resources in ``after`` that are not in ``before``; empty if nothing was left behind."""
    new = {kind: sorted({*names} - {*before.get(kind, [])}) for kind, names in after.items()}
    return {kind: names for kind, names in new.items() if names}
