"""CloudFormation types that the emulator lacks, and mended ones, registered from outside.

Imported inside ``.venv-aws`` alone, by ``rehearsal.server``: it assigns to MiniStack's table of
handlers, whose shape is that of one version. Each type records what its API would record, refuses
what AWS refuses where a template of ours could get it wrong, and removes on delete what it made.

A handler is ``create(logical_id, properties, stack) -> (physical id, attributes)``,
``update(physical_id, old, new, stack, logical_id)`` for changes in place, with the same result, and
``delete(physical_id, properties)``. What replaces a resource is in ``TYPES``: the engine then makes
the new one, and deletes the old one after the stack is updated.
"""

import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ministack.core import lambda_runtime
from ministack.core.responses import get_account_id, get_region
from ministack.services import (
    autoscaling,
    cloudwatch,
    ec2,
    ecs,
    iam,
    lambda_svc,
    s3,
    secretsmanager,
)
from ministack.services.cloudformation import custom_resource, provisioners

Properties = dict[str, Any]
Result = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Type:
    """Handlers of one CloudFormation type, and what AWS documents about its properties."""

    create: Callable[[str, Properties, str], Result]
    update: Callable[[str, Properties, Properties, str, str], Result]
    delete: Callable[[str, Properties], None]
    required: tuple[str, ...] = ()
    replacing: tuple[str, ...]
    """Properties whose change makes a new resource."""
    in_place: tuple[str, ...]
    """Properties whose change leaves the resource the same."""


def call(what: str, response: tuple[int, Any, Any]) -> str:
    """Body of an answer of one of the emulator's services. Raises ValueError on an error."""
    status, _headers, body = response
    text = body.decode() if isinstance(body, bytes) else str(body)
    if status >= 400:
        found = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
        raise ValueError(f"{what}: {found[1] if found else text}")
    return text


def element(xml: str, name: str) -> str:
    """Text of the first element called ``name``."""
    found = re.search(rf"<{name}>(.*?)</{name}>", xml)
    if not found:
        raise ValueError(f"the emulator answered without <{name}>: {xml}")
    return found[1]


def existing(store: Any, key: str, what: str) -> Any:
    """Record ``key`` of a store of the emulator. Raises ValueError if there is none."""
    record = store.get(key)
    if record is None:
        raise ValueError(f"{what} {key!r} does not exist")
    return record


def tags_alone(
    attributes: Callable[[str], dict[str, Any]],
) -> Callable[[str, Properties, Properties, str, str], Result]:
    """An update for the EC2 types of which only the tags change in place."""

    def update(
        physical_id: str, old: Properties, new: Properties, _stack: str, _logical_id: str
    ) -> Result:
        known = attributes(physical_id)
        # An address is tagged by its allocation, everything else by its physical id.
        provisioners._ec2_apply_tags(known.get("AllocationId", physical_id), new, old)
        return physical_id, known

    return update


# --- AWS::EC2::EIP ------------------------------------------------------------------------------
def eip_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    xml = call(logical_id, ec2._allocate_address({"Domain": str(properties.get("Domain", "vpc"))}))
    allocation, address = element(xml, "allocationId"), element(xml, "publicIp")
    provisioners._ec2_apply_tags(allocation, properties)
    return address, {"AllocationId": allocation, "PublicIp": address}


def eip_attributes(address: str) -> dict[str, Any]:
    for allocation, record in ec2._addresses.items():
        if record["PublicIp"] == address:
            return {"AllocationId": allocation, "PublicIp": address}
    raise ValueError(f"address {address} does not exist")


def eip_delete(address: str, _properties: Properties) -> None:
    allocation = eip_attributes(address)["AllocationId"]
    for gateway in ec2._nat_gateways.values():
        if gateway["AllocationId"] == allocation and gateway["State"] != "deleted":
            raise ValueError(f"address {address} is in use by {gateway['NatGatewayId']}")
    call(address, ec2._release_address({"AllocationId": allocation}))


# --- AWS::EC2::NatGateway -----------------------------------------------------------------------
def nat_gateway_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    existing(ec2._subnets, properties["SubnetId"], f"{logical_id}: subnet")
    if properties.get("ConnectivityType", "public") == "public":
        allocation = properties.get("AllocationId", "")
        existing(ec2._addresses, allocation, f"{logical_id}: address allocation")
    wanted = {
        name: properties[name]
        for name in ("SubnetId", "AllocationId", "ConnectivityType")
        if name in properties
    }
    gateway = element(call(logical_id, ec2._create_nat_gateway(wanted)), "natGatewayId")
    provisioners._ec2_apply_tags(gateway, properties)
    return gateway, {"NatGatewayId": gateway}


