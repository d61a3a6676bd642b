"""The file system that all hosts mount, FSx for Lustre, linked with a part of the bucket.

What is in that part of the bucket is there from the start: its names at once, its bytes when they
are first read. What is written there is written into the bucket, too.

No update deletes it: one that drops it is refused by TerminateHosts, and one that replaces it
leaves the old one. On destroy, a custom resource has FSx write what is not in the bucket yet, once
no host is left:

    TerminateHosts -> ExportFiles -> association -> file system -> its security group
"""

from pathlib import Path
from typing import Final

from aws_cdk import CfnDeletionPolicy, CustomResource, Duration, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_s3 as s3
from constructs import Construct

from contract.instance_types import PERSISTENT, FileSystem
from stacks import rights
from stacks.lambda_functions import custom_resource, lambda_function

HANDLER: Final = Path(__file__).parent / "export_handler.py"
#: Between Lustre's clients and servers, and among its servers, in both directions.
PORTS: Final = (ec2.Port.tcp(988), ec2.Port.tcp_range(1018, 1023))
#: What is written into the bucket by itself: a file that is deleted to make room stays there.
EXPORTS: Final = ["NEW", "CHANGED"]
#: The linked part of the bucket: never that of the runs, whose checkpoints would be written twice.
DATA: Final = "datasets/"
#: In the linked part of the bucket: which files could not be written there.
REPORTS: Final = "export-reports"


class SharedFileSystem(Construct):
    """File system, security group, link with the bucket, and what runs before it is deleted."""

    file_system_id: str
    mount_source: str
    """As Lustre's ``mount`` takes it."""
    export: CustomResource | None
    """Deleted after what depends on it; None where files may be lost."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        file_system: FileSystem,
        vpc: ec2.IVpc,
        subnet_id: str,
        bucket: s3.IBucket,
        hosts: ec2.SecurityGroup,
        exports: bool,
    ) -> None:
        """Make a file system for hosts of this group.

        Args:
            subnet_id: that of the hosts: traffic between zones is billed.
            exports: whether files that the bucket lacks are written there on destroy.
        """
        super().__init__(scope, id_)
        group = self._security_group(vpc, hosts)
        files = self._file_system(file_system, subnet_id, group)
        # Files that are nowhere else outlive an update that replaces their file system.
        files.cfn_options.update_replace_policy = CfnDeletionPolicy.RETAIN
        files.cfn_options.deletion_policy = CfnDeletionPolicy.DELETE
        # FSx looks at the rules when it makes the file system, and makes none without them.
        files.node.add_dependency(group)
        place = f"s3://{bucket.bucket_name}/{DATA}"
        association = fsx.CfnDataRepositoryAssociation(
            self,
            "Association",
            file_system_id=files.ref,
            file_system_path="/",
            data_repository_path=place,
            batch_import_meta_data_on_create=True,
            s3=fsx.CfnDataRepositoryAssociation.S3Property(
                auto_import_policy=fsx.CfnDataRepositoryAssociation.AutoImportPolicyProperty(
                    events=["NEW", "CHANGED", "DELETED"]
                ),
                auto_export_policy=fsx.CfnDataRepositoryAssociation.AutoExportPolicyProperty(
                    events=EXPORTS
                ),
            ),
        )
        stack = Stack.of(self)
        self.file_system_id = files.ref
        server = f"{files.ref}.fsx.{stack.region}.{stack.url_suffix}"
        self.mount_source = f"{server}@tcp:/{files.attr_lustre_mount_name}"
        self.export = None
        if exports:
            self.export = self._export(files, association, f"{place}{REPORTS}")

    def _security_group(self, vpc: ec2.IVpc, hosts: ec2.SecurityGroup) -> ec2.SecurityGroup:
        group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=vpc,
            description="Shared file system: Lustre to and from the hosts",
            allow_all_outbound=False,
        )
        for port in PORTS:
            group.add_ingress_rule(group, port, "Lustre among the servers")
            group.add_egress_rule(group, port, "Lustre among the servers")
            group.add_ingress_rule(hosts, port, "Lustre from the hosts")
            group.add_egress_rule(hosts, port, "Lustre to the hosts")
            hosts.add_ingress_rule(group, port, "Lustre from its servers")
            hosts.add_egress_rule(group, port, "Lustre to its servers")
        return group

    def _file_system(
        self, file_system: FileSystem, subnet_id: str, group: ec2.SecurityGroup
    ) -> fsx.CfnFileSystem:
        is_persistent = file_system.deployment == PERSISTENT
        return fsx.CfnFileSystem(
            self,
            "FileSystem",
            file_system_type="LUSTRE",
            # Amazon Linux 2023 cannot mount 2.10, which is the default.
            file_system_type_version="2.15",
            storage_capacity=file_system.capacity_gib,
            subnet_ids=[subnet_id],
            security_group_ids=[group.security_group_id],
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="PERSISTENT_2" if is_persistent else "SCRATCH_2",
                # FSx refuses both for scratch, and backups of what is linked with a bucket.
                per_unit_storage_throughput=file_system.mbps_per_tib if is_persistent else None,
                automatic_backup_retention_days=0 if is_persistent else None,
            ),
        )

    def _export(
        self,
        files: fsx.CfnFileSystem,
        association: fsx.CfnDataRepositoryAssociation,
        reports: str,
    ) -> CustomResource:
        what = "Writes what is only on the shared file system into the bucket before it is deleted"
        function = lambda_function(
            self,
            "Export",
            what=what,
            rights=rights_of_export(
                self,
                file_system=files.attr_resource_arn,
                association=association.attr_resource_arn,
            ),
            code=lambda_.Code.from_inline(HANDLER.read_text()),
            timeout=Duration.minutes(15),
        )
        found = custom_resource(
            self,
            "ExportFiles",
            function=function,
            properties={"FileSystem": files.ref, "Reports": reports, "Exports": EXPORTS},
        )
        found.node.add_dependency(association)
        return found


def rights_of_export(scope: Construct, *, file_system: str, association: str) -> rights.Rights:
    """The function that has FSx write files into the bucket before their file system is deleted."""
    tasks = rights.arn(scope, "fsx", "task/*")
    return (
        rights.allow("Export", "fsx:CreateDataRepositoryTask", on=[file_system, tasks])
        + rights.allow(
            "StopAutomaticExport", "fsx:UpdateDataRepositoryAssociation", on=[association]
        )
        + rights.allow(
            "Watch",
            "fsx:DescribeDataRepositoryAssociations",
            "fsx:DescribeDataRepositoryTasks",
            on=["*"],
            why="Describing is by a filter, which has no resource.",
        )
        + rights.Rights(
            reasons={
                tasks: "The id of a task is not known before it is made; its file system is given."
            }
        )
    )
