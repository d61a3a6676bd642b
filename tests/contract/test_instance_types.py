"""Proves that the table of instance types is sound, and that what the stacks derive from it fits.

Every row is held against what ECS, gp3 and plain arithmetic allow; the script that writes them is
given EC2's answers; and a wrong name is answered with the right one.
"""

import json
import runpy
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from contract import instance_types
from contract.errors import InputError
from contract.instance_types import (
    INSTANCE_TYPES,
    InstanceType,
    instance_type,
)
from tests.conftest import ROOT

every_type = pytest.mark.parametrize("host", INSTANCE_TYPES.values(), ids=lambda host: host.name)
every_gpu_type = pytest.mark.parametrize(
    "host", [host for host in INSTANCE_TYPES.values() if host.gpu], ids=lambda host: host.name
)

# What Linux takes of the nominal MiB before the ECS agent counts: measured by the Karpenter
# project. The first five are the worst of their kinds.
KERNEL_MIB = {
    "c5.large": 405,
    "c5.xlarge": 560,
    "m5.large": 559,
    "m5.xlarge": 868,
    "c5.4xlarge": 1710,
    "c5.24xlarge": 7501,
    "m5.2xlarge": 1149,
    "m7i.large": 421,
    "g4dn.xlarge": 700,
    "g5.xlarge": 590,
    "g5.12xlarge": 5430,
    "g5.48xlarge": 20552,
    "p5.48xlarge": 49192,
}


@every_type
def test_the_container_leaves_room_for_the_host(host: InstanceType) -> None:
    assert 0 < host.container_cpu <= host.vcpus * 1024 - 128
    assert 0 < host.container_memory_mib <= host.memory_mib * 0.97 - 512
    # Linux and the firmware keep up to 7 percent; the agents need half a GiB.
    assert host.container_memory_mib <= host.memory_mib * 0.94 - 384
    assert host.container_memory_mib % 64 == 0
    # It is there to fill the host: a training job that gets half of it is a bug as well.
    assert host.container_cpu >= host.vcpus * 1024 * 0.9
    assert host.container_memory_mib >= host.memory_mib * 0.75


@pytest.mark.parametrize(("name", "kernel_mib"), KERNEL_MIB.items())
def test_the_container_fits_what_the_host_registers(name: str, kernel_mib: int) -> None:
    host = INSTANCE_TYPES[name]
    assert host.memory_mib - kernel_mib - host.container_memory_mib >= 384


def test_the_smallest_head_host_keeps_six_gib_for_its_container() -> None:
    assert INSTANCE_TYPES["m5.large"].container_memory_mib >= 6 * 1024


@every_type
def test_shared_memory_holds_rays_object_store_and_fits_in_the_container(
    host: InstanceType,
) -> None:
    assert host.shm_mib % 64 == 0
    # Ray takes 30 % of the container's memory; a loader and NCCL need something beside it.
    assert host.container_memory_mib * 0.3 + 256 <= host.shm_mib
    assert host.shm_mib <= host.container_memory_mib / 2


@every_type
def test_the_root_volume_is_one_that_gp3_allows(host: InstanceType) -> None:
    assert host.root_volume_gib >= (200 if host.gpu else 60)
    assert 125 < host.root_volume_mibps <= 1000
    assert 3000 <= host.root_volume_iops <= 16000
    assert host.root_volume_mibps <= 0.25 * host.root_volume_iops
    assert host.root_volume_iops <= 500 * host.root_volume_gib


@every_type
def test_each_row_is_plausible(host: InstanceType) -> None:
    assert INSTANCE_TYPES[host.name] is host
    assert (host.gpu is None) == (host.num_gpus == 0)
    assert host.num_gpus in {0, 1, 2, 4, 8}
    assert host.vcpus % 2 == 0
    assert 2 <= host.memory_mib / 1024 / host.vcpus <= 22
    assert host.memory_mib % 1024 == 0
    assert 0 < host.network_gbps <= 6400
    # Only large hosts have EFA, one interface to a network card.
    assert 0 <= host.efa_interfaces <= 32
    if host.efa_interfaces:
        assert host.network_gbps / host.efa_interfaces >= 25
    # More than one card's bandwidth takes more than one card, and those take EFA.
    assert host.needs_efa == (host.network_gbps > 100)
    if host.needs_efa:
        assert host.efa_interfaces > 1 or host.name == "g7e.12xlarge"
        assert host.tcp_gbps == 100
    else:
        assert host.tcp_gbps == host.network_gbps
    assert ("on-demand" in host.sold) == (host.usd_per_hour is not None)


@every_type
def test_prices_are_plausible(host: InstanceType) -> None:
    if host.usd_per_hour is None:
        assert host.name == "p5e.48xlarge"
    elif host.gpu is None:
        assert 0.04 <= host.usd_per_hour / host.vcpus <= 0.06
    else:
        # A big host around a single GPU costs several times the smallest one.
        assert 0.5 <= host.usd_per_hour / host.num_gpus <= 20
        assert 0.05 <= host.usd_per_hour / host.vcpus <= 0.75


