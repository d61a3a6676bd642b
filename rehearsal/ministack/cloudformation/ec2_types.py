"""Types of EC2: addresses, NAT gateways, placement groups, rules of security groups, flow logs.

Each records what its API would record, refuses what AWS refuses where a template of ours could get
it wrong, and removes on delete what it made.
"""

from collections.abc import Callable
from typing import Any

from rehearsal.ministack.cloudformation.resource_type import (
    Properties,
    Result,
    Type,
    call,
    element,
    existing,
)
from rehearsal.ministack.internals import ec2, provisioners


def update_tags(
    attributes: Callable[[str], dict[str, Any]],
) -> Callable[[str, Properties, Properties, str, str], Result]:
    """An update for the types of which only the tags change in place."""

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


# --- the table ----------------------------------------------------------------------------------
RULE_PEERS = ("CidrIp", "CidrIpv6", "FromPort", "ToPort", "GroupId", "IpProtocol")

#: Which property replaces what is as the CloudFormation reference says.
TYPES = {
    "AWS::EC2::EIP": Type(
        create=eip_create,
        update=update_tags(eip_attributes),
        delete=eip_delete,
        replacing=("Domain", "NetworkBorderGroup"),
        in_place=("Tags",),
    ),
    "AWS::EC2::NatGateway": Type(
        create=nat_gateway_create,
        update=update_tags(lambda gateway: {"NatGatewayId": gateway}),
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
        update=update_tags(lambda flow_log: {"Id": flow_log}),
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
}