def nat_gateway_delete(gateway: str, _properties: Properties) -> None:
    # As on AWS, its record can be seen for a while, in the state "deleted".
    call(gateway, ec2._delete_nat_gateway({"NatGatewayId": gateway}))
    ec2._tags.pop(gateway, None)


# --- AWS::EC2::PlacementGroup -------------------------------------------------------------------
def placement_group_create(logical_id: str, properties: Properties, stack: str) -> Result:
    name = provisioners._physical_name(stack, logical_id, max_len=255)
    wanted = {"GroupName": name, "Strategy": properties.get("Strategy", "cluster")}
    if "PartitionCount" in properties:
        wanted["PartitionCount"] = str(properties["PartitionCount"])
    group = element(call(logical_id, ec2._create_placement_group(wanted)), "groupId")
    provisioners._ec2_apply_tags(group, properties)
    return name, {"GroupName": name}


def placement_group_update(
    name: str, old: Properties, new: Properties, _stack: str, _logical_id: str
) -> Result:
    group = existing(ec2._placement_groups, name, "placement group")
    provisioners._ec2_apply_tags(group["GroupId"], new, old)
    return name, {"GroupName": name}


def placement_group_delete(name: str, _properties: Properties) -> None:
    call(name, ec2._delete_placement_group({"GroupName": name}))


# --- AWS::EC2::SecurityGroupIngress and -Egress -------------------------------------------------
class SecurityGroupRule:
    """One rule of a group that is declared outside the group."""

    def __init__(self, *, is_egress: bool) -> None:
        self.is_egress = is_egress
        self.store = "IpPermissionsEgress" if is_egress else "IpPermissions"

    def create(self, logical_id: str, properties: Properties, _stack: str) -> Result:
        group_id = properties["GroupId"]
        group = existing(ec2._security_groups, group_id, f"{logical_id}: security group")
        rule = self._rule(properties)
        if not any(
            rule[peer] for peer in ("IpRanges", "Ipv6Ranges", "PrefixListIds", "UserIdGroupPairs")
        ):
            raise ValueError(f"{logical_id}: the rule names no peer (CidrIp, a security group ...)")
        if any(ec2._rules_match(rule, other) for other in group[self.store]):
            raise ValueError(f"{logical_id}: {group_id} has this rule already")
        rule["SecurityGroupRuleId"] = ec2._sg_rule_id(group_id, self.is_egress, rule)
        group[self.store] = [*group[self.store], rule]
        return rule["SecurityGroupRuleId"], {"Id": rule["SecurityGroupRuleId"]}

    def update(
        self, rule_id: str, _old: Properties, new: Properties, _stack: str, _logical_id: str
    ) -> Result:
        group = existing(ec2._security_groups, new["GroupId"], "security group")
        rule = {**self._rule(new), "SecurityGroupRuleId": rule_id}
        group[self.store] = [
            rule if other.get("SecurityGroupRuleId") == rule_id else other
            for other in group[self.store]
        ]
        return rule_id, {"Id": rule_id}

    def delete(self, rule_id: str, properties: Properties) -> None:
        group = ec2._security_groups.get(properties["GroupId"])
        if group is None:
            return  # a group takes its rules along
        rules = group[self.store]
        group[self.store] = [rule for rule in rules if rule.get("SecurityGroupRuleId") != rule_id]
        if len(group[self.store]) == len(rules):
            raise ValueError(f"{properties['GroupId']} has no rule {rule_id}")

    @staticmethod
    def _rule(properties: Properties) -> dict[str, Any]:
        protocol = str(properties["IpProtocol"])  # templates may say -1 instead of "-1"
        rules = provisioners._ec2_sg_permissions([{**properties, "IpProtocol": protocol}])
        rule: dict[str, Any] = rules[0]
        return rule


INGRESS = SecurityGroupRule(is_egress=False)
EGRESS = SecurityGroupRule(is_egress=True)


