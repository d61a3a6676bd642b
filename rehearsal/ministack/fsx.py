"""FSx for Lustre, which the emulator lacks: file systems, links with buckets, exports, as records.

Nothing can be mounted, so no file is ever written. How many files an export could not write is what
the file system's tag ``rehearsal:unexported`` says. Imported inside ``.venv-aws`` only.
"""

import json
import uuid
from collections.abc import Callable
from typing import Any

from rehearsal.ministack.internals import app, ec2, iam_actions, provisioners, responses, router, s3
from rehearsal.ministack.resource_types import Properties, Result, Type, existing
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


LUSTRE = 988  # the port by which servers and clients of Lustre talk


# --- AWS::FSx::FileSystem -------------------------------------------------------------------------
def _check(logical_id: str, properties: Properties) -> None:
    lustre = properties.get("LustreConfiguration", {})
    if properties["FileSystemType"] != "LUSTRE" or len(properties["SubnetIds"]) != 1:
        raise ValueError(f"{logical_id}: Lustre in one subnet is all that the local AWS has")
    gib, kind = int(properties["StorageCapacity"]), lustre.get("DeploymentType", "SCRATCH_1")
    if gib != 1200 and gib % 2400:
        raise ValueError(f"{logical_id}: StorageCapacity is {gib}: 1200 or a multiple of 2400")
    of_persistent = {"PerUnitStorageThroughput", "AutomaticBackupRetentionDays"} & {*lustre}
    if kind.startswith("SCRATCH") and of_persistent:
        raise ValueError(f"{logical_id}: {kind} takes no {', '.join(sorted(of_persistent))}")
    if kind.startswith("PERSISTENT") and "PerUnitStorageThroughput" not in lustre:
        raise ValueError(f"{logical_id}: {kind} needs PerUnitStorageThroughput")


def _reaches_itself(group: dict[str, Any], rules: str) -> bool:
    return any(
        int(rule.get("FromPort", 0)) <= LUSTRE <= int(rule.get("ToPort", 65535))
        and any(pair.get("GroupId") == group["GroupId"] for pair in rule["UserIdGroupPairs"])
        for rule in group[rules]
    )


def file_system_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    _check(logical_id, properties)
    existing(ec2._subnets, properties["SubnetIds"][0], f"{logical_id}: subnet")
    for name in properties["SecurityGroupIds"]:
        group = existing(ec2._security_groups, name, f"{logical_id}: security group")
        if not all(
            _reaches_itself(group, each) for each in ("IpPermissions", "IpPermissionsEgress")
        ):
            raise ValueError(f"{logical_id}: {name} does not let Lustre through, port {LUSTRE}")
    files = new_id("fs")
    file_systems[files] = {
        "FileSystemId": files,
        "FileSystemType": "LUSTRE",
        "Lifecycle": "AVAILABLE",
        "LustreConfiguration": {
            "DeploymentType": properties["LustreConfiguration"]["DeploymentType"]
        },
        "StorageCapacity": int(properties["StorageCapacity"]),
        "SubnetIds": properties["SubnetIds"],
        "ResourceARN": arn(f"file-system/{files}"),
        "Tags": provisioners._tag_map(properties.get("Tags", [])),
    }
    return files, file_system_attributes(files)


def file_system_attributes(files: str) -> dict[str, Any]:
    record = existing(file_systems, files, "file system")
    return {
        "Id": files,
        "DNSName": f"{files}.fsx.local",
        "LustreMountName": "abcdefgh",
        "ResourceARN": record["ResourceARN"],
    }


def file_system_update(
    files: str, old: Properties, new: Properties, _stack: str, logical_id: str
) -> Result:
    _check(logical_id, new)
    before, after = (each["LustreConfiguration"].get("DeploymentType") for each in (old, new))
    if before != after:
        raise ValueError(f"{logical_id}: {files} is {before} and cannot become {after}")
    if int(new["StorageCapacity"]) < int(old["StorageCapacity"]):
        raise ValueError(f"{logical_id}: {files} cannot become smaller")
    file_systems[files]["StorageCapacity"] = int(new["StorageCapacity"])
    return files, file_system_attributes(files)


def file_system_delete(files: str, _properties: Properties) -> None:
    existing(file_systems, files, "file system")
    for task in tasks.values():
        if task["FileSystemId"] == files and task["Lifecycle"] in ACTIVE:
            raise ValueError(f"{files} has a task: {task['TaskId']} is {task['Lifecycle']}")
    if found := links_of(files):
        # Their content would not be exported any more; the order of a stack's deletion shows it.
        raise ValueError(f"{files} is linked: {found[0]['AssociationId']}")
    del file_systems[files]


# --- AWS::FSx::DataRepositoryAssociation ----------------------------------------------------------
def link_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    files, place = properties["FileSystemId"], properties["DataRepositoryPath"]
    existing(file_systems, files, f"{logical_id}: file system")
    bucket = place.removeprefix("s3://").partition("/")[0]
    existing(s3._buckets, bucket, f"{logical_id}: bucket")
    if properties["FileSystemPath"] == "/" and links_of(files):
        raise ValueError(f"{logical_id}: {files} is linked, and / takes one link only")
    name = new_id("dra")
    links[name] = {
        "AssociationId": name,
        "ResourceARN": arn(f"association/{files}/{name}"),
        "FileSystemId": files,
        "Lifecycle": "AVAILABLE",
        "FileSystemPath": properties["FileSystemPath"],
        "DataRepositoryPath": place,
        "S3": properties.get("S3", {}),
    }
    return name, link_attributes(name)


def link_attributes(name: str) -> dict[str, Any]:
    record = existing(links, name, "association")
    return {"AssociationId": name, "ResourceARN": record["ResourceARN"]}


def link_update(
    name: str, _old: Properties, new: Properties, _stack: str, _logical_id: str
) -> Result:
    existing(links, name, "association")["S3"] = new.get("S3", {})
    return name, link_attributes(name)


def link_delete(name: str, _properties: Properties) -> None:
    existing(links, name, "association")
    del links[name]


#: Which property replaces what is as the schemas of CloudFormation say.
FSX_TYPES = {
    "AWS::FSx::FileSystem": Type(
        create=file_system_create,
        update=file_system_update,
        delete=file_system_delete,
        required=("FileSystemType", "SubnetIds"),
        replacing=("BackupId", "FileSystemType", "KmsKeyId", "SecurityGroupIds", "SubnetIds"),
        in_place=("FileSystemTypeVersion", "LustreConfiguration", "StorageCapacity", "Tags"),
    ),
    "AWS::FSx::DataRepositoryAssociation": Type(
        create=link_create,
        update=link_update,
        delete=link_delete,
        required=("FileSystemId", "FileSystemPath", "DataRepositoryPath"),
        replacing=(
            "BatchImportMetaDataOnCreate",
            "DataRepositoryPath",
            "FileSystemId",
            "FileSystemPath",
        ),
        in_place=("ImportedFileChunkSize", "S3", "Tags"),
    ),
}
