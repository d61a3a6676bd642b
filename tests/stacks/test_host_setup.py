"""User data does what it says on a host, and of what may fail there only the shared file system and
the GPUs keep a host from its cluster.

The script is run for real, in a folder that stands for the host's root, with stand-ins for the
commands that a host has and this machine may not.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from contract import times
from contract.instance_types import InstanceType, instance_type
from contract.nodes import CACHE_DIR, SHARED_DIR
from stacks.cluster.host_setup import MOUNT_ATTEMPTS, host_setup

IMAGE = "000000000000.dkr.ecr.eu-west-1.amazonaws.com/worker:abc"
REGISTRY = "000000000000.dkr.ecr.eu-west-1.amazonaws.com"
COMMANDS = (
    *("dnf", "docker", "aws", "systemctl", "nvidia-smi", "sleep", "cloudwatch-ctl"),
    *("mkfs.xfs", "mount", "chown", "sysctl", "modprobe", "mknod", "shutdown", "curl", "lsblk"),
)


class Host:
    """A folder that stands for a host; commands note how they were called."""

    def __init__(self, root: Path, *, broken: tuple[str, ...] = (), num_disks: int = 0) -> None:
        self.root = root
        self.disks = root / "dev" / "disk" / "by-id"
        self.disks.mkdir(parents=True)
        for number in range(num_disks):
            (self.disks / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{number}").touch()
        (root / "bin").mkdir(parents=True)
        (root / "etc" / "ecs").mkdir(parents=True)
        (root / "etc" / "ecs" / "ecs.config").write_text("FROM_THE_IMAGE=1\n")
        for name in COMMANDS:
            command = root / "bin" / name
            # Read from a pipe only where the command is at the end of one.
            drain = '[ "$1" = login ] && cat > /dev/null\n' if name == "docker" else ""
            command.write_text(
                f'#!/bin/sh\necho "{name} $*" >> {root}/calls\n{drain}'
                f"exit {1 if name in broken else 0}\n"
            )
            command.chmod(0o755)

    def boot(
        self,
        *,
        has_gpus: bool,
        spot: bool = False,
        efa: InstanceType | None = None,
        mount: str = "",
    ) -> subprocess.CompletedProcess[str]:
        script = (
            host_setup(
                cluster_name="training",
                metrics="RayTraining",
                node="worker",
                image=IMAGE,
                bucket="bucket",
                has_gpus=has_gpus,
                spot=spot,
                efa=efa,
                mount_source=mount,
            )
            .render()
            .replace("/etc/sysctl.d/", f"{self.root}/etc/")
            .replace("/sys/class/", f"{self.root}/class/")
            .replace(
                "/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl", "cloudwatch-ctl"
            )
            .replace("/etc/ecs/", f"{self.root}/etc/ecs/")
            .replace("/opt/aws/", f"{self.root}/opt/aws/")
            .replace("/dev/disk/", f"{self.root}/dev/disk/")
            .replace("/dev/efa", f"{self.root}/dev/efa")
            .replace(CACHE_DIR, str(self.cache))
            .replace(SHARED_DIR, str(self.shared))
        )
        assert script.startswith("#!/bin/bash\n")
        return subprocess.run(
            ["bash", "-c", script],
            env={"PATH": f"{self.root}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()

    @property
    def ecs_config(self) -> dict[str, str]:
        lines = (self.root / "etc" / "ecs" / "ecs.config").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def agent_config(self) -> dict[str, dict[str, object]]:
        path = self.root / "opt" / "aws" / "amazon-cloudwatch-agent" / "etc" / "training.json"
        config: dict[str, dict[str, object]] = json.loads(path.read_text())
        return config


def of(host: Host, command: str) -> list[str]:
    """Calls of a command."""
    return [call for call in host.calls if call.split()[0] == command]


def test_a_gpu_host_joins_measures_its_gpus_and_pulls_its_image(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    run = host.boot(has_gpus=True)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stdout
    assert host.ecs_config == {
        "FROM_THE_IMAGE": "1",
        "ECS_CLUSTER": "training",
        "ECS_INSTANCE_ATTRIBUTES": '{"training.node": "worker"}',
        "ECS_IMAGE_PULL_BEHAVIOR": "prefer-cached",
        "ECS_CONTAINER_STOP_TIMEOUT": "270s",
        "ECS_ENABLE_TASK_IAM_ROLE": "true",
        "ECS_AWSVPC_BLOCK_IMDS": "true",
        "ECS_ENABLE_GPU_SUPPORT": "true",
    }
    assert "nvidia_gpu" in host.agent_config["metrics"]["metrics_collected"]  # type: ignore[operator]
    calls = host.calls
    # The metrics agent ends when it finds no GPU at its start, so they are waited for first.
    assert calls.index("nvidia-smi ") < next(
        number for number, call in enumerate(calls) if call.startswith("cloudwatch-ctl")
    )
    assert "aws ecr get-login-password --region eu-west-1" in calls
    assert f"docker login --username AWS --password-stdin {REGISTRY}" in calls
    assert f"docker pull --quiet {IMAGE}" in calls
    assert of(host, "docker")[-1] == f"docker logout {REGISTRY}", "no credentials stay on the host"


def test_a_host_without_gpus_asks_for_none(tmp_path: Path) -> None:
    host = Host(tmp_path / "host", broken=("nvidia-smi",))
    assert host.boot(has_gpus=False).returncode == 0
    assert not [call for call in host.calls if "nvidia" in call]
    assert "ECS_ENABLE_GPU_SUPPORT" not in host.ecs_config
    assert "nvidia_gpu" not in host.agent_config["metrics"]["metrics_collected"]  # type: ignore[operator]


def test_a_spot_host_drains_on_notice_and_lets_tasks_read_it(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    host.boot(has_gpus=False, spot=True)
    assert host.ecs_config["ECS_ENABLE_SPOT_INSTANCE_DRAINING"] == "true"
    assert host.ecs_config["ECS_AWSVPC_BLOCK_IMDS"] == "false"


@pytest.mark.parametrize(
    ("broken", "warning"),
    [
        ("dnf", "no packages"),
        ("cloudwatch-ctl", "no metrics"),
        ("docker", "no login"),
        ("chown", "the cache cannot be written"),
    ],
)
def test_what_fails_is_said_and_does_not_keep_the_host_from_joining(
    tmp_path: Path, broken: str, warning: str
) -> None:
    host = Host(tmp_path / "host", broken=(broken,))
    run = host.boot(has_gpus=True)
    assert run.returncode == 0
    assert f"host-setup: WARNING: {warning}" in run.stdout
    assert run.stdout.endswith("host-setup: done\n")
    assert host.ecs_config["ECS_CLUSTER"] == "training"


def test_a_host_whose_gpus_do_not_answer_switches_itself_off(tmp_path: Path) -> None:
    """The agent would not start there: the host would be billed and never join its cluster."""
    host = Host(tmp_path / "host", broken=("nvidia-smi",))
    run = host.boot(has_gpus=True)
    assert run.returncode == 1
    assert host.calls[-1] == "shutdown --poweroff now"
    assert "host-setup: ERROR: its GPUs do not answer; this host takes no task" in run.stdout
    assert not [call for call in host.calls if call.startswith("docker")]


@pytest.mark.parametrize("hangs", ["nvidia-smi", "dnf", "aws", "docker"])
def test_no_command_that_hangs_keeps_a_host_from_its_end_or_its_cluster(
    tmp_path: Path, hangs: str
) -> None:
    host = Host(tmp_path / "host")
    command = host.root / "bin" / hangs
    command.write_text(command.read_text().replace("exit 0", "exec /bin/sleep 30"))
    # Seconds are hundredths here.
    limit = host.root / "bin" / "timeout"
    limit.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f'echo "limit $*" >> {host.root}/calls\n'
        'shift; exec /usr/bin/timeout 0.1 "$@"\n'
    )
    limit.chmod(0o755)
    run = host.boot(has_gpus=True, mount=SOURCE, efa=instance_type("p4d.24xlarge"))
    if hangs == "nvidia-smi":
        assert (run.returncode, host.calls[-1]) == (1, "shutdown --poweroff now")
    else:
        assert run.stdout.endswith("host-setup: done\n")
        assert "WARNING" in run.stdout
    limits = {(words[2], words[1]) for call in host.calls if (words := call.split())[0] == "limit"}
    expected = {("nvidia-smi", "20"), ("dnf", "300"), ("docker", "60"), ("aws", "30")}
    if hangs == "dnf":
        assert limits == expected | {("docker", "570"), ("aws", "60")}
        before_the_agent = sum(int(limit) for what, limit in limits if what != "nvidia-smi")
        boot = 180
        assert boot + before_the_agent <= times.HOST_JOINS_S, "the sweep would end it meanwhile"


def test_the_cache_is_on_the_first_disk_of_the_host_and_belongs_to_the_containers_user(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path / "host", num_disks=2)
    run = host.boot(has_gpus=False)
    first = host.disks / "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS0"
    assert f"host-setup: cache: on {first}" in run.stdout
    calls = host.calls
    assert calls[:3] == [
        f"mkfs.xfs -f -q {first}",
        f"mount {first} {host.cache}",
        f"chown 1000:1000 {host.cache}",
    ]
    assert [call for call in calls if call.startswith("mount")] == [calls[1]]
    assert host.cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("broken", ["none is there", "mkfs.xfs", "mount"])
def test_without_a_usable_disk_the_cache_is_on_the_root_volume(tmp_path: Path, broken: str) -> None:
    host = Host(tmp_path / "host", broken=(broken,), num_disks=int(broken in COMMANDS))
    run = host.boot(has_gpus=False)
    assert run.returncode == 0
    assert "host-setup: cache: on" not in run.stdout
    assert ("the cache is on the root volume" in run.stdout) is (broken in COMMANDS)
    assert host.cache.is_dir()
    assert f"chown 1000:1000 {host.cache}" in host.calls
    assert run.stdout.endswith("host-setup: done\n")


def test_a_missing_image_is_left_to_ecs(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    pull = host.root / "bin" / "docker"
    pull.write_text(pull.read_text().replace("exit 0", '[ "$1" != pull ]'))
    run = host.boot(has_gpus=False)
    assert run.returncode == 0
    assert "WARNING: not pulled; ECS pulls it with the first task" in run.stdout
    assert of(host, "docker")[-1] == f"docker logout {REGISTRY}"


def answer(host: Host, command: str, body: str) -> None:
    """Give a command of a host this body."""
    (host.root / "bin" / command).write_text(f"#!/bin/sh\n{body}\n")


@pytest.mark.parametrize("fails", [False, True])
def test_a_host_reports_what_it_is_and_how_it_started(tmp_path: Path, fails: bool) -> None:
    host = Host(tmp_path / "host")
    answer(host, "curl", 'case "$*" in *PUT*) echo t;; *"token: t"*) echo "its-${*##*/}";; esac')
    answer(host, "lsblk", "printf 'nvme0n1 200G\\nnvme1n1 3.4T\\n'")
    gpus = 'case "$*" in *name*) echo A100; echo A100;; *driver*) echo 580.159; echo 580.159;; esac'
    answer(host, "nvidia-smi", f"{gpus}; [ -z '{'x' * fails}' ]")
    answer(host, "aws", f'[ "$1" != s3 ] || {{ echo "$5" && cat; }} > {host.root}/report')
    host.boot(has_gpus=True)
    address, _, body = (host.root / "report").read_text().partition("\n")
    assert address == "s3://bucket/hosts/its-instance-id.json"
    found = json.loads(body)
    assert {*found.pop("steps")} == {"joining", "cache", "packages", "gpus", "all"} | (
        set() if fails else {"metrics", "image"}
    )
    assert found == {
        "id": "its-instance-id",
        "type": "its-instance-type",
        "ami": "its-ami-id",
        "driver": "" if fails else "580.159",
        "gpus": "" if fails else "2 A100",
        "disks": "nvme0n1 200G,nvme1n1 3.4T",
        "efa": 0,
        "failed": "its GPUs do not answer" if fails else "",
    }


def test_a_host_with_efa_reserves_huge_pages_and_says_which_devices_it_lacks(
    tmp_path: Path,
) -> None:
    p4d = instance_type("p4d.24xlarge")
    host = Host(tmp_path / "host")
    # Two controllers of NVLink come first, as they may on p6-b200 (aws/sagemaker-hyperpod-cli#282).
    for number, driver in enumerate(["mlx5_core"] * 2 + ["efa"] * 4):
        device = host.root / "class" / "infiniband_verbs" / f"uverbs{number}"
        (device / "device").mkdir(parents=True)
        (host.root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "device" / "driver").symlink_to(host.root / "drivers" / driver)
        (device / "dev").write_text(f"231:{192 + number}\n")
    run = host.boot(has_gpus=True, efa=p4d)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stdout
    links = {each.name: each.readlink().name for each in (host.root / "dev/efa").glob("[0-9]")}
    assert links == {str(number): f"uverbs{number + 2}" for number in range(4)}
    made = [call for call in host.calls if call.startswith("mknod")]
    assert [call.split()[-3:] for call in made] == [["c", "231", str(194 + n)] for n in range(4)]
    assert [Path(call.split()[-4]).name for call in made] == [f"uverbs{n + 2}" for n in range(4)]
    assert (host.root / "etc" / "90-efa.conf").read_text() == "vm.nr_hugepages = 2560\n"
    assert "modprobe efa" in host.calls

    broken = Host(tmp_path / "broken", broken=("modprobe",))
    run = broken.boot(has_gpus=True, efa=p4d)
    assert run.returncode == 0, run.stderr
    assert broken.ecs_config["ECS_CLUSTER"] == "training"
    assert any("kernel-modules-extra" in call for call in broken.calls)
    assert "WARNING: no driver for EFA" in run.stdout
    assert "WARNING: 0 EFA devices, 4 should be here" in run.stdout


# --- the shared file system -----------------------------------------------------------------------
SOURCE = "fs-1.fsx.eu-west-1.amazonaws.com@tcp:/abcd"


def attributes(host: Host) -> dict[str, str]:
    found: dict[str, str] = json.loads(host.ecs_config.get("ECS_INSTANCE_ATTRIBUTES", "{}"))
    return found


def test_a_host_that_has_mounted_the_shared_file_system_says_so_to_ecs(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    run = host.boot(has_gpus=True, mount=SOURCE)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stdout
    # The agent starts when this script has ended, so it finds both.
    assert f"mount -t lustre -o relatime,flock {SOURCE} {host.shared}" in host.calls
    assert attributes(host) == {"training.node": "worker", "training.shared": "mounted"}
    client = next(call for call in host.calls if "lustre-client" in call)
    assert host.calls.index(client) < host.calls.index(
        f"mount -t lustre -o relatime,flock {SOURCE} {host.shared}"
    )
    assert f"chown 1000:1000 {host.shared}" in host.calls, "the containers' user writes there"
    assert not [call for call in host.calls if call.startswith("shutdown")]
    assert run.stdout.endswith("host-setup: done\n")


def test_a_host_that_cannot_mount_it_gets_no_task_and_makes_room_for_another(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path / "host", broken=("dnf", "mount"))
    run = host.boot(has_gpus=True, mount=SOURCE)
    assert "WARNING: no Lustre client" in run.stdout
    assert run.returncode == 1
    assert len([call for call in host.calls if call.startswith("mount")]) == MOUNT_ATTEMPTS
    assert attributes(host) == {}, "ECS places nothing there, even if the agent comes up"
    assert host.calls[-1] == "shutdown --poweroff now"
    assert f"host-setup: ERROR: {SOURCE} cannot be mounted; this host takes no task" in run.stdout
    assert not [call for call in host.calls if call.startswith("docker")]


def test_a_file_system_that_is_late_is_waited_for(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    late = host.root / "bin" / "mount"
    late.write_text(
        late.read_text().replace("exit 0", f'[ "$(grep -c ^mount {host.root}/calls)" -ge 3 ]')
    )
    run = host.boot(has_gpus=False, mount=SOURCE)
    assert run.returncode == 0, run.stderr
    assert len([call for call in host.calls if call.startswith("mount")]) == 3
    assert attributes(host)["training.shared"] == "mounted"
