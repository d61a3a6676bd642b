"""Types of ECS: capacity providers, and which of them a cluster uses."""

import re
from typing import Any

from rehearsal.ministack.cloudformation.resource_type import (
    Properties,
    Result,
    Type,
    call,
    existing,
)
from rehearsal.ministack.internals import autoscaling, ecs, provisioners


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


# --- the table ----------------------------------------------------------------------------------
#: Which property replaces what is as the CloudFormation reference says.
TYPES = {
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
}