# --- AWS::EC2::FlowLog --------------------------------------------------------------------------
def flow_log_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    kind, resource = properties["ResourceType"], properties["ResourceId"]
    stores = {
        "VPC": ec2._vpcs,
        "Subnet": ec2._subnets,
        "NetworkInterface": ec2._network_interfaces,
    }
    if kind not in stores:
        raise ValueError(f"{logical_id}: ResourceType is {kind!r}, not one of {', '.join(stores)}")
    existing(stores[kind], resource, f"{logical_id}: {kind}")
    wanted = {"ResourceId.1": resource, "ResourceType": kind}
    for name in ("TrafficType", "LogDestinationType", "LogDestination", "LogGroupName"):
        if name in properties:
            wanted[name] = properties[name]
    call(logical_id, ec2._create_flow_logs(wanted))
    flow_log = str([*ec2._flow_logs][-1])
    provisioners._ec2_apply_tags(flow_log, properties)
    return flow_log, {"Id": flow_log}


def flow_log_delete(flow_log: str, _properties: Properties) -> None:
    existing(ec2._flow_logs, flow_log, "flow log")
    call(flow_log, ec2._delete_flow_logs({"FlowLogId.1": flow_log}))


# --- AWS::ECS::CapacityProvider -----------------------------------------------------------------
def capacity_provider_create(logical_id: str, properties: Properties, stack: str) -> Result:
    name = properties.get("Name") or provisioners._physical_name(stack, logical_id, max_len=255)
    if re.match("aws|ecs|fargate", name, re.IGNORECASE):
        raise ValueError(
            f"{logical_id}: a capacity provider cannot be called {name!r}: names that begin with "
            "aws, ecs or fargate are reserved"
        )
    request = {
        "name": name,
        "autoScalingGroupProvider": group_provider(logical_id, properties),
        "tags": provisioners._pascal_to_camel(properties.get("Tags") or []),
    }
    call(logical_id, ecs._create_capacity_provider(request))
    # Its API keeps only the members that it knows.
    ecs._capacity_providers[name]["autoScalingGroupProvider"] = request["autoScalingGroupProvider"]
    return name, {}


def capacity_provider_update(
    name: str, old: Properties, new: Properties, stack: str, logical_id: str
) -> Result:
    group = "AutoScalingGroupArn"
    if old["AutoScalingGroupProvider"][group] != new["AutoScalingGroupProvider"][group]:
        if new.get("Name"):
            raise ValueError(
                f"{logical_id}: another {group} needs another capacity provider, and {name!r} has "
                "a name of its own: rename it"
            )
        created: Result = provisioners._seeded_create(
            capacity_provider_create, logical_id, new, stack
        )
        return created
    record = existing(ecs._capacity_providers, name, "capacity provider")
    record["autoScalingGroupProvider"] = group_provider(logical_id, new)
    tags = ecs._tags.setdefault(record["capacityProviderArn"], [])
    provisioners._reconcile_tag_list(tags, old, new, key="key", value="value")
    return name, {}


def capacity_provider_delete(name: str, _properties: Properties) -> None:
    for cluster in ecs._clusters.values():
        if name in cluster["capacityProviders"]:
            raise ValueError(
                f"capacity provider {name} is in use by cluster {cluster['clusterName']}"
            )
    call(name, ecs._delete_capacity_provider({"capacityProvider": name}))


def group_provider(logical_id: str, properties: Properties) -> dict[str, Any]:
    """What ECS records of an Auto Scaling group, with its defaults. Refuses what ECS refuses."""
    wanted: dict[str, Any] = provisioners._pascal_to_camel(properties["AutoScalingGroupProvider"])
    arn = wanted["autoScalingGroupArn"]
    # The property takes a name as well as an ARN.
    groups = [
        group
        for group in autoscaling._asgs.values()
        if arn in (group["AutoScalingGroupARN"], group["AutoScalingGroupName"])
    ]
    if not groups:
        raise ValueError(f"{logical_id}: Auto Scaling group {arn!r} does not exist")
    provider = {
        "managedTerminationProtection": "DISABLED",
        "managedDraining": "ENABLED",
        **wanted,
        "autoScalingGroupArn": groups[0]["AutoScalingGroupARN"],
        "managedScaling": {
            "status": "DISABLED",
            "targetCapacity": 100,
            "minimumScalingStepSize": 1,
            "maximumScalingStepSize": 10000,
            "instanceWarmupPeriod": 300,
            **wanted.get("managedScaling", {}),
        },
    }
    if provider["managedTerminationProtection"] == "ENABLED":
        if provider["managedScaling"]["status"] != "ENABLED":
            raise ValueError(f"{logical_id}: termination protection needs managed scaling")
        if not provisioners._cfn_bool(groups[0]["NewInstancesProtectedFromScaleIn"]):
            raise ValueError(
                f"{logical_id}: termination protection needs NewInstancesProtectedFromScaleIn on "
                f"{groups[0]['AutoScalingGroupName']}"
            )
    return provider


