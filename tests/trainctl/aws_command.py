"""A command of the AWS CLI, read with botocore's own models of the services.

A wrong service, operation, option or value fails here as the AWS CLI would fail.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.model import Shape, StructureShape
from botocore.validate import ParamValidator

#: Options of every command.
_GLOBAL = ("region", "profile", "query")
_session = botocore.session.Session()


@dataclass(frozen=True, kw_only=True, slots=True)
class AwsCommand:
    """``aws SERVICE OPERATION --options``."""

    service: str
    operation: str
    """As a method of boto3's client."""
    arguments: dict[str, Any]
    region: str


def read(command: str) -> AwsCommand:
    """Parse and validate a command. Raises ValueError where AWS's CLI would refuse it."""
    program, service, operation, *rest = shlex.split(command)
    if program != "aws" or service not in _session.get_available_services():
        raise ValueError(f"{command}: there is no service {service!r} of the AWS CLI")
    model = _session.get_service_model(service)
    names = {xform_name(each, "-"): each for each in model.operation_names}
    if operation not in names:
        raise ValueError(f"{command}: {service} has no operation {operation!r}")
    shape = model.operation_model(names[operation]).input_shape
    members = shape.members if isinstance(shape, StructureShape) else {}
    options = {xform_name(each, "-"): each for each in members}
    given: dict[str, Any] = {}
    region = ""
    while rest:
        word, *rest = rest
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        name = word.removeprefix("--")
        if name in _GLOBAL:
            (value,) = values
            region = value if name == "region" else region
        elif name in options:
            given[options[name]] = _value(members[options[name]], values)
        else:
            raise ValueError(f"{command}: {operation} has no option {word!r}")
    if shape is not None:
        errors = ParamValidator().validate(given, shape)
        if errors.has_errors():
            raise ValueError(f"{command}: {errors.generate_report()}")
    return AwsCommand(
        service=service, operation=xform_name(names[operation]), arguments=given, region=region
    )


def _value(shape: Shape, words: list[str]) -> Any:
    """Words as the AWS CLI takes them for a parameter, its shorthand syntax included."""
    if shape.type_name == "list":
        return [_checked(shape.member, each) for each in words]  # type: ignore[attr-defined]
    if len(words) != 1:
        raise ValueError(f"{shape.name} takes one value, not {words}")
    return _checked(shape, words[0])


def _checked(shape: Shape, word: str) -> Any:
    """A word as a value; botocore checks neither the values that a field may have nor patterns."""
    if isinstance(shape, StructureShape):
        pairs = dict(part.split("=", 1) for part in word.split(","))
        if unknown := pairs.keys() - shape.members.keys():
            raise ValueError(f"{shape.name} has no {sorted(unknown)}")
        return {name: _value(shape.members[name], [value]) for name, value in pairs.items()}
    if (allowed := getattr(shape, "enum", None)) and word not in allowed:
        raise ValueError(f"{shape.name} is {word!r}: it must be one of {allowed}")
    if (pattern := shape.metadata.get("pattern")) and not re.search(pattern, word):
        raise ValueError(f"{shape.name} is {word!r}: it must match {pattern}")
    if shape.type_name in ("double", "float"):
        return float(word)
    if shape.type_name in ("integer", "long"):
        return int(word)
    return word
