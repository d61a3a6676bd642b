"""Whether the EFA devices of a host are in its container and can be used, before the node joins."""

import os
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/dev/infiniband")


def faults(num_efa: int, devices: Path = DEVICES) -> list[str]:
    """What is wrong with the devices, a line each; empty when all are fit.

    Args:
        num_efa: How many there should be.
        devices: Folder of them.
    """
    found = sorted(devices.glob("uverbs*"))
    if len(found) != num_efa:
        return [f"{len(found)} EFA devices are in {devices}, {num_efa} should be"]
    return [
        f"this user may not read and write {each}"
        for each in found
        if not os.access(each, os.R_OK | os.W_OK)
    ]