# --- AWS::ECS::ClusterCapacityProviderAssociations ----------------------------------------------
def associations_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    cluster = properties["Cluster"]
    providers = properties["CapacityProviders"]
    strategy = provisioners._pascal_to_camel(properties["DefaultCapacityProviderStrategy"])
    for name in providers:
        if name not in ("FARGATE", "FARGATE_SPOT"):
            existing(ecs._capacity_providers, name, f"{logical_id}: capacity provider")
    for item in strategy:
        if item["capacityProvider"] not in providers:
            raise ValueError(
                f"{logical_id}: the default strategy names {item['capacityProvider']!r}, "
                f"CapacityProviders only {', '.join(providers) or 'none'}"
            )
    put_associations(cluster, providers, strategy)
    return cluster, {}


def associations_update(
    _cluster: str, _old: Properties, new: Properties, stack: str, logical_id: str
) -> Result:
    return associations_create(logical_id, new, stack)


def associations_delete(cluster: str, _properties: Properties) -> None:
    put_associations(cluster, [], [])


def put_associations(cluster: str, providers: list[str], strategy: list[dict[str, Any]]) -> None:
    request = {
        "cluster": cluster,
        "capacityProviders": providers,
        "defaultCapacityProviderStrategy": strategy,
    }
    call(cluster, ecs._put_cluster_capacity_providers(request))


# --- AWS::IAM::OIDCProvider ---------------------------------------------------------------------
def oidc_provider_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    url = properties["Url"]
    if not url.startswith("https://"):
        raise ValueError(f"{logical_id}: Url is {url!r}, and must begin with https://")
    xml = call(logical_id, iam._create_oidc_provider({"Url": url}))
    arn = element(xml, "OpenIDConnectProviderArn")
    fill_oidc_provider(arn, properties)
    return arn, {"Arn": arn}


def oidc_provider_update(
    arn: str, _old: Properties, new: Properties, _stack: str, _logical_id: str
) -> Result:
    fill_oidc_provider(arn, new)
    return arn, {"Arn": arn}


def fill_oidc_provider(arn: str, properties: Properties) -> None:
    existing(iam._oidc_providers, arn, "OIDC provider").update(
        ClientIDList=list(properties.get("ClientIdList") or []),
        ThumbprintList=list(properties.get("ThumbprintList") or []),
        Tags=list(properties.get("Tags") or []),
    )


def oidc_provider_delete(arn: str, _properties: Properties) -> None:
    call(arn, iam._delete_oidc_provider({"OpenIDConnectProviderArn": arn}))


# --- AWS::CloudWatch::CompositeAlarm ------------------------------------------------------------
def composite_alarm_create(logical_id: str, properties: Properties, stack: str) -> Result:
    name = properties.get("AlarmName") or provisioners._physical_name(
        stack, logical_id, max_len=255
    )
    return put_composite_alarm(name, properties)


def composite_alarm_update(
    name: str, _old: Properties, new: Properties, _stack: str, _logical_id: str
) -> Result:
    return put_composite_alarm(name, new)


def put_composite_alarm(name: str, properties: Properties) -> Result:
    request = {key: value for key, value in properties.items() if key != "Tags"}
    request |= {
        "AlarmName": name,
        "ActionsEnabled": provisioners._cfn_bool(properties.get("ActionsEnabled", True)),
    }
    call(name, cloudwatch._put_composite_alarm({}, request, False, is_json=True))
    arn = cloudwatch._composite_alarms[name]["AlarmArn"]
    # Not through the API, which refuses the tags that CloudFormation itself adds.
    cloudwatch._resource_tags[arn] = provisioners._tag_map(properties.get("Tags"))
    return name, {"Arn": arn}


def composite_alarm_delete(name: str, _properties: Properties) -> None:
    existing(cloudwatch._composite_alarms, name, "composite alarm")
    call(name, cloudwatch._delete_alarms({}, {"AlarmNames": [name]}, False, is_json=True))


