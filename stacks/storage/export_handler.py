"""Lambda function: export the shared file system's new files to the bucket before it is deleted.

Inline code: boto3 and cfnresponse. An export that takes longer than this function may goes on
without it, and the next deletion waits for the same one.
"""

import time
from typing import Any

import boto3
import cfnresponse

fsx = boto3.client("fsx")


def wait(context: Any) -> None:
    if context.get_remaining_time_in_millis() < 45_000:
        raise TimeoutError("the export takes longer than this function may: delete the stack again")
    time.sleep(5)


def only(files: str) -> list[dict[str, str | list[str]]]:
    return [{"Name": "file-system-id", "Values": [files]}]


def link(files: str) -> dict[str, Any] | None:
    found = fsx.describe_data_repository_associations(Filters=only(files))["Associations"]
    return found[0] if found else None


def set_link(files: str, policies: dict[str, Any], context: Any) -> None:
    """FSx exports by itself or when it is asked, and not both."""
    found = link(files)
    assert found
    fsx.update_data_repository_association(AssociationId=found["AssociationId"], S3=policies)
    while (found := link(files)) and found["Lifecycle"] in ("UPDATING", "CREATING"):
        wait(context)


def export(files: str, reports: str, context: Any) -> None:
    """Write all; raises RuntimeError if some files are not in the bucket."""
    report = {"Enabled": True, "Path": reports, "Scope": "FAILED_FILES_ONLY"}
    active = [{"Name": "task-lifecycle", "Values": ["PENDING", "EXECUTING"]}]
    tasks = fsx.describe_data_repository_tasks(Filters=[*only(files), *active])
    if tasks["DataRepositoryTasks"]:
        task = tasks["DataRepositoryTasks"][0]
    else:
        task = fsx.create_data_repository_task(
            Type="EXPORT_TO_REPOSITORY",
            FileSystemId=files,
            Report={**report, "Format": "REPORT_CSV_20191124"},
        )["DataRepositoryTask"]
    while task["Lifecycle"] in ("PENDING", "EXECUTING", "CANCELING"):
        wait(context)
        found = fsx.describe_data_repository_tasks(TaskIds=[task["TaskId"]])
        task = found["DataRepositoryTasks"][0]
    left = task.get("Status", {}).get("FailedCount", 0)
    if task["Lifecycle"] != "SUCCEEDED" or left:
        why = task.get("FailureDetails", {}).get("Message", "")
        raise RuntimeError(
            f"{left} files of {files} are not in the bucket: {reports} lists them. {why}"
        )


def handler(event: dict[str, Any], context: Any) -> None:
    properties, kind = event["ResourceProperties"], event["RequestType"]
    files, name = properties["FileSystem"], event["LogicalResourceId"]
    status, reason = cfnresponse.SUCCESS, None
    try:
        if kind == "Delete" and (linked := link(files)):
            policies = linked.get("S3", {})
            set_link(files, {**policies, "AutoExportPolicy": {"Events": []}}, context)
            try:
                export(files, properties["Reports"], context)
            except RuntimeError:
                # Not what was there: an export that takes several deletions has left none.
                exports = {"Events": properties["Exports"]}
                set_link(files, {**policies, "AutoExportPolicy": exports}, context)
                raise
    except Exception as error:  # CloudFormation waits for an answer
        stack = event["StackId"].split("/")[1]
        reason = f"{type(error).__name__}: {error}"
        if kind == "Delete":
            reason += (
                " Delete the stack again to try again, or, to lose these files: aws cloudformation"
                f" delete-stack --stack-name {stack} --retain-resources {name}"
            )
        status = cfnresponse.FAILED
        print(reason)
    # By the id of the file system: one that is replaced by an update is exported, too.
    cfnresponse.send(event, context, status, {}, files, reason=reason)
