"""Checks of single settings: each raises InputError with the allowed values."""

import ipaddress
import re
from typing import Final, NoReturn

from contract.errors import InputError

# Docker gives its bridge on every host this network: a VPC of the same addresses is not reachable
# from a container. The second is link-local: instance metadata and the time service live there.
RESERVED_NETWORKS: Final = ("172.17.0.0/16", "169.254.0.0/16")
PRIVATE_NETWORKS: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")


def cidr(name: str, value: str) -> None:
    """Of a VPC."""
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        refuse(name, value, f"a network such as 10.0.0.0/16 ({error})")
    if not 16 <= network.prefixlen <= 24:
        refuse(name, value, "a network from /16 to /24: one subnet holds all hosts and tasks")
    if not any(network.subnet_of(ipaddress.IPv4Network(each)) for each in PRIVATE_NETWORKS):
        refuse(name, value, f"inside one of the private networks {', '.join(PRIVATE_NETWORKS)}")
    for each in RESERVED_NETWORKS:
        if network.overlaps(ipaddress.IPv4Network(each)):
            refuse(name, value, f"apart from {each}, which Docker uses on every host")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        refuse(name, value, f"one of {', '.join(allowed)}")


def in_range(name: str, value: int, low: int, high: int, *, zero: str = "") -> None:
    if not low <= value <= high:
        refuse(name, value, f"{low} to {high}" + (f", or 0 for {zero}" if zero else ""))


def matches(
    name: str, value: str, pattern: re.Pattern[str], what: str, *, empty: bool = True
) -> None:
    if not (pattern.fullmatch(value) or (empty and not value)):
        refuse(name, value, what)


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raises InputError."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    raise InputError(
        f"setting {name} is {shown}: it must be {allowed} (give -c {name}=… or edit cdk.json)"
    )
