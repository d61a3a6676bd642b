"""Task definitions of head and worker, and the services of the standing cluster.

A task takes a whole host: all its GPUs and nearly all its memory go to one container, because one
container with eight GPUs beats eight with one. Both services stay at zero tasks until
``trainctl cluster up``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aws_cdk import CfnDeletionPolicy, Duration, RemovalPolicy, Size, Stack
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_secretsmanager as secretsmanager
from aws_cdk import aws_servicediscovery as servicediscovery
from constructs import Construct

from contract import nodes, times
from stacks import findings, rights
from stacks.cluster import efa
from stacks.cluster.host_group import HostGroup, HostKind
from stacks.cluster.host_setup import PLACEMENT
from stacks.log_groups import log_group

#: What Docker leaves to a container's root and nothing here needs. The rest is for a shell by ECS
#: Exec, whose root reads the files of user 1000.
DROPPED = (
    *(ecs.Capability.AUDIT_WRITE, ecs.Capability.MKNOD, ecs.Capability.NET_BIND_SERVICE),
    *(ecs.Capability.NET_RAW, ecs.Capability.SETFCAP, ecs.Capability.SETPCAP),
    ecs.Capability.SYS_CHROOT,
)
OPEN_FILES = 1_048_576  # Ray opens a socket per worker and per object it moves


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One kind of node: what runs, and the service that keeps it running."""

    task: ecs.TaskDefinition
    service: ecs.CfnService


