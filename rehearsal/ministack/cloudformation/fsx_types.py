"""Types of FSx: file systems and their links with buckets, as records of ``ministack.fsx``.

They refuse what FSx refuses where a template of ours could get it wrong.
"""

from typing import Any

from rehearsal.ministack import fsx
from rehearsal.ministack.cloudformation.resource_type import Properties, Result, Type, existing
from rehearsal.ministack.internals import ec2, provisioners, s3

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
    files = fsx.new_id("fs")
    fsx.file_systems[files] = {
        "FileSystemId": files,
        "FileSystemType": "LUSTRE",
        "Lifecycle": "AVAILABLE",
        "LustreConfiguration": {
            "DeploymentType": properties["LustreConfiguration"]["DeploymentType"]
        },
        "StorageCapacity": int(properties["StorageCapacity"]),
        "SubnetIds": properties["SubnetIds"],
        "ResourceARN": fsx.arn(f"file-system/{files}"),
        "Tags": provisioners._tag_map(properties.get("Tags", [])),
    }
    return files, file_system_attributes(files)


def file_system_attributes(files: str) -> dict[str, Any]:
    record = existing(fsx.file_systems, files, "file system")
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
    fsx.file_systems[files]["StorageCapacity"] = int(new["StorageCapacity"])
    return files, file_system_attributes(files)


def file_system_delete(files: str, _properties: Properties) -> None:
    existing(fsx.file_systems, files, "file system")
    for task in fsx.tasks.values():
        if task["FileSystemId"] == files and task["Lifecycle"] in fsx.ACTIVE:
            raise ValueError(f"{files} has a task: {task['TaskId']} is {task['Lifecycle']}")
    if found := fsx.links_of(files):
        # Their content would not be exported any more; the order of a stack's deletion shows it.
        raise ValueError(f"{files} is linked: {found[0]['AssociationId']}")
    del fsx.file_systems[files]


# --- AWS::FSx::DataRepositoryAssociation ----------------------------------------------------------
def link_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    files, place = properties["FileSystemId"], properties["DataRepositoryPath"]
    existing(fsx.file_systems, files, f"{logical_id}: file system")
    bucket = place.removeprefix("s3://").partition("/")[0]
    existing(s3._buckets, bucket, f"{logical_id}: bucket")
    if properties["FileSystemPath"] == "/" and fsx.links_of(files):
        raise ValueError(f"{logical_id}: {files} is linked, and / takes one link only")
    name = fsx.new_id("dra")
    fsx.links[name] = {
        "AssociationId": name,
        "ResourceARN": fsx.arn(f"association/{files}/{name}"),
        "FileSystemId": files,
        "Lifecycle": "AVAILABLE",
        "FileSystemPath": properties["FileSystemPath"],
        "DataRepositoryPath": place,
        "S3": properties.get("S3", {}),
    }
    return name, link_attributes(name)


def link_attributes(name: str) -> dict[str, Any]:
    record = existing(fsx.links, name, "association")
    return {"AssociationId": name, "ResourceARN": record["ResourceARN"]}


def link_update(
    name: str, _old: Properties, new: Properties, _stack: str, _logical_id: str
) -> Result:
    existing(fsx.links, name, "association")["S3"] = new.get("S3", {})
    return name, link_attributes(name)


def link_delete(name: str, _properties: Properties) -> None:
    existing(fsx.links, name, "association")
    del fsx.links[name]


#: Which property replaces what is as the schemas of CloudFormation say.
TYPES = {
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
