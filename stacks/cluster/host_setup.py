"""User data of a host: the steps between boot and the start of the ECS agent.

On the ECS-optimized image the agent starts after user data has ended, so whatever is set up here
is there before the first task, and each command that may hang has a time limit. The disk of the
cache, the image pull and the metrics agent may fail, and say so in the host's console output: they
must not keep a host from joining the cluster. A host without its shared file system or its GPUs
switches itself off: no task could use it.
"""

import json
from typing import Final

from aws_cdk import aws_ec2 as ec2

from contract import nodes, runs, times
from contract.instance_types import InstanceType

METRICS_INTERVAL_S: Final = 10

_SCRIPT: Final = """\
set -u
image={image}
registry=${{image%%/*}}
region=$(echo "$registry" | cut -d. -f4)
driver= gpus= efa=0 steps= name=
say() {{ echo "host-setup: $*"; }}
step() {{
    [ -z "$name" ] || steps="$steps\\"$name\\": $((SECONDS - began)), "
    name=$1 began=$SECONDS
    say "$1"
}}
about() {{
    curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "http://169.254.169.254/latest/meta-data/$1"
}}
# The boot report: what this host is, and the seconds of each step.
report() {{
    token=$(curl -sf -m 5 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" \
        http://169.254.169.254/latest/api/token)
    host=$(about instance-id)
    timeout 30 aws s3 cp --only-show-errors - "s3://{bucket}/{reports}/$host.json" <<REPORT ||
{{"id": "$host", "type": "$(about instance-type)", "ami": "$(about ami-id)",
 "driver": "$driver", "gpus": "$gpus", "disks": "$(lsblk -dnro NAME,SIZE -e 7 | paste -sd,)",
 "efa": $efa, "failed": "$1", "steps": {{$steps"all": $SECONDS}}}}
REPORT
        say "WARNING: no boot report"
}}
# Its group starts another host in its place.
give_up() {{
    step "ERROR: $*; this host takes no task and switches itself off"
    report "$*"
    shutdown --poweroff now
    exit 1
}}

step joining
cat >> /etc/ecs/ecs.config <<'CONFIG'
{ecs_config}
CONFIG

# Shared by the tasks that this host will run, one after the other. A disk of the host's own is
# faster than the root volume and costs nothing; it ends with the host, as the cache may.
step cache
mkdir -p {cache}
for disk in /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_*; do
    [ -e "$disk" ] || break
    if mkfs.xfs -f -q "$disk" && mount "$disk" {cache}
    then say "cache: on $disk"
    else say "WARNING: $disk cannot be used; the cache is on the root volume"
    fi
    break
done
# Of the user of the containers: no other user of the host reads or changes it.
chown {user}:{user} {cache} && chmod 0700 {cache} || say "WARNING: the cache cannot be written"

step packages
timeout 300 dnf install --assumeyes --quiet awscli-2 amazon-cloudwatch-agent ||
    say "WARNING: no packages"
{shared}{efa}{wait_for_gpus}
step metrics
mkdir -p /opt/aws/amazon-cloudwatch-agent/etc
cat > /opt/aws/amazon-cloudwatch-agent/etc/training.json <<'CONFIG'
{agent_config}
CONFIG
/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s \\
    -c file:/opt/aws/amazon-cloudwatch-agent/etc/training.json || say "WARNING: no metrics"

# Minutes for a GPU image: done here, the first task finds it in place.
step image
systemctl start docker
if timeout 60 aws ecr get-login-password --region "$region" |
    timeout 60 docker login --username AWS --password-stdin "$registry"
then
    timeout 570 docker pull --quiet "$image" ||
        say "WARNING: not pulled; ECS pulls it with the first task"
    docker logout "$registry"
else
    say "WARNING: no login to $registry; ECS pulls with the first task"
fi
step "pulled $image"
report ""
say "done"
"""

# ECS places tasks by this attribute. A host without it is of no use.
_SHARED: Final = """
step "shared file system"
timeout 300 dnf install --assumeyes --quiet lustre-client || say "WARNING: no Lustre client"
mkdir -p {folder}
mounted=no
for attempt in $(seq {attempts}); do
    mount -t lustre -o relatime,flock {source} {folder} && mounted=yes && break
    sleep 6
done
[ "$mounted" = yes ] || give_up "{source} cannot be mounted"
# Its root only, of the user of the containers; what the bucket has stays readable.
chown {user}:{user} {folder} || say "WARNING: jobs may not write to {folder}"
echo 'ECS_INSTANCE_ATTRIBUTES={attributes}' >> /etc/ecs/ecs.config
"""
MOUNT_ATTEMPTS: Final = 20
#: Placement constraint of tasks: only hosts that have mounted it.
PLACEMENT: Final = f"attribute:{nodes.SHARED_ATTRIBUTE} == {nodes.SHARED_MOUNTED}"

# The tasks' own libfabric is in their image; here are the driver and memory for its buffers. A host
# without the devices gets no container started, and ECS names the one that is missing.
_EFA: Final = """
step efa
echo "vm.nr_hugepages = {huge_pages}" > /etc/sysctl.d/90-efa.conf
sysctl --quiet --load=/etc/sysctl.d/90-efa.conf || say "WARNING: no huge pages"
modprobe efa || {{
    timeout 300 dnf install --assumeyes --quiet "kernel-modules-extra-$(uname -r)"
    modprobe efa || say "WARNING: no driver for EFA"
}}
mkdir -p {nodes}
for device in /sys/class/infiniband_verbs/uverbs*; do
    [ "$(basename "$(readlink -f "$device/device/driver")")" = efa ] || continue
    name=$(basename "$device")
    ln -sf "/dev/infiniband/$name" {links}/$efa
    IFS=: read -r major minor < "$device/dev"
    mknod -m 666 "{nodes}/$name" c "$major" "$minor"
    efa=$((efa + 1))
done
[ "$efa" -eq {num_efa} ] || say "WARNING: $efa EFA devices, {num_efa} should be here"
"""

