"""Allowed values of single settings: another one is an InputError that names them."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Final, NoReturn

from contract.cluster_shape import MOST_WORKERS
from contract.errors import InputError
from contract.instance_types import PERSISTENT, PERSISTENT_GIB_MONTH, SCRATCH
from contract.job import MAIL, MAX_SECONDS
from contract.outputs import CORE_STACK, TRAINING_STACK
from contract.reserved import RESERVED

# Docker gives its bridge on every host this network: a VPC of the same addresses is not reachable
# from a container.
DOCKER_NETWORK: Final = "172.17.0.0/16"
PRIVATE_NETWORKS: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")

_BUCKET: Final = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_RESERVED: Final = [name for each in RESERVED.values() for name in each]
#: Names of this app's stacks: those of the deployment without a name begin with them.
_STACKS: Final = (CORE_STACK, TRAINING_STACK)
#: Beside two of the deployment itself (ECS's quota "Capacity providers per cluster").
MOST_POOLS: Final = 18
#: AWS reserves the prefix; CDK adds ``project``.
_TAG: Final = r"(?!aws:|project=)[\w .:/+@-]{1,128}=[\w .:/+@-]{0,256}"
_LABEL: Final = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
#: Texts: pattern of all of it, and what it must be in words.
TEXTS: Final[Mapping[str, tuple[str, str]]] = {
    # Part of a dashboard's name.
    "preset": ("[A-Za-z0-9_-]{1,64}", "letters, digits, - and _: rename it in cdk.json"),
    "deployment": (
        f"|(?!(?i:{'|'.join((*_RESERVED, *_STACKS))}))[A-Za-z]([A-Za-z0-9-]{{0,28}}[A-Za-z0-9])?",
        "up to 30 letters, digits and -, between letters, or empty; AWS reserves names that begin "
        f"with {', '.join(_RESERVED)}, and this app {' and '.join(_STACKS)}",
    ),
    "region": (r"|[a-z]{2,4}(-[a-z]+)+-\d", "a region such as eu-west-1, or empty"),
    "availability_zone": (r"|[a-z]{2,4}(-[a-z]+)+-\d[a-z]", "a zone such as eu-west-1a, or empty"),
    "capacity_reservation_id": (
        "|cr-[0-9a-f]{17}",
        "the id of a reservation (cr- and 17 hexadecimal digits), or empty",
    ),
    "base_image": (
        r"|[^\s@]+@sha256:[0-9a-f]{64}",
        "an image by digest, such as NAME@sha256:… (docker buildx imagetools inspect), or empty",
    ),
    "image_tag": ("[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "an image tag, such as v1, or empty"),
    "vpc_id": ("|vpc-[0-9a-f]{8,17}", "the id of a VPC, or empty"),
    "subnet_id": ("|subnet-[0-9a-f]{8,17}", "the id of a subnet, or empty"),
    "bucket": (f"|{_BUCKET}", "the name of a bucket, or empty"),
    "data_buckets": (f"|{_BUCKET}(,{_BUCKET})*", "names of buckets, separated by commas, or empty"),
    "worker_ami": ("|/[A-Za-z0-9_./-]+", "the name of a parameter, such as /ml/ami, or empty"),
    "tags": (
        f"|{_TAG}(,{_TAG})*",
        "KEY=VALUE, separated by commas, of letters, digits, spaces and _.:/+@-, or empty",
    ),
    "namespace": (
        rf"(?!.{{249}}){_LABEL}(\.{_LABEL})*",
        "a DNS name in lower case, of at most 248 characters, such as training.internal",
    ),
    "alarm_email": (f"|{MAIL}", "an e-mail address, or empty"),
    "github_repository": (
        # With GitHub's ids of owner and repository, or without.
        r"|[A-Za-z0-9][A-Za-z0-9-]{0,38}(@\d+)?/[A-Za-z0-9._-]{1,100}(?<!\.git)(@\d+)?",
        "owner/name of one GitHub repository, or empty",
    ),
    "github_branch": (
        "[A-Za-z0-9][A-Za-z0-9._/-]{0,99}",
        "the name of one branch, without wildcards",
    ),
    "github_oidc_provider_arn": (
        r"|arn:aws[a-z-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com",
        "the ARN of the account's provider token.actions.githubusercontent.com, or empty",
    ),
}
#: The only values of some settings.
CHOICES: Final[Mapping[str, tuple[str | int, ...]]] = {
    "capacity_reservation_type": ("block", "on-demand"),
    "efa": ("auto", "on", "off"),
    "shared_storage": ("none", "fsx"),
    "fsx_deployment": (SCRATCH, PERSISTENT),
    "fsx_mbps_per_tib": tuple(PERSISTENT_GIB_MONTH),
    "fsx_on_destroy": ("export", "delete"),
    # What CloudWatch Logs accepts.
    "log_retention_days": (
        *(1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731),
        *(1096, 1827, 2192, 2557, 2922, 3288, 3653),
    ),
}
#: Numbers: the least and the most.
NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "max_heads": (1, 16),
    "max_workers": (1, MOST_WORKERS),
    "max_job_hours": (1, MAX_SECONDS // 3600),
    "max_jobs_per_user": (0, 16),
    "monthly_budget_usd": (0, 100_000_000),
}


def check(values: Mapping[str, str | int]) -> None:
    """Check each setting by itself.

    Raises:
        InputError: one has a value that is not allowed.
    """
    for name, (pattern, what) in TEXTS.items():
        if not re.fullmatch(pattern, str(values[name])):
            refuse(name, values[name], what)
    for name, allowed in CHOICES.items():
        one_of(name, values[name], allowed)
    for name, (low, high) in NUMBERS.items():
        if not low <= int(values[name]) <= high:
            refuse(name, values[name], f"{low} to {high}")
    _cidr("vpc_cidr", str(values["vpc_cidr"]))


def _cidr(name: str, value: str) -> None:
    """Validate the CIDR block of a VPC."""
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        refuse(name, value, f"a network such as 10.0.0.0/16 ({error})")
    if not 16 <= network.prefixlen <= 24:
        refuse(name, value, "a network from /16 to /24: one subnet holds all hosts and tasks")
    if not any(network.subnet_of(ipaddress.IPv4Network(each)) for each in PRIVATE_NETWORKS):
        refuse(name, value, f"inside one of the private networks {', '.join(PRIVATE_NETWORKS)}")
    if network.overlaps(ipaddress.IPv4Network(DOCKER_NETWORK)):
        refuse(name, value, f"apart from {DOCKER_NETWORK}, which Docker uses on every host")


def one_of(name: str, value: str | int, allowed: tuple[str | int, ...]) -> None:
    """Refuse a value that is not allowed. Raises InputError."""
    if value not in allowed:
        refuse(name, value, f"one of {', '.join(map(str, allowed))}")


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raises InputError."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    raise InputError(
        f"setting {name} is {shown}: it must be {allowed} (give -c {name}=… or edit cdk.json)"
    )