# --- the table ----------------------------------------------------------------------------------
RULE_PEERS = ("CidrIp", "CidrIpv6", "FromPort", "ToPort", "GroupId", "IpProtocol")

#: Which property replaces what is as the CloudFormation reference says.
TYPES = {
    "AWS::EC2::EIP": Type(
        create=eip_create,
        update=tags_alone(eip_attributes),
        delete=eip_delete,
        replacing=("Domain", "NetworkBorderGroup"),
        in_place=("Tags",),
    ),
    "AWS::EC2::NatGateway": Type(
        create=nat_gateway_create,
        update=tags_alone(lambda gateway: {"NatGatewayId": gateway}),
        delete=nat_gateway_delete,
        required=("SubnetId",),
        replacing=("AllocationId", "ConnectivityType", "PrivateIpAddress", "SubnetId", "VpcId"),
        in_place=("MaxDrainDurationSeconds", "Tags"),
    ),
    "AWS::EC2::PlacementGroup": Type(
        create=placement_group_create,
        update=placement_group_update,
        delete=placement_group_delete,
        replacing=("PartitionCount", "SpreadLevel", "Strategy"),
        in_place=("Tags",),
    ),
    "AWS::EC2::SecurityGroupIngress": Type(
        create=INGRESS.create,
        update=INGRESS.update,
        delete=INGRESS.delete,
        required=("GroupId", "IpProtocol"),
        replacing=(
            *RULE_PEERS,
            "SourcePrefixListId",
            "SourceSecurityGroupId",
            "SourceSecurityGroupName",
            "SourceSecurityGroupOwnerId",
        ),
        in_place=("Description",),
    ),
    "AWS::EC2::SecurityGroupEgress": Type(
        create=EGRESS.create,
        update=EGRESS.update,
        delete=EGRESS.delete,
        required=("GroupId", "IpProtocol"),
        replacing=(*RULE_PEERS, "DestinationPrefixListId", "DestinationSecurityGroupId"),
        in_place=("Description",),
    ),
    "AWS::EC2::FlowLog": Type(
        create=flow_log_create,
        update=tags_alone(lambda flow_log: {"Id": flow_log}),
        delete=flow_log_delete,
        required=("ResourceId", "ResourceType"),
        replacing=(
            "DeliverCrossAccountRole",
            "DeliverLogsPermissionArn",
            "DestinationOptions",
            "LogDestination",
            "LogDestinationType",
            "LogFormat",
            "LogGroupName",
            "MaxAggregationInterval",
            "ResourceId",
            "ResourceType",
            "TrafficType",
        ),
        in_place=("Tags",),
    ),
    "AWS::ECS::CapacityProvider": Type(
        create=capacity_provider_create,
        update=capacity_provider_update,
        delete=capacity_provider_delete,
        required=("AutoScalingGroupProvider",),
        replacing=("Name",),
        in_place=("AutoScalingGroupProvider", "Tags"),
    ),
    "AWS::ECS::ClusterCapacityProviderAssociations": Type(
        create=associations_create,
        update=associations_update,
        delete=associations_delete,
        required=("CapacityProviders", "Cluster", "DefaultCapacityProviderStrategy"),
        replacing=("Cluster",),
        in_place=("CapacityProviders", "DefaultCapacityProviderStrategy"),
    ),
    "AWS::IAM::OIDCProvider": Type(
        create=oidc_provider_create,
        update=oidc_provider_update,
        delete=oidc_provider_delete,
        required=("Url",),
        replacing=("Url",),
        in_place=("ClientIdList", "Tags", "ThumbprintList"),
    ),
    "AWS::CloudWatch::CompositeAlarm": Type(
        create=composite_alarm_create,
        update=composite_alarm_update,
        delete=composite_alarm_delete,
        required=("AlarmRule",),
        replacing=("AlarmName",),
        in_place=(
            "ActionsEnabled",
            "ActionsSuppressor",
            "ActionsSuppressorExtensionPeriod",
            "ActionsSuppressorWaitPeriod",
            "AlarmActions",
            "AlarmDescription",
            "AlarmRule",
            "InsufficientDataActions",
            "OKActions",
            "Tags",
        ),
    ),
}