class RayNodes(Construct):
    """Head and worker, with the token they share and the log group they write to."""

    log_group: logs.LogGroup
    token: secretsmanager.Secret
    name: servicediscovery.Service
    """The head's, by which workers find it."""
    head: Node
    worker: Node

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        cluster_name: str,
        heads: HostGroup,
        workers: HostGroup,
        namespace: servicediscovery.INamespace,
        subnet_ids: Sequence[str],
        security_group_id: str,
        repositories: Mapping[str, ecr.Repository],
        family_prefix: str,
        bucket: s3.IBucket,
        data_buckets: Sequence[str],
        shell_logs: logs.LogGroup,
    ) -> None:
        """Make what all nodes share, then head and worker.

        Args:
            namespace: where the head's name is registered.
            repositories: kind of node -> repository of its image.
            family_prefix: of task definitions; empty: CDK's names, from the ids of constructs,
                which are the same in each deployment.
            data_buckets: names of more buckets that nodes may read.
        """
        super().__init__(scope, id_)
        self._workers = workers
        self._bucket, self._data_buckets = bucket, data_buckets
        self._shell_logs, self._domain = shell_logs, namespace.namespace_name
        self._family_prefix = family_prefix
        self.log_group = log_group(self, "Logs")
        self.token = self._ray_token()
        self._execution_role = iam.Role(
            self,
            "ExecutionRole",
            description="ECS itself: pulls the images, reads the token, opens log streams",
            assumed_by=rights.of_this_account(self, "ecs-tasks.amazonaws.com"),
        )
        rights.OF_EXECUTION.grant(self._execution_role)
        # Both images, even if only one is in use: a job that began before an update goes on with
        # its own task definitions.
        for repository in repositories.values():
            repository.grant_pull(self._execution_role)
        # Workers of a standing cluster find their head by this name. A replaced head has another
        # address, so the answer must not be kept for long.
        self.name = servicediscovery.Service(
            self,
            "Name",
            namespace=namespace,
            name=nodes.HEAD,
            description="The head of the standing cluster",
            dns_record_type=servicediscovery.DnsRecordType.A,
            dns_ttl=Duration.seconds(times.HEAD_DNS_TTL_S),
            custom_health_check=servicediscovery.HealthCheckCustomConfig(failure_threshold=1),
        )
        network = ecs.CfnService.AwsVpcConfigurationProperty(
            subnets=[*subnet_ids],
            security_groups=[security_group_id],
            assign_public_ip="DISABLED",
        )
        self.head = self._node(nodes.HEAD, cluster_name, heads, network)
        self.worker = self._node(nodes.WORKER, cluster_name, workers, network)

    def _ray_token(self) -> secretsmanager.Secret:
        secret = secretsmanager.Secret(
            self,
            "RayToken",
            description="Token that every node and client of Ray must show",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                password_length=64, exclude_punctuation=True
            ),
            removal_policy=RemovalPolicy.DESTROY,
        )
        findings.accept(secret, findings.RAY_TOKEN)
        return secret

    def _node(
        self,
        node: str,
        cluster_name: str,
        hosts: HostGroup,
        network: ecs.CfnService.AwsVpcConfigurationProperty,
    ) -> Node:
        """Task and service of a node of the standing cluster."""
        role = self.task_role(
            self,
            f"{node.capitalize()}Role",
            what=f"Ray {node}: checkpoints and data in the bucket, ECS Exec",
        )
        task = self.task(self, f"{node.capitalize()}Task", command=node, hosts=hosts, role=role)
        # The L2 service wants a cluster that knows its capacity; its providers are L1 too.
        service = ecs.CfnService(
            self,
            f"{node.capitalize()}Service",
            cluster=cluster_name,
            task_definition=task.task_definition_arn,
            # Nothing to wait for: no host, no image, no quota is needed for a deploy to succeed.
            desired_count=0,
            capacity_provider_strategy=[
                ecs.CfnService.CapacityProviderStrategyItemProperty(
                    capacity_provider=hosts.capacity_provider.ref, weight=1
                )
            ],
            # There is no spare GPU for a second copy: the old task goes before the new one comes.
            deployment_configuration=ecs.CfnService.DeploymentConfigurationProperty(
                minimum_healthy_percent=0,
                maximum_percent=100,
                deployment_circuit_breaker=ecs.CfnService.DeploymentCircuitBreakerProperty(
                    enable=True, rollback=False
                ),
            ),
            enable_execute_command=True,
            enable_ecs_managed_tags=True,
            propagate_tags="SERVICE",
            network_configuration=ecs.CfnService.NetworkConfigurationProperty(
                awsvpc_configuration=network
            ),
            service_registries=[
                ecs.CfnService.ServiceRegistryProperty(registry_arn=self.name.service_arn)
            ]
            if node == nodes.HEAD
            else None,
        )
        return Node(task=task, service=service)

    def pool_task(self, name: str, hosts: HostGroup) -> ecs.TaskDefinition:
        """Task of a worker in a pool, which may do what every worker may."""
        role = self.worker.task.task_role
        assert isinstance(role, iam.Role)
        return self.task(self, f"{name}PoolTask", command=nodes.WORKER, hosts=hosts, role=role)

    def task_role(
        self, scope: Construct, id_: str, *, what: str, is_job_head: bool = False
    ) -> iam.Role:
        """Role of training code: it may use the bucket, and its owner may open a shell."""
        role = iam.Role(
            scope,
            id_,
            description=what,
            assumed_by=rights.of_this_account(self, "ecs-tasks.amazonaws.com"),
        )
        rights.of_training_code(
            bucket=self._bucket,
            data=[s3.Bucket.from_bucket_name(role, name, name) for name in self._data_buckets],
            shell_logs=self._shell_logs,
            is_job_head=is_job_head,
        ).grant(role)
        return role

    def task(
        self,
        scope: Construct,
        id_: str,
        *,
        command: str,
        hosts: HostGroup,
        role: iam.Role,
        environment: Mapping[str, str] | None = None,
    ) -> ecs.TaskDefinition:
        """A task that takes a whole host, for the ``command`` of the image's entry point."""
        prefix, kind, machine = self._family_prefix, hosts.kind, hosts.kind.machine
        family = f"{prefix}-{scope.node.id}-{id_}" if prefix else None
        if kind.pool:
            family = nodes.pool_hosts(Stack.of(self).stack_name, kind.place)
        task = ecs.TaskDefinition(
            scope,
            id_,
            family=family,
            compatibility=ecs.Compatibility.EC2,
            # A separate address: Ray's ports are then the same on every node.
            network_mode=ecs.NetworkMode.AWS_VPC,
            task_role=role,
            execution_role=self._execution_role,
        )
        linux = ecs.LinuxParameters(
            task,
            "Linux",
            init_process_enabled=True,  # reaps Ray's children; ECS Exec needs it
            shared_memory_size=machine.shm_mib,
        )
        linux.drop_capabilities(*DROPPED)
        if kind.uses_efa:
            efa.add_devices(linux, machine)
        container = task.add_container(
            nodes.CONTAINER,
            image=ecs.ContainerImage.from_ecr_repository(kind.repository, kind.image_tag),
            command=[command],
            cpu=machine.container_cpu,
            memory_limit_mib=machine.container_memory_mib,
            gpu_count=machine.num_gpus or None,
            linux_parameters=linux,
            # No stop_timeout, of which ECS documents 120 s as the most: that of the host's agent
            # counts (stacks/cluster/host_setup.py).
            health_check=ecs.HealthCheck(
                # -P: not from the working directory, /tmp, where a user's file may have the name of
                # a module.
                command=["CMD", "python", "-P", "-m", "containers.health"],
                interval=Duration.seconds(times.HEALTH_EVERY_S),
                timeout=Duration.seconds(times.HEALTH_TIMEOUT_S),
                retries=10,
                start_period=Duration.seconds(times.HEALTH_START_S),
            ),
            environment={
                **self._environment(kind, hosts if command == nodes.WORKER else self._workers),
                **(environment or {}),
            },
            secrets={"RAY_AUTH_TOKEN": ecs.Secret.from_secrets_manager(self.token)},
            logging=ecs.LogDrivers.aws_logs(
                stream_prefix=command,
                log_group=self.log_group,
                # A slow log service must not hold up a training step.
                mode=ecs.AwsLogDriverMode.NON_BLOCKING,
                max_buffer_size=Size.mebibytes(25),
            ),
        )
        # Models, data and packages outlive the task: the host's next one has them at once.
        _mount(task, container, "cache", nodes.CACHE_DIR)
        if kind.mount_source:
            _mount(task, container, "shared", nodes.SHARED_DIR)
            # On no host that has not mounted it.
            task.add_placement_constraint(ecs.PlacementConstraint.member_of(PLACEMENT))
            container.add_environment(nodes.ENV_SHARED, nodes.SHARED_DIR)
        if kind.uses_efa:
            _mount(task, container, "efa", nodes.EFA_NODES, at="/dev/infiniband")
        container.add_ulimits(
            ecs.Ulimit(name=ecs.UlimitName.NOFILE, soft_limit=OPEN_FILES, hard_limit=OPEN_FILES),
            # RDMA pins what it sends; -1 is no limit.
            ecs.Ulimit(name=ecs.UlimitName.MEMLOCK, soft_limit=-1, hard_limit=-1),
        )
        findings.accept(task, findings.TASK_DEFINITION)
        # Jobs that run while the stack is updated start their nodes from the revision before.
        resource = task.node.default_child
        assert isinstance(resource, ecs.CfnTaskDefinition)
        resource.cfn_options.update_replace_policy = CfnDeletionPolicy.RETAIN
        resource.cfn_options.deletion_policy = CfnDeletionPolicy.DELETE
        return task

    def _environment(self, kind: HostKind, workers: HostGroup) -> dict[str, str]:
        """Variables of all tasks on hosts of a kind.

        Args:
            workers: hosts of the workers of their cluster.
        """
        machine, region = kind.machine, Stack.of(self).region
        return {
            "RAY_AUTH_MODE": "token",
            # ECS on EC2 sets them since agent 1.104; boto3 reads only the second.
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            nodes.ENV_HEAD_ADDRESS: f"{nodes.HEAD}.{self._domain}",
            nodes.ENV_NUM_CPUS: str(machine.vcpus),
            nodes.ENV_NUM_GPUS: str(machine.num_gpus),
            nodes.ENV_TRAINS: "1" if kind.trains else "0",
            nodes.ENV_WORKER_GPUS: str(workers.kind.machine.num_gpus),
            nodes.ENV_SPOT: "1" if workers.kind.spot else "0",
            nodes.ENV_STORAGE: f"s3://{self._bucket.bucket_name}",
            **(efa.variables(machine, uses_efa=kind.uses_efa) if kind.trains else {}),
        }


def _mount(
    task: ecs.TaskDefinition,
    container: ecs.ContainerDefinition,
    volume: str,
    folder: str,
    *,
    at: str = "",
) -> None:
    """Give a container a folder of its host, by default at the same place."""
    task.add_volume(name=volume, host=ecs.Host(source_path=folder))
    container.add_mount_points(
        ecs.MountPoint(source_volume=volume, container_path=at or folder, read_only=False)
    )
