"""The deployment that ``make deploy`` would make, read as the CDK app reads it.

The one place of ``trainctl`` that knows of the app: a deployment that is there is found by its
outputs (``trainctl.aws.deployment``) and needs no checkout.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from trainctl.aws.deployment import Undeployed
from trainctl.aws.errors import UsageError

if TYPE_CHECKING:
    from stacks.settings import Settings

_QUALIFIER_KEY: Final = "@aws-cdk/core:bootstrapQualifier"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Settings of a deployment, and which bootstrap of the CDK it uses."""

    settings: "Settings"
    qualifier: str
    """Qualifier of the CDK's bootstrap; empty: the default one."""

    @property
    def shape(self) -> ClusterShape:
        """The shape that ``trainctl`` would read from the outputs."""
        return self.settings.shape


def project() -> Path:
    """Folder of the CDK app: this one, or the one that this module is part of.

    Raises:
        InputError: neither has a ``cdk.json``.
    """
    for folder in (Path.cwd(), Path(__file__).parents[2]):
        if (folder / "cdk.json").is_file() and (folder / "stacks").is_dir():
            return folder
    raise InputError(
        f"there is no cdk.json of this project in {Path.cwd()}: give the command in a checkout of "
        "the project, where make deploy is given too"
    )


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """``-c name=value``, as the CDK takes it.

    Raises:
        UsageError: there is no ``=``.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"-c {word}: give a setting as name=value, such as -c preset=fsdp")
        found[name] = value
    return found


def read(folder: Path, overrides: Mapping[str, str], *, region: str = "") -> Planned:
    """Settings of ``cdk.json`` with those given.

    Args:
        region: in use; a zone is checked against it.

    Raises:
        InputError: ``cdk.json`` or the app cannot be read, or a setting is wrong.
    """
    try:
        from stacks.settings import load
    except ImportError:
        # Installed as the command line only, which is not the folder that it is used in.
        raise InputError(
            f"this trainctl is installed without the CDK app, whose settings are in {folder}: give "
            "python -m trainctl doctor there"
        ) from None
    file = folder / "cdk.json"
    try:
        context = json.loads(file.read_text(encoding="utf-8"))["context"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}): restore it from the project") from None
    if not isinstance(context, dict):
        raise InputError(f"{file}: its context is no table of settings")
    context |= overrides
    found = load(context, region=region)
    return Planned(settings=found, qualifier=str(context.get(_QUALIFIER_KEY, "")))


def undeployed(context: Sequence[str], *, region: str | None) -> Undeployed:
    """Deployment that ``make deploy`` would make with these ``-c``, by default in a priced region.

    Raises:
        InputError, UsageError: a setting is wrong, or this is no checkout.
    """
    planned = read(project(), parse_settings(context))
    region = region or planned.settings.region or os.environ.get("AWS_REGION") or "us-east-1"
    return Undeployed(planned.shape, region=region)
