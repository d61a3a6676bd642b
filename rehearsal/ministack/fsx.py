"""FSx for Lustre, which the emulator lacks: file systems, links with buckets, exports, as records.

Nothing can be mounted, so no file is ever written. How many files an export could not write is what
the file system's tag ``rehearsal:unexported`` says. Imported inside ``.venv-aws`` only.
"""

import json
import uuid
from collections.abc import Callable
from typing import Any

from rehearsal.ministack.internals import app, iam_actions, responses, router
from rehearsal.policies import Call

SERVICE = "fsx"
TARGET = "AWSSimbaAPIService_v20180301."
UNEXPORTED = "rehearsal:unexported"
ACTIVE = ("PENDING", "EXECUTING")

Record = dict[str, Any]

file_systems: dict[str, Record] = {}
links: dict[str, Record] = {}
tasks: dict[str, Record] = {}


class FsxError(Exception):
    """What FSx answers to a request that it does not take: the name of the error, and why."""


def new_id(kind: str) -> str:
    """An id as FSx makes them: ``fs-`` and 17 hexadecimal digits."""
    return f"{kind}-{uuid.uuid4().hex[:17]}"


def arn(resource: str) -> str:
    """Of a file system, link or task."""
    region, account = responses.get_region(), responses.get_account_id()
    return f"arn:aws:fsx:{region}:{account}:{resource}"


def links_of(file_system: str) -> list[Record]:
    """Its links with buckets."""
    return [each for each in links.values() if each["FileSystemId"] == file_system]


# --- requests -------------------------------------------------------------------------------------
def _wanted(given: Record, name: str) -> list[str]:
    found: list[str] = []
    for each in given.get("Filters", []):
        if each["Name"] == name:
            found += each["Values"]
    return found


def _describe_links(given: Record) -> Record:
    ids, of = given.get("AssociationIds"), _wanted(given, "file-system-id")
    found = [
        each
        for each in links.values()
        if (not ids or each["AssociationId"] in ids) and (not of or each["FileSystemId"] in of)
    ]
    answer = {"Associations": [dict(each) for each in found]}
    for each in found:
        each["Lifecycle"] = "AVAILABLE"  # a change is over when it has been seen once
    return answer


def _update_link(given: Record) -> Record:
    link = links.get(given["AssociationId"])
    if link is None:
        raise FsxError("DataRepositoryAssociationNotFound", given["AssociationId"])
    link |= {"S3": given.get("S3", link["S3"]), "Lifecycle": "UPDATING"}
    return {"Association": link}


def _create_task(given: Record) -> Record:
    files = given["FileSystemId"]
    if files not in file_systems:
        raise FsxError("FileSystemNotFound", files)
    for link in links_of(files):
        if link["S3"].get("AutoExportPolicy", {}).get("Events"):
            raise FsxError("BadRequest", f"{files} exports by itself: no task can export it")
        if link["Lifecycle"] != "AVAILABLE":
            raise FsxError("BadRequest", f"{link['AssociationId']} is {link['Lifecycle']}")
    if not links_of(files):
        raise FsxError("BadRequest", f"{files} is linked with no bucket")
    if any(
        each["FileSystemId"] == files and each["Lifecycle"] in ACTIVE for each in tasks.values()
    ):
        raise FsxError("DataRepositoryTaskExecuting", files)
    name = new_id("task")
    tasks[name] = {
        "TaskId": name,
        "Lifecycle": "PENDING",
        "Type": given["Type"],
        "CreationTime": 0,
        "FileSystemId": files,
        "Report": given["Report"],
        "ResourceARN": arn(f"task/{name}"),
    }
    return {"DataRepositoryTask": tasks[name]}


def _describe_tasks(given: Record) -> Record:
    ids = given.get("TaskIds")
    of, states = _wanted(given, "file-system-id"), _wanted(given, "task-lifecycle")
    found = []
    for each in tasks.values():
        if each["Lifecycle"] in ACTIVE and ids:
            # A step further each time that it is looked at.
            each["Lifecycle"] = "EXECUTING" if each["Lifecycle"] == "PENDING" else "SUCCEEDED"
            failed = int(file_systems[each["FileSystemId"]]["Tags"].get(UNEXPORTED, 0))
            each["Status"] = {"TotalCount": 100, "FailedCount": failed}
        if (
            (not ids or each["TaskId"] in ids)
            and (not of or each["FileSystemId"] in of)
            and (not states or each["Lifecycle"] in states)
        ):
            found.append(each)
    return {"DataRepositoryTasks": found}


def _describe_file_systems(given: Record) -> Record:
    for name in (wanted := given.get("FileSystemIds") or [*file_systems]):
        if name not in file_systems:
            raise FsxError("FileSystemNotFound", name)
    return {
        "FileSystems": [
            {**each, "Tags": [{"Key": key, "Value": value} for key, value in each["Tags"].items()]}
            for each in map(file_systems.__getitem__, wanted)
        ]
    }


def _tag(given: Record) -> Record:
    record = file_systems[given["ResourceARN"].rpartition("/")[2]]
    record["Tags"] |= {each["Key"]: each["Value"] for each in given["Tags"]}
    return {}


ACTIONS: dict[str, Callable[[Record], Record]] = {
    "CreateDataRepositoryTask": _create_task,
    "DescribeDataRepositoryAssociations": _describe_links,
    "DescribeDataRepositoryTasks": _describe_tasks,
    "DescribeFileSystems": _describe_file_systems,
    "TagResource": _tag,
    "UpdateDataRepositoryAssociation": _update_link,
}


async def handle(
    _method: str, _path: str, headers: dict[str, str], body: bytes, _query: Record
) -> tuple[int, dict[str, str], bytes]:
    """Answer one request."""
    action = headers.get("x-amz-target", "").removeprefix(TARGET)
    answer = {"Content-Type": "application/x-amz-json-1.1"}
    try:
        if action not in ACTIONS:
            raise FsxError("UnsupportedOperation", f"the local AWS has no {action} of FSx")
        found = ACTIONS[action](json.loads(body or b"{}"))
    except FsxError as error:
        name, why = error.args
        return 400, answer, json.dumps({"__type": name, "Message": f"{name}: {why}"}).encode()
    return 200, answer, json.dumps(found).encode()


def calls(caller: str, action: str, given: Record) -> list[Call]:
    """What policies name as the resources of a request."""
    match action:
        case "fsx:CreateDataRepositoryTask":
            on = [arn(f"file-system/{given['FileSystemId']}"), arn("task/new")]
        case "fsx:UpdateDataRepositoryAssociation":
            link = links.get(given["AssociationId"], {})
            on = [link.get("ResourceARN", "*")]
        case _:
            on = ["*"]
    return [Call(caller=caller, action=action, resource=each) for each in on]


def install() -> None:
    """Give the emulator this service."""
    if SERVICE in app.SERVICE_HANDLERS:
        raise RuntimeError("this emulator has FSx of its own")
    app.SERVICE_HANDLERS[SERVICE] = handle
    router.SERVICE_PATTERNS[SERVICE] = {"target_prefixes": [TARGET]}
    iam_actions.SERVICE_TO_IAM_NAMESPACE[SERVICE] = SERVICE
