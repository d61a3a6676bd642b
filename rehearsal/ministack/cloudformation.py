"""CloudFormation in MiniStack: types that it lacks, and fixes of those that it has.

It assigns to MiniStack's table of handlers, whose shape is that of one version.
"""

import json
import re
import string
from collections.abc import Callable, Iterator
from typing import Any

from rehearsal.ministack import resource_types
from rehearsal.ministack.internals import (
    custom_resource,
    ecs,
    lambda_runtime,
    lambda_svc,
    provisioners,
    responses,
    s3,
    secretsmanager,
)
from rehearsal.ministack.resource_types import Properties, Result, call, checked
from rehearsal.models import faults, request_shape
from rehearsal.unwritten import NAMES, SIZES, refusals

TYPES = {
    **resource_types.EC2_TYPES,
    **resource_types.ECS_TYPES,
}


def install() -> None:
    """Give the emulator the types above, and fix those that it has."""
    for name, kind in TYPES.items():
        if name in provisioners._RESOURCE_HANDLERS:
            raise RuntimeError(f"this emulator has a type {name} of its own")
        provisioners._RESOURCE_HANDLERS[name] = checked(name, kind)
        provisioners._REPLACING_PROPERTIES[name] = kind.replacing
        if "Tags" in kind.in_place:
            provisioners._STACK_TAG_PROPERTY[name] = ("Tags", "list")
    fix_container_definitions()
    fix_service()
    fix_secret()
    fix_alarm()
    fix_function_delete()
    fix_bucket()
    fix_custom_resources()
    refuse_unwritten()


def refuse_unwritten() -> None:
    """Names and sizes that no schema refuses, and AWS does."""
    for kind in NAMES.keys() | SIZES.keys():
        if handler := provisioners._RESOURCE_HANDLERS.get(kind):
            handler["create"] = _refusing(kind, handler["create"])


def _refusing(kind: str, stock: Callable[..., Result]) -> Callable[..., Result]:
    def create(logical_id: str, properties: Properties, stack: str, *more: Any) -> Result:
        if found := [*refusals(kind, logical_id, properties, stack)]:
            raise ValueError("; ".join(found))
        return stock(logical_id, properties, stack, *more)

    return create


def fix_container_definitions() -> None:
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


def fix_service() -> None:
    """A service must keep its Cloud Map names and its right to a shell."""

    def keep(arn: str, properties: Properties) -> None:
        cluster, name = arn.split("/")[-2:]
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

    add_to("AWS::ECS::Service", keep)


def add_to(name: str, keep: Callable[[str, Properties], None]) -> None:
    """Do more where a resource of a type is made or changed.

    Args:
        keep: called with its physical id and its properties, after the stock handler.
    """
    handler = provisioners._RESOURCE_HANDLERS[name]
    stock_create, stock_update = handler["create"], handler["update"]

    def create(logical_id: str, properties: Properties, stack: str) -> Result:
        result: Result = stock_create(logical_id, properties, stack)
        keep(result[0], properties)
        return result

    def update(physical_id: str, old: Properties, new: Properties, stack: str) -> Result:
        result: Result = stock_update(physical_id, old, new, stack)
        keep(result[0], new)
        return result

    handler |= {"create": create, "update": update}


def fix_secret() -> None:
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


#: What an alarm on ``Metrics`` has in their members instead.
OF_ONE_METRIC = frozenset(
    ["MetricName", "Namespace", "Dimensions", "Period", "Statistic", "ExtendedStatistic", "Unit"]
)


def fix_alarm() -> None:
    """An alarm may watch a query or metric math, which stock refuses, and which it never evaluates.

    As for an alarm on one metric, an update keeps the state.
    """
    stock = provisioners._cw_metric_alarm_record

    def record(name: str, properties: Properties) -> dict[str, Any]:
        metrics = properties.get("Metrics")
        if metrics is None:
            found: dict[str, Any] = stock(name, properties)
            return found
        if refused := [*refused_in_alarm(name, properties)]:
            raise ValueError(f"alarm {name}: {'; '.join(refused)}")
        without = {"Metrics": None, "MetricName": "-", "Namespace": "-"}
        found = stock(name, properties | without)
        return {key: found[key] for key in found if key not in OF_ONE_METRIC} | {"Metrics": metrics}

    provisioners._cw_metric_alarm_record = record


def refused_in_alarm(name: str, properties: Properties) -> Iterator[str]:
    """Faults that CloudWatch finds in an alarm on ``Metrics``, by its model of the request and by
    the references of PutMetricAlarm and MetricDataQuery."""
    metrics = properties["Metrics"]
    if found := faults(
        request_shape("cloudwatch", "PutMetricAlarm"), {"AlarmName": name, **properties}
    ):
        yield from found
        return
    for mixed in sorted(OF_ONE_METRIC & properties.keys()):
        yield f"{mixed} is given beside Metrics"
    ids = [each["Id"] for each in metrics]
    if len({*ids}) < len(ids) or not all(re.fullmatch(r"[a-z]\w*", each) for each in ids):
        yield f"not different ids that begin with a small letter: {', '.join(ids)}"
    if [each.get("ReturnData", True) for each in metrics].count(True) != 1:
        yield "not exactly one member of Metrics has ReturnData"
    for each in metrics:
        expression = each.get("Expression", "")
        if ("Expression" in each) == ("MetricStat" in each):
            yield f"{each['Id']} needs either Expression or MetricStat"
        if "SEARCH(" in expression:
            yield f"{each['Id']} is a search, which no alarm takes"
        period = each.get("Period") or each.get("MetricStat", {}).get("Period")
        if period is None and expression.startswith("SELECT"):
            yield f"{each['Id']} is a query without a Period"
        elif period not in (None, 10, 20, 30) and period % 60:
            yield f"{each['Id']} has the Period {period}: 10, 20, 30 or a multiple of 60"


def fix_function_delete() -> None:
    """Deleting a Lambda function must end its worker process too."""
    handler = provisioners._RESOURCE_HANDLERS["AWS::Lambda::Function"]
    stock = handler["delete"]

    def delete(physical_id: str, properties: Properties) -> None:
        stock(physical_id, properties)
        lambda_runtime.invalidate_worker(
            physical_id, account=responses.get_account_id(), region=responses.get_region()
        )

    handler["delete"] = delete


def fix_bucket() -> None:
    """A bucket must keep its tags, and must not be deleted while it holds objects.

    Both are what the CDK's emptying of buckets depends on: it looks at a tag, and without it a
    deployment on AWS could not be removed.
    """

    def keep(name: str, properties: Properties) -> None:
        s3._bucket_tags[name] = provisioners._tag_map(properties.get("Tags"))

    def delete(physical_id: str, _properties: Properties) -> None:
        if physical_id in s3._buckets:
            call(f"bucket {physical_id}", s3._delete_bucket(physical_id))

    add_to("AWS::S3::Bucket", keep)
    provisioners._RESOURCE_HANDLERS["AWS::S3::Bucket"]["delete"] = delete
    provisioners._STACK_TAG_PROPERTY["AWS::S3::Bucket"] = ("Tags", "list")


def fix_custom_resources() -> None:
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
