"""Teardown: lets ``cdk destroy`` finish in one go while hosts and tasks still run.

CloudFormation on its own waits: for capacity providers that tasks still use, for groups whose
hosts drain, for a placement group that is "in use". Two custom resources sit in the order of
deletion where it would, and end what it waits for:

    admission of jobs -> StopTasks -> the function that records their ends
    services -> StopTasks -> associations -> capacity providers -> TerminateHosts -> groups
                          -> the state machine of the jobs
                          -> roles, permissions and network rules of the tasks

Everything left of an arrow depends on what is right of it, so it is deleted first.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aws_cdk import CfnResource, CustomResource, Duration
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct, IConstruct

from stacks import rights
from stacks.lambda_functions import custom_resource, lambda_function

HANDLER: Final = Path(__file__).parent / "handler.py"


class Teardown(Construct):
    """The two custom resources and the function behind them."""

    hosts: CustomResource
    """When it is deleted, no host is left."""
    stop_tasks: CustomResource
    """Services must depend on it, and nothing else needs to."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        cluster: ecs.Cluster,
        groups: Mapping[str, ecs.CfnCapacityProvider],
        pools: Mapping[str, tuple[str, ecs.CfnCapacityProvider]],
        associations: ecs.CfnClusterCapacityProviderAssociations,
        shared_storage: str,
    ) -> None:
        """
        Args:
            groups: capacity providers by the names of their Auto Scaling groups.
            pools: the name of the group of each pool, and its capacity provider, by places.
            shared_storage: setting of this name.
        """
        super().__init__(scope, id_)
        names = [*groups]
        function = lambda_function(
            self,
            "",
            what="Ends tasks and hosts when the stack is deleted",
            rights=rights.of_teardown(
                self, cluster=cluster, groups=[*names, *rights.pool_groups(self, pools)]
            ),
            # Inline: no asset to upload, and nothing to trust but what is in the template.
            code=lambda_.Code.from_inline(HANDLER.read_text()),
            timeout=Duration.minutes(15),
        )
        self.hosts = custom_resource(
            self,
            "TerminateHosts",
            function=function,
            properties={
                "Action": "TerminateHosts",
                "Cluster": cluster.cluster_name,
                "Groups": names,
                # An update that drops the file system fails here, before anything is deleted.
                "SharedStorage": shared_storage,
            },
        )
        self._definitions: list[str] = []
        self.stop_tasks = custom_resource(
            self,
            "StopTasks",
            function=function,
            properties={"Action": "StopTasks", "Cluster": cluster.cluster_name},
        )
        for provider in groups.values():
            provider.node.add_dependency(self.hosts)
        # Each by itself: a pool may be removed from a deployment that goes on.
        self._of_pools: dict[str, CustomResource] = {}
        for name, (group, provider) in pools.items():
            self._of_pools[name] = hosts = custom_resource(
                self,
                f"{name}TerminateHosts",
                function=function,
                properties={"Action": "TerminateHosts", "Groups": [group]},
                kind="TerminateHosts",
            )
            provider.node.add_dependency(hosts)
        self.stop_tasks.node.add_dependency(associations)
        assert isinstance(function.role, iam.Role)
        self._role = function.role

    def stops_jobs(
        self, *, machine_arn: str, keeper_arn: str, dependencies: Sequence[IConstruct]
    ) -> None:
        """End the executions of a state machine, and have a function record their ends.

        Args:
            dependencies: constructs that must exist until then. The ARNs are passed as strings, so
                that ending hosts does not depend on these resources.
        """
        resource = self.stop_tasks.node.default_child
        assert isinstance(resource, CfnResource)
        resource.add_property_override("Machine", machine_arn)
        resource.add_property_override("Keeper", keeper_arn)
        rights.of_ending_jobs(machine_arn=machine_arn, keeper_arn=keeper_arn).grant(self._role)
        self.stop_tasks.node.add_dependency(*dependencies)

    def stops(
        self, task: ecs.TaskDefinition, *, dependencies: Sequence[IConstruct], pool: str = ""
    ) -> None:
        """End tasks of a definition while they can still save and log, then forget its revisions.

        Args:
            task: its roles, with their permissions, are deleted after its tasks have stopped.
            dependencies: other constructs that its tasks need until then.
            pool: place of the pool whose it is; its revisions are forgotten with that.
        """
        own = [task.task_definition_arn]
        if not pool:
            self._definitions += own
        resource = (self._of_pools[pool] if pool else self.stop_tasks).node.default_child
        assert isinstance(resource, CfnResource)
        resource.add_property_override("Definitions", own if pool else self._definitions)
        roles = [role for role in (task.task_role, task.execution_role) if role]
        self.stop_tasks.node.add_dependency(*roles, *dependencies)