def checked(name: str, kind: Type) -> dict[str, Any]:
    """The handlers of a type, which first refuse properties that are missing or unknown."""

    def check(logical_id: str, properties: Properties) -> None:
        for required in kind.required:
            if required not in properties:
                raise ValueError(f"{name} {logical_id}: the property {required} is missing")
        for found in properties:
            if found not in (*kind.replacing, *kind.in_place):
                raise ValueError(f"{name} {logical_id}: the local AWS knows no property {found}")

    def create(logical_id: str, properties: Properties, stack: str) -> Result:
        check(logical_id, properties)
        return kind.create(logical_id, properties, stack)

    def update(
        physical_id: str, old: Properties, new: Properties, stack: str, logical_id: str
    ) -> Result:
        check(logical_id, new)
        return kind.update(physical_id, old, new, stack, logical_id)

    return {
        "create": create,
        "update": update,
        "update_with_logical_id": True,
        "delete": kind.delete,
    }


# --- mended ones --------------------------------------------------------------------------------
def mend_cluster_update() -> None:
    """An update of a cluster must not drop what other resources have associated with it."""
    handler = provisioners._RESOURCE_HANDLERS["AWS::ECS::Cluster"]
    stock = handler["update"]

    def update(
        physical_id: str, old: Properties, new: Properties, stack: str, logical_id: str
    ) -> Result:
        kept = dict(ecs._clusters.get(physical_id) or {})
        result: Result = stock(physical_id, old, new, stack, logical_id)
        if result[0] == physical_id and "CapacityProviders" not in {**old, **new}:
            for key in ("capacityProviders", "defaultCapacityProviderStrategy"):
                ecs._clusters[physical_id][key] = kept[key]
        return result

    handler["update"] = update


def mend_container_definitions() -> None:
    """Limits, health checks and secrets of a container must reach ECS as its API has them.

    Stock translates the names of a few members and leaves the others as the template writes them.
    """

    def normalize(definitions: list[Properties]) -> list[dict[str, Any]]:
        labels = "DockerLabels"  # its keys are the user's
        return [
            provisioners._pascal_to_camel({k: v for k, v in each.items() if k != labels})
            | ({"dockerLabels": each[labels]} if labels in each else {})
            for each in definitions
        ]

    provisioners._normalize_container_defs = normalize


def mend_service() -> None:
    """A service must keep its Cloud Map names and its right to a shell."""
    handler = provisioners._RESOURCE_HANDLERS["AWS::ECS::Service"]
    stock_create, stock_update = handler["create"], handler["update"]

    def keep(result: Result, properties: Properties) -> Result:
        cluster, name = result[0].split("/")[-2:]
        ecs._services[f"{cluster}/{name}"] |= {
            "serviceRegistries": provisioners._pascal_to_camel(
                properties.get("ServiceRegistries") or []
            ),
            "enableExecuteCommand": provisioners._cfn_bool(
                properties.get("EnableExecuteCommand", False)
            ),
            "enableECSManagedTags": provisioners._cfn_bool(
                properties.get("EnableECSManagedTags", False)
            ),
            "propagateTags": properties.get("PropagateTags", "NONE"),
        }
        return result

    def create(logical_id: str, properties: Properties, stack: str) -> Result:
        return keep(stock_create(logical_id, properties, stack), properties)

    def update(physical_id: str, old: Properties, new: Properties, stack: str) -> Result:
        return keep(stock_update(physical_id, old, new, stack), new)

    handler |= {"create": create, "update": update}


def mend_secret() -> None:
    """A reference to a secret is its ARN, and a generated one keeps to the characters allowed."""
    handler = provisioners._RESOURCE_HANDLERS["AWS::SecretsManager::Secret"]
    stock = dict(handler)
    stock_string = provisioners._sm_secret_string

    def name_of(arn: str) -> str:
        names = [name for name, each in secretsmanager._secrets.items() if each["ARN"] == arn]
        return names[0] if names else arn

    def create(logical_id: str, properties: Properties, stack: str) -> Result:
        _name, attributes = stock["create"](logical_id, properties, stack)
        return attributes["Arn"], attributes

    def update(arn: str, old: Properties, new: Properties, stack: str, logical_id: str) -> Result:
        _name, attributes = stock["update"](name_of(arn), old, new, stack, logical_id)
        return attributes["Arn"], attributes

    def generated(properties: Properties) -> str:
        wanted = dict(properties.get("GenerateSecretString") or {})
        if provisioners._cfn_bool(wanted.get("ExcludePunctuation", False)):
            wanted["ExcludeCharacters"] = wanted.get("ExcludeCharacters", "") + string.punctuation
            properties = {**properties, "GenerateSecretString": wanted}
        made: str = stock_string(properties)
        return made

    provisioners._sm_secret_string = generated
    handler |= {
        "create": create,
        "update": update,
        "delete": lambda arn, properties: stock["delete"](name_of(arn), properties),
    }


