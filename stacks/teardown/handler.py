"""Lambda function: stop what CloudFormation would wait for when TrainingStack is deleted."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import cfnresponse

WHY = "TrainingStack is deleted"

ecs = boto3.client("ecs")
ec2 = boto3.client("ec2")
autoscaling = boto3.client("autoscaling")
states = boto3.client("stepfunctions")
functions = boto3.client("lambda")


def each(client: Any, call: str, key: str, **arguments: Any) -> Any:
    for page in client.get_paginator(call).paginate(**arguments):
        yield from page[key]


def wait(what: str, left: Any, context: Any) -> None:
    """Wait until `left()` is empty; leave time to answer."""
    while found := left():
        if context.get_remaining_time_in_millis() < 30_000:
            # CloudFormation takes an answer of 4,096 bytes.
            names, number = ", ".join(found[:10]), len(found)
            raise TimeoutError(f"{number} {what} still there: {names}{', ...' * (number > 10)}")
        time.sleep(5)


def stop_jobs(machine: str, keeper: str, context: Any) -> None:
    """End executions, and have the keeper write down that they have ended.

    One that waits would keep its deleted machine for as long, and the machine's name with it.
    """
    stopped: set[str] = set()

    def end(job: Any) -> None:
        arn = job["executionArn"]
        detail = {
            "name": job["name"],
            "status": "ABORTED",
            "input": states.describe_execution(executionArn=arn)["input"],
            "startDate": job["startDate"].timestamp() * 1000,
        }
        ended = states.stop_execution(executionArn=arn, cause=WHY)["stopDate"]
        detail["stopDate"] = ended.timestamp() * 1000
        event = {"detail-type": "Step Functions Execution Status Change", "detail": detail}
        functions.invoke(FunctionName=keeper, Payload=json.dumps(event).encode())
        stopped.add(job["name"])

    def left() -> list[str]:
        which = {"stateMachineArn": machine, "statusFilter": "RUNNING"}
        found = list(each(states, "list_executions", "executions", **which))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(end, [job for job in found if job["name"] not in stopped]))
        return [job["name"] for job in found]

    wait("jobs", left, context)


def stop_tasks(cluster: str, context: Any) -> None:
    def left() -> list[str]:
        # Each time: a job's head may start more.
        new, stopping = (
            list(each(ecs, "list_tasks", "taskArns", cluster=cluster, desiredStatus=status))
            for status in ("RUNNING", "STOPPED")
        )
        for task in new:
            ecs.stop_task(cluster=cluster, task=task, reason=WHY)
        both = list({*new, *stopping})
        return [
            task["taskArn"]
            for i in range(0, len(both), 100)
            for task in ecs.describe_tasks(cluster=cluster, tasks=both[i : i + 100])["tasks"]
            if task["lastStatus"] != "STOPPED"
        ]

    wait("tasks", left, context)


def forget(own: str) -> None:
    """Deregister the revisions that were kept for running jobs."""
    family = own.split("/")[-1].split(":")[0]
    for arn in each(ecs, "list_task_definitions", "taskDefinitionArns", familyPrefix=family):
        if arn != own:
            ecs.deregister_task_definition(taskDefinition=arn)


def terminate_hosts(cluster: str | None, groups: list[str], context: Any) -> None:
    """Without a cluster: of a pool. Its hosts leave the cluster when they end."""
    # By their tag too: a second try finds no group any more that would list them.
    which = {"tag:aws:autoscaling:groupName": groups}

    def left() -> list[str]:
        found: dict[str, str] = {}
        for name, values in which.items():
            only = [{"Name": name, "Values": values}]
            for page in each(ec2, "describe_instances", "Reservations", Filters=only):
                found |= {i["InstanceId"]: i["State"]["Name"] for i in page["Instances"]}
        return [host for host, state in found.items() if state != "terminated"]

    named = {"AutoScalingGroupNames": groups}
    for group in each(autoscaling, "describe_auto_scaling_groups", "AutoScalingGroups", **named):
        if hosts := [host["InstanceId"] for host in group["Instances"]]:
            which["instance-id"] = [*which.get("instance-id", []), *hosts]
        name = group["AutoScalingGroupName"]
        autoscaling.delete_auto_scaling_group(AutoScalingGroupName=name, ForceDelete=True)
    wait("hosts", left, context)
    if not cluster:
        return
    for arn in each(ecs, "list_container_instances", "containerInstanceArns", cluster=cluster):
        ecs.deregister_container_instance(cluster=cluster, containerInstance=arn, force=True)


def handler(event: dict[str, Any], context: Any) -> None:
    properties = event["ResourceProperties"]
    name = event.get("PhysicalResourceId") or event["LogicalResourceId"]
    status, reason = "SUCCESS", None
    old = event.get("OldResourceProperties", {})
    try:
        if old.get("SharedStorage") == "fsx" != properties["SharedStorage"]:
            found = boto3.client("cloudformation").describe_stacks(StackName=event["StackId"])
            # What rolls back only drops what it has just added.
            if "ROLLBACK" not in found["Stacks"][0]["StackStatus"]:
                raise ValueError(
                    "the shared file system would be deleted: give -c shared_storage=fsx, "
                    "or destroy this stack first"
                )
        if event["RequestType"] == "Delete":
            if properties["Action"] == "StopTasks":
                if "Machine" in properties:  # the first, as it may start tasks
                    stop_jobs(properties["Machine"], properties["Keeper"], context)
                stop_tasks(properties["Cluster"], context)
            else:
                terminate_hosts(properties.get("Cluster"), properties["Groups"], context)
            for arn in properties.get("Definitions", []):
                forget(arn)
    except Exception as error:  # CloudFormation waits for an answer
        status, reason = "FAILED", f"{type(error).__name__}: {error}"
    cfnresponse.send(event, context, status, {}, name, reason=reason)
