"""EFA follows from the instance type, and nothing of it is there where it is not used.

No emulator shows any of this: each trap of real AWS is asserted on the template.
"""

import itertools
import re
import shlex

import pytest

from contract.instance_types import INSTANCE_TYPES, InstanceType
from contract.outputs import SHAPE
from stacks.cluster.efa import variables
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, text
from tests.stacks.conftest import variables as of_container
from tests.stacks.test_training_stack import container, hosts

#: Type -> its EFA interfaces, as AWS has them, typed here a second time.
TYPES = {
    "p6-b300.48xlarge": 16,
    "p4d.24xlarge": 4,
    "p5.48xlarge": 32,
    "g6e.12xlarge": 1,
    "g5.12xlarge": 1,
}
#: Deployments with EFA, of a type with many interfaces and of one with a single one.
DEPLOYED = {
    "p5.48xlarge": {"worker_instance_type": "p5.48xlarge", "max_workers": "2"},
    "g5.12xlarge": {"preset": "fsdp", "efa": "on"},  # the head as well
}
each_deployed = pytest.mark.parametrize("machine", DEPLOYED)
every_efa_type = pytest.mark.parametrize(
    "machine",
    [each for each in INSTANCE_TYPES.values() if each.efa_interfaces],
    ids=lambda each: each.name,
)


def test_the_line_of_the_readme_deploys_p4d_with_efa(synth: Synth) -> None:
    (line,) = re.findall(r"`(npx cdk deploy .*p4d.*)`", (ROOT / "README.md").read_text())
    words = shlex.split(line)
    settings = dict(
        given.split("=") for option, given in itertools.pairwise(words) if option == "-c"
    )
    data = hosts(synth(**settings), "worker")
    assert data["InstanceType"] == "p4d.24xlarge"
    assert len(data["NetworkInterfaces"]) == TYPES["p4d.24xlarge"]
    assert data["NetworkInterfaces"][0]["InterfaceType"] == "efa"
    # What the script does is in ``test_host_setup``.
    pages = INSTANCE_TYPES["p4d.24xlarge"].efa_huge_pages_mib // 2
    assert f"vm.nr_hugepages = {pages}" in text(data["UserData"])


@each_deployed
def test_each_network_card_has_one_interface_that_names_the_group_of_the_nodes(
    synth: Synth, machine: str
) -> None:
    data = hosts(synth(**DEPLOYED[machine]), "worker")
    # EC2 refuses a template that has both.
    assert "SecurityGroupIds" not in data
    found = data["NetworkInterfaces"]
    assert [each["NetworkCardIndex"] for each in found] == [*range(TYPES[machine])]
    assert [each["DeviceIndex"] for each in found] == [0, *[1] * (TYPES[machine] - 1)]
    # The host's own carries IP too; the others take no address of the subnet. Card 0 has that one
    # only: a card of p5.48xlarge takes two, and the task's own is the other.
    others = TYPES[machine] - 1
    assert [each["InterfaceType"] for each in found] == ["efa", *["efa-only"] * others]
    assert {each["DeleteOnTermination"] for each in found} == {True}
    for each in found:
        (group,) = each["Groups"]
        assert text(group) == "<ClusterSecurityGroup0921994B.GroupId>"
        # EC2 refuses it with several interfaces, whatever its value; the subnet is the group's.
        assert not each.keys() & {"AssociatePublicIpAddress", "SubnetId"}


def test_the_first_card_of_p6_b300_carries_only_ip(synth: Synth) -> None:
    data = hosts(synth(worker_instance_type="p6-b300.48xlarge", max_workers="2"), "worker")
    found = [
        (each["NetworkCardIndex"], each["InterfaceType"]) for each in data["NetworkInterfaces"]
    ]
    assert found == [(0, "interface"), *((card, "efa-only") for card in range(1, 17))]


@every_efa_type
def test_huge_pages_leave_the_container_its_memory(machine: InstanceType) -> None:
    assert 0 < machine.efa_huge_pages_mib <= 5120
    # Linux and the firmware keep 3 % of such hosts, the agents 384 MiB.
    left = 0.97 * machine.memory_mib - machine.container_memory_mib - machine.efa_huge_pages_mib
    assert left >= 384


@each_deployed
def test_the_container_has_every_device_and_may_lock_memory(synth: Synth, machine: str) -> None:
    found = container(synth(**DEPLOYED[machine]), "worker")
    paths = [f"/dev/efa/{number}" for number in range(TYPES[machine])]
    devices = found["LinuxParameters"]["Devices"]
    assert [each["HostPath"] for each in devices] == paths
    assert [each["ContainerPath"] for each in devices] == paths
    assert all(each["Permissions"] == ["read", "write"] for each in devices)
    mounted = {each["ContainerPath"]: each["SourceVolume"] for each in found["MountPoints"]}
    assert mounted["/dev/infiniband"] == "efa"
    (locked,) = [each for each in found["Ulimits"] if each["Name"] == "memlock"]
    assert (locked["SoftLimit"], locked["HardLimit"]) == (-1, -1)


@pytest.mark.parametrize("machine", TYPES)
def test_libfabric_and_nccl_are_told_what_the_type_needs(machine: str) -> None:
    found = variables(INSTANCE_TYPES[machine], uses_efa=True)
    assert found["TRAIN_EFA"] == str(TYPES[machine])
    assert found["FI_PROVIDER"] == "efa"
    assert found["NCCL_DEBUG"] == "INFO", "NCCL names its network in its log only"
    assert found["NCCL_DEBUG_FILE"] == "/tmp/nccl-%h-%p.log"
    # libfabric ends a program that asks for RDMA where the device has none.
    assert found.get("FI_EFA_USE_DEVICE_RDMA") == ("1" if machine.startswith("p") else None)
    assert found.get("NCCL_SHM_USE_CUDA_MEMCPY") == ("1" if machine.startswith("g") else None)


@pytest.mark.parametrize(("node", "efa"), [("worker", "off"), ("head", "auto")])
def test_without_efa_and_on_a_head_that_does_not_train_nothing_of_it_is_there(
    synth: Synth, node: str, efa: str
) -> None:
    templates = synth(**DEPLOYED["p5.48xlarge"], efa=efa)
    data, runs = hosts(templates, node), container(templates, node)
    assert "NetworkInterfaces" not in data
    assert len(data["SecurityGroupIds"]) == 1
    assert "modprobe efa" not in text(data["UserData"])
    assert "Devices" not in runs["LinuxParameters"]
    assert not of_container(runs).keys() & {"TRAIN_EFA", "FI_PROVIDER", "NCCL_DEBUG"}
    shape = text(templates.training["Outputs"][SHAPE]["Value"])
    assert ('"efa": false' in shape) is (efa == "off")


def test_a_head_that_trains_has_all_of_it(synth: Synth) -> None:
    templates = synth(**DEPLOYED["g5.12xlarge"])
    assert len(hosts(templates, "head")["NetworkInterfaces"]) == 1
    assert (
        of_container(container(templates, "head")).items()
        >= variables(INSTANCE_TYPES["g5.12xlarge"], uses_efa=True).items()
    )
    assert container(templates, "head")["LinuxParameters"]["Devices"]