def mend_function_delete() -> None:
    """Deleting a Lambda function must end its worker process too."""
    handler = provisioners._RESOURCE_HANDLERS["AWS::Lambda::Function"]
    stock = handler["delete"]

    def delete(physical_id: str, properties: Properties) -> None:
        stock(physical_id, properties)
        lambda_runtime.invalidate_worker(physical_id, account=get_account_id(), region=get_region())

    handler["delete"] = delete


def mend_bucket() -> None:
    """A bucket must keep its tags, and must not be deleted while it holds objects.

    Both are what the CDK's emptying of buckets depends on: it looks at a tag, and without it a
    deployment on AWS could not be removed.
    """
    handler = provisioners._RESOURCE_HANDLERS["AWS::S3::Bucket"]
    stock_create, stock_update = handler["create"], handler["update"]

    def create(logical_id: str, properties: Properties, stack: str) -> Result:
        result: Result = stock_create(logical_id, properties, stack)
        s3._bucket_tags[result[0]] = provisioners._tag_map(properties.get("Tags"))
        return result

    def update(physical_id: str, old: Properties, new: Properties, stack: str) -> Result:
        result: Result = stock_update(physical_id, old, new, stack)
        s3._bucket_tags[result[0]] = provisioners._tag_map(new.get("Tags"))
        return result

    def delete(physical_id: str, _properties: Properties) -> None:
        if physical_id in s3._buckets:
            call(f"bucket {physical_id}", s3._delete_bucket(physical_id))

    handler |= {"create": create, "update": update, "delete": delete}
    provisioners._STACK_TAG_PROPERTY["AWS::S3::Bucket"] = ("Tags", "list")


def mend_custom_resources() -> None:
    """A custom resource whose function fails must fail at once.

    CloudFormation waits an hour for an answer that a crashed function cannot send; so does the
    emulator. Here the crash itself is the answer, with its message.
    """
    stock = lambda_svc._execute_function_with_config_scope

    def execute(function: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = stock(function, event)
        address = event.get("ResponseURL")
        if address and result.get("error"):
            # Does nothing if the function had answered before it failed.
            with custom_resource._lock:
                entry = custom_resource._pending.get(address.rsplit("/", 1)[-1])
                if entry is not None and entry["result"] is None:
                    reason = f"the function failed: {json.dumps(result.get('body'))}"
                    entry["result"] = {"Status": "FAILED", "Reason": reason}
                    entry["event"].set()
        return result

    lambda_svc._execute_function_with_config_scope = execute


def mend_alarm_on_expressions() -> None:
    """An alarm may watch an expression or a query; here it is a record that is never evaluated."""
    stock = provisioners._cw_metric_alarm_record

    def record(name: str, properties: Properties) -> dict[str, Any]:
        metrics = properties.get("Metrics")
        if not metrics:
            alarm: dict[str, Any] = stock(name, properties)
            return alarm
        stand_in = {"MetricName": "expression", "Namespace": "expression"}
        alarm = stock(name, {**properties, **stand_in, "Metrics": None})
        return alarm | {"Metrics": metrics, "MetricName": None, "Namespace": None}

    provisioners._cw_metric_alarm_record = record


def register() -> None:
    """Give the emulator the types above, and mend those that it has."""
    for name, kind in TYPES.items():
        if name in provisioners._RESOURCE_HANDLERS:
            raise RuntimeError(f"this emulator has a type {name} of its own")
        provisioners._RESOURCE_HANDLERS[name] = checked(name, kind)
        provisioners._REPLACING_PROPERTIES[name] = kind.replacing
        if "Tags" in kind.in_place:
            provisioners._STACK_TAG_PROPERTY[name] = ("Tags", "list")
    mend_cluster_update()
    mend_container_definitions()
    mend_service()
    mend_secret()
    mend_function_delete()
    mend_bucket()
    mend_alarm_on_expressions()
    mend_custom_resources()