# The metrics agent ends when it finds no nvidia-smi at its start (pytorch/test-infra 4416), and the
# ECS agent does not start without GPUs that answer: the host would be billed and never join.
_WAIT_FOR_GPUS: Final = """
step gpus
for attempt in $(seq 30); do
    timeout --kill-after=5 20 nvidia-smi > /dev/null 2>&1 && break
    [ "$attempt" -lt 30 ] || give_up "its GPUs do not answer"
    sleep 4
done
ask() {{ timeout --kill-after=5 20 nvidia-smi --query-gpu="$1" --format=csv,noheader; }}
driver=$(ask driver_version | head -n 1)
gpus=$(ask name | sort | uniq -c | xargs)
"""


def host_setup(
    *,
    cluster_name: str,
    metrics: str,
    node: str,
    image: str,
    bucket: str,
    has_gpus: bool,
    spot: bool,
    efa: InstanceType | None = None,
    mount_source: str = "",
) -> ec2.UserData:
    """The script for one kind of host.

    Args:
        cluster_name: ECS cluster to join.
        metrics: Namespace of the host's metrics.
        node: ``head`` or ``worker``: an attribute of the container instance.
        image: Image in ECR to pull before the agent starts.
        bucket: The deployment's, for the boot report.
        has_gpus: Whether NVIDIA's tools are to be waited for and asked for metrics.
        spot: Whether the host is a spot instance.
        efa: The host's type, where its EFA is used.
        mount_source: Lustre file system that all hosts share, as ``mount`` takes it; empty: none.
    """
    config = ecs_config(cluster_name, node, has_gpus, spot)
    shared = ""
    if mount_source:
        # Not before it is mounted.
        attributes = json.loads(config.pop("ECS_INSTANCE_ATTRIBUTES"))
        shared = _SHARED.format(
            folder=nodes.SHARED_DIR,
            attempts=MOUNT_ATTEMPTS,
            source=mount_source,
            user=nodes.CONTAINER_USER,
            attributes=json.dumps(attributes | {nodes.SHARED_ATTRIBUTE: nodes.SHARED_MOUNTED}),
        )
    script = _SCRIPT.format(
        ecs_config="\n".join(f"{name}={value}" for name, value in config.items()),
        shared=shared,
        efa=_EFA.format(
            # Of 2 MiB each.
            huge_pages=efa.efa_huge_pages_mib // 2,
            num_efa=efa.efa_interfaces,
            links=nodes.EFA_LINKS,
            nodes=nodes.EFA_NODES,
        )
        if efa
        else "",
        wait_for_gpus=_WAIT_FOR_GPUS.format() if has_gpus else "",
        agent_config=json.dumps(agent_config(has_gpus=has_gpus, metrics=metrics), indent=1),
        cache=nodes.CACHE_DIR,
        user=nodes.CONTAINER_USER,
        image=image,
        bucket=bucket,
        reports=runs.HOSTS_PREFIX,
    )
    user_data = ec2.UserData.for_linux()
    user_data.add_commands(script)
    return user_data


def ecs_config(cluster_name: str, node: str, has_gpus: bool, spot: bool) -> dict[str, str]:
    """``/etc/ecs/ecs.config``: the settings of the ECS agent."""
    config = {
        "ECS_CLUSTER": cluster_name,
        "ECS_INSTANCE_ATTRIBUTES": json.dumps({"training.node": node}),
        # The image pulled below is the one that is used; a tag never changes its meaning.
        "ECS_IMAGE_PULL_BEHAVIOR": "prefer-cached",
        "ECS_CONTAINER_STOP_TIMEOUT": f"{times.STOP_TIMEOUT_S}s",
        "ECS_ENABLE_TASK_IAM_ROLE": "true",
        # A task needs the metadata service only to see a spot notice; otherwise it would only be
        # a way to the host's role.
        "ECS_AWSVPC_BLOCK_IMDS": "false" if spot else "true",
    }
    if spot:
        # Off by default. Stops the services' tasks in time; tasks of jobs watch for themselves.
        config["ECS_ENABLE_SPOT_INSTANCE_DRAINING"] = "true"
    if has_gpus:
        config["ECS_ENABLE_GPU_SUPPORT"] = "true"
    return config


def agent_config(*, has_gpus: bool, metrics: str) -> dict[str, object]:
    """Configuration of the CloudWatch agent: GPUs, memory and disk, by instance id."""
    collected: dict[str, object] = {
        "mem": {"measurement": ["mem_used_percent"]},
        "disk": {
            "measurement": ["used_percent"],
            "resources": ["/"],
            "drop_device": True,
        },
    }
    if has_gpus:
        collected["nvidia_gpu"] = {
            "measurement": [
                "utilization_gpu",
                "utilization_memory",
                "memory_used",
                "memory_free",
                "memory_total",
                "temperature_gpu",
                "power_draw",
                "clocks_current_graphics",
                "clocks_current_memory",
                "clocks_current_sm",
            ]
        }
    return {
        "agent": {"metrics_collection_interval": METRICS_INTERVAL_S, "omit_hostname": True},
        "metrics": {
            "namespace": metrics,
            "append_dimensions": {"InstanceId": "${aws:InstanceId}"},
            "metrics_collected": collected,
        },
    }
