"""Writes ``contract/instance_types.json`` anew from what EC2 answers to DescribeInstanceTypes.

    python .ci/instance_types.py                # asks EC2, in the region of the AWS profile in use
    python .ci/instance_types.py ANSWER.json    # `aws ec2 describe-instance-types > ANSWER.json`

EC2 tells neither prices nor the speed of GPUs: prices stay as they are in the file, and a type
whose GPU has no row under ``gpus`` is left out, with a line that says so. Types without GPUs are
those that are in the file; new ones with NVIDIA's GPUs join it, without a price.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

#: What may be in ``SupportedUsageClasses``.
SALES: Final = ("on-demand", "spot", "capacity-block")
TABLE: Final = Path(__file__).parents[1] / "contract" / "instance_types.json"


def row_of(info: Mapping[str, Any], old: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A type as the file has it; None where the images do not run on it.

    Args:
        info: an ``InstanceTypeInfo`` of EC2.
        old: its row of today.
    """
    gpus = info.get("GpuInfo", {}).get("Gpus", [])
    # A part of a GPU, as g6f has it, is sold by the size of the part.
    whole = all(each.get("GpuPartitionSize", 1) == 1 for each in gpus)
    nvidia = len(gpus) == 1 and gpus[0]["Manufacturer"] == "NVIDIA" and whole
    is_x86 = "x86_64" in info["ProcessorInfo"]["SupportedArchitectures"]
    if not is_x86 or "NeuronInfo" in info or not (nvidia or (old and not gpus)):
        return None
    network = info["NetworkInfo"]
    cards = network["NetworkCards"]
    gbps = sum(each["BaselineBandwidthInGbps"] for each in cards)
    row = {
        "vcpus": info["VCpuInfo"]["DefaultVCpus"],
        "memory_mib": info["MemoryInfo"]["SizeInMiB"],
        "network_gbps": round(gbps, 3),
        "sold": [each for each in SALES if each in info["SupportedUsageClasses"]],
    }
    if gpus:
        # EC2's name and GiB: there are A100 of 40 and of 80.
        row["gpu"] = f"{gpus[0]['Name']} {round(gpus[0]['MemoryInfo']['SizeInMiB'] / 1024)}"
        row["num_gpus"] = gpus[0]["Count"]
    if network.get("EfaSupported"):
        row["efa_interfaces"] = network["EfaInfo"]["MaximumEfaInterfaces"]
        kinds = {each["NetworkCardIndex"]: each.get("InterfaceTypes", ["efa"]) for each in cards}
        if first := min(card for card, each in kinds.items() if {"efa", "efa-only"} & {*each}):
            row["first_efa_card"] = first
    return row | {"usd_per_hour": old["usd_per_hour"]} if old and "usd_per_hour" in old else row


def updated(
    table: Mapping[str, Any], answer: Iterable[Mapping[str, Any]], *, read: str
) -> tuple[dict[str, Any], list[str]]:
    """The table with what EC2 answers, and the types that were left out, each with the reason."""
    types, left_out = dict(table["types"]), []
    for info in sorted(answer, key=lambda each: str(each["InstanceType"])):
        name = info["InstanceType"]
        row = row_of(info, types.get(name))
        if row and row.get("gpu", "") not in {"", *table["gpus"]}:
            left_out.append(f"{name}: give the figures of {row['gpu']!r} in {TABLE.name}")
        elif row:
            types[name] = row
    return {"read": read, "gpus": table["gpus"], "types": types}, left_out


def text_of(table: Mapping[str, Any]) -> str:
    """The file: a line for each row."""

    def rows(part: Mapping[str, Any]) -> str:
        lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in part.items())
        return "{\n" + ",\n".join(lines) + "\n}"

    parts = (f'"{part}": {rows(table[part])}' for part in ("gpus", "types"))
    return "{\n" + f'"read": {json.dumps(table["read"])},\n' + ",\n".join(parts) + "\n}\n"


def ask(client: Any) -> list[Mapping[str, Any]]:
    """All instance types of a region."""
    pages = client.get_paginator("describe_instance_types").paginate()
    return [*pages.search("InstanceTypes[]")]


def main(answers: list[str]) -> None:
    if answers:
        texts = [json.loads(Path(file).read_text()) for file in answers]
        found = [each for text in texts for each in text["InstanceTypes"]]
    else:
        import boto3

        found = ask(boto3.client("ec2"))
    read = f"{time.strftime('%Y-%m-%d')}, from EC2's DescribeInstanceTypes"
    old = json.loads(TABLE.read_text())
    if kept := old["types"].keys() - {each["InstanceType"] for each in found}:
        read = f"{read}, but for {len(kept)} types: {old['read']}"
    table, left_out = updated(old, found, read=read)
    TABLE.write_text(text_of(table))
    print(*left_out, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
