"""CloudFormation types that the emulator lacks: those of EC2 and ECS, and their common parts.

A handler is ``create(logical_id, properties, stack) -> (physical id, attributes)``,
``update(physical_id, old, new, stack, logical_id)`` for changes in place, with the same result, and
``delete(physical_id, properties)``. What replaces a resource is in its ``Type``: the engine then
makes the new one, and deletes the old one after the stack is updated. A change in place that no
deployment of ours makes is refused. Each type records what its
API would record, and removes on delete what it made. What AWS would refuse in a template is
cfn-lint's matter (tests/stacks/test_rules.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rehearsal.ministack.internals import autoscaling, ec2, ecs, provisioners

Properties = dict[str, Any]
Result = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Type:
    """Handlers of one CloudFormation type, and what AWS documents about its properties."""

    create: Callable[[str, Properties, str], Result]
    delete: Callable[[str, Properties], None]
    update: Callable[[str, Properties, Properties, str, str], Result] | None = None
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


def checked(name: str, kind: Type) -> dict[str, Any]:
    """The handlers of a type, which first refuse properties that they do not know."""

    def check(logical_id: str, properties: Properties) -> None:
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
        if kind.update is None:
            raise ValueError(f"{name} {logical_id}: the local AWS cannot change it in place")
        return kind.update(physical_id, old, new, stack, logical_id)

    return {
        "create": create,
        "update": update,
        "update_with_logical_id": True,
        "delete": kind.delete,
    }


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
    wanted = {name: properties[name] for name in ("SubnetId", "AllocationId")}
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
    wanted = {"GroupName": name, "Strategy": properties["Strategy"]}
    group = element(call(logical_id, ec2._create_placement_group(wanted)), "groupId")
    provisioners._ec2_apply_tags(group, properties)
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
        rule["SecurityGroupRuleId"] = ec2._sg_rule_id(group_id, self.is_egress, rule)
        group[self.store] = [*group[self.store], rule]
        return rule["SecurityGroupRuleId"], {"Id": rule["SecurityGroupRuleId"]}

    def delete(self, rule_id: str, properties: Properties) -> None:
        group = ec2._security_groups.get(properties["GroupId"])
        if group is None:
            return  # a group takes its rules along
        rules = group[self.store]
        group[self.store] = [rule for rule in rules if rule.get("SecurityGroupRuleId") != rule_id]

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
    wanted = {
        "ResourceId.1": properties["ResourceId"],
        "ResourceType": properties["ResourceType"],
    }
    for name in ("TrafficType", "LogDestinationType", "LogDestination", "LogGroupName"):
        if name in properties:
            wanted[name] = properties[name]
    call(logical_id, ec2._create_flow_logs(wanted))
    flow_log = str([*ec2._flow_logs][-1])
    provisioners._ec2_apply_tags(flow_log, properties)
    return flow_log, {"Id": flow_log}


def flow_log_delete(flow_log: str, _properties: Properties) -> None:
    call(flow_log, ec2._delete_flow_logs({"FlowLogId.1": flow_log}))


# --- the table ----------------------------------------------------------------------------------
RULE_PEERS = ("CidrIp", "CidrIpv6", "FromPort", "ToPort", "GroupId", "IpProtocol")

#: Which property replaces what is as the CloudFormation reference says.
EC2_TYPES = {
    "AWS::EC2::EIP": Type(
        create=eip_create,
        delete=eip_delete,
        replacing=("Domain", "NetworkBorderGroup"),
        in_place=("Tags",),
    ),
    "AWS::EC2::NatGateway": Type(
        create=nat_gateway_create,
        delete=nat_gateway_delete,
        replacing=("AllocationId", "ConnectivityType", "PrivateIpAddress", "SubnetId", "VpcId"),
        in_place=("MaxDrainDurationSeconds", "Tags"),
    ),
    "AWS::EC2::PlacementGroup": Type(
        create=placement_group_create,
        delete=placement_group_delete,
        replacing=("PartitionCount", "SpreadLevel", "Strategy"),
        in_place=("Tags",),
    ),
    "AWS::EC2::SecurityGroupIngress": Type(
        create=INGRESS.create,
        delete=INGRESS.delete,
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
        delete=EGRESS.delete,
        replacing=(*RULE_PEERS, "DestinationPrefixListId", "DestinationSecurityGroupId"),
        in_place=("Description",),
    ),
    "AWS::EC2::FlowLog": Type(
        create=flow_log_create,
        delete=flow_log_delete,
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
}


# --- AWS::ECS::CapacityProvider -----------------------------------------------------------------
def capacity_provider_create(logical_id: str, properties: Properties, stack: str) -> Result:
    name = properties.get("Name") or provisioners._physical_name(stack, logical_id, max_len=255)
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
    name: str, _old: Properties, new: Properties, _stack: str, logical_id: str
) -> Result:
    record = existing(ecs._capacity_providers, name, "capacity provider")
    record["autoScalingGroupProvider"] = group_provider(logical_id, new)
    return name, {}


def capacity_provider_delete(name: str, _properties: Properties) -> None:
    for cluster in ecs._clusters.values():
        if name in cluster["capacityProviders"]:
            raise ValueError(
                f"capacity provider {name} is in use by cluster {cluster['clusterName']}"
            )
    call(name, ecs._delete_capacity_provider({"capacityProvider": name}))


def group_provider(logical_id: str, properties: Properties) -> dict[str, Any]:
    """Auto Scaling group settings of an ECS capacity provider, with defaults."""
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
    return {
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


# --- AWS::ECS::ClusterCapacityProviderAssociations ----------------------------------------------
def associations_create(_logical_id: str, properties: Properties, _stack: str) -> Result:
    cluster = properties["Cluster"]
    providers = properties["CapacityProviders"]
    strategy = provisioners._pascal_to_camel(properties["DefaultCapacityProviderStrategy"])
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


# --- the table ----------------------------------------------------------------------------------
#: Which property replaces what is as the CloudFormation reference says.
ECS_TYPES = {
    "AWS::ECS::CapacityProvider": Type(
        create=capacity_provider_create,
        update=capacity_provider_update,
        delete=capacity_provider_delete,
        replacing=("Name",),
        in_place=("AutoScalingGroupProvider", "Tags"),
    ),
    "AWS::ECS::ClusterCapacityProviderAssociations": Type(
        create=associations_create,
        update=associations_update,
        delete=associations_delete,
        replacing=("Cluster",),
        in_place=("CapacityProviders", "DefaultCapacityProviderStrategy"),
    ),
}