@every_gpu_type
def test_the_figures_of_gpus_are_plausible(host: InstanceType) -> None:
    gpu = host.gpu
    assert gpu is not None
    assert 15 <= gpu.memory_gib <= 268
    # Tensor operations per byte of memory bandwidth: 117 (A10G) to 419 (L40S).
    assert 8 <= gpu.tflops <= 2250
    assert gpu.has_bf16 == (gpu.tflops > 60)
    assert (60 if gpu.has_bf16 else 20) <= gpu.tflops * 1e3 / gpu.memory_gb_per_s <= 450


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("g5.xlrage", ["'g5.xlrage'", " g5.xlarge", "48xlarge"]),
        ("G5.XLARGE", ["'G5.XLARGE'", " g5.xlarge"]),
        ("p5.24xlarge", [" 4xlarge, 48xlarge;"]),
        ("t3.micro", ["'t3.micro'", " g4dn, g5,", "c7i;"]),
        ("", ["''", " g4dn, g5,"]),
    ],
)
def test_an_unknown_name_is_answered_with_known_ones(name: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        instance_type(name)
    for part in [*parts, "instance_types"]:
        assert part in str(caught.value)


def test_a_type_whose_gpus_the_images_cannot_use_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"'p3\.8xlarge' is too old: CUDA 13.* g4dn") as caught:
        instance_type("p3.8xlarge")
    assert "nearest" not in str(caught.value)
    others = ("g4ad.xlarge", "dl1.24xlarge", "m7g.large", "c7gn.xlarge")
    for name in ("trn2.48xlarge", "inf2.xlarge", "g5g.xlarge", "p6e-gb200.36xlarge", *others):
        with pytest.raises(InputError, match=r"are for x86 and NVIDIA's GPUs; choose one of g4dn"):
            instance_type(name)


# --- the script that writes the table -------------------------------------------------------------
def ec2(name: str, *, cards: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What EC2 answers of a type, as far as it is read."""
    sold, efa = ["spot", "on-demand"], more.pop("efa", 0)
    return {
        "InstanceType": name,
        "SupportedUsageClasses": more.pop("sold", sold),
        "ProcessorInfo": {"SupportedArchitectures": [more.pop("cpu", "x86_64")]},
        "VCpuInfo": {"DefaultVCpus": 192},
        "MemoryInfo": {"SizeInMiB": 2097152},
        "NetworkInfo": {
            "NetworkCards": [{"NetworkCardIndex": i, **each} for i, each in enumerate(cards)],
            "EfaSupported": efa > 0,
            **({"EfaInfo": {"MaximumEfaInterfaces": efa}} if efa else {}),
        },
        **more,
    }


def gpus(name: str, mib: int, count: int = 8, **more: Any) -> dict[str, Any]:
    gpu = {"Name": name, "Manufacturer": "NVIDIA", "Count": count, **more}
    return {"Gpus": [gpu | {"MemoryInfo": {"SizeInMiB": mib}}]}


CARD = {"BaselineBandwidthInGbps": 100.0, "InterfaceTypes": ["interface", "efa", "efa-only"]}
#: Without EFA, as P6-B300's first.
PLAIN = {"BaselineBandwidthInGbps": 300.0, "InterfaceTypes": ["interface"]}
BLOCK = ["capacity-block", "on-demand"]
ANSWER = [
    ec2("p5.48xlarge", cards=[CARD] * 32, efa=32, GpuInfo=gpus("H100", 81920), sold=BLOCK),
    ec2("p6-b300.48xlarge", cards=[PLAIN, *[CARD] * 16], efa=16, GpuInfo=gpus("B300", 274432)),
    ec2("g9.xlarge", cards=[PLAIN], GpuInfo=gpus("L4", 22888, 1)),
    ec2("g9.2xlarge", cards=[PLAIN], GpuInfo=gpus("L9", 22888, 1)),
    ec2("g9f.large", cards=[PLAIN], GpuInfo=gpus("L4", 2861, 1, GpuPartitionSize=0.125)),
    ec2("m5.large", cards=[{"BaselineBandwidthInGbps": 0.75}]),
    ec2("m9i.large", cards=[PLAIN]),
    ec2("g5g.xlarge", cards=[PLAIN], cpu="arm64", GpuInfo=gpus("T4g", 16384, 1)),
    ec2("inf2.xlarge", cards=[PLAIN], NeuronInfo={"TotalNeuronDeviceMemoryInMiB": 32768}),
]


def test_the_table_is_written_from_what_ec2_answers() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "instance_types.py"))
    client = boto3.client(
        "ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )
    with Stubber(client) as stub:  # which holds the answers against botocore's model of EC2
        for page in (
            {"InstanceTypes": ANSWER[:4], "NextToken": "2"},
            {"InstanceTypes": ANSWER[4:]},
        ):
            stub.add_response("describe_instance_types", page)
        answer = script["ask"](client)
    old = json.loads(script["TABLE"].read_text())
    assert script["text_of"](old) == script["TABLE"].read_text(), "a line for each row"
    table, left_out = script["updated"](old, answer, read="today")
    types = instance_types.instance_types(table["types"])
    assert (table["read"], types.keys() - INSTANCE_TYPES.keys()) == ("today", {"g9.xlarge"})
    assert left_out == ["g9.2xlarge: give the figures of 'L9 22' in instance_types.json"]
    p5, b300, new = types["p5.48xlarge"], types["p6-b300.48xlarge"], types["g9.xlarge"]
    assert p5 == replace(INSTANCE_TYPES[p5.name], sold=("on-demand", "capacity-block"))
    assert (b300.efa_cards, b300.network_gbps) == (range(1, 17), 1900)
    assert (new.gpu, new.usd_per_hour) == (INSTANCE_TYPES["g6.xlarge"].gpu, None)
    assert types["m5.large"].usd_per_hour == INSTANCE_TYPES["m5.large"].usd_per_hour
