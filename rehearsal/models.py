"""Validation of requests against AWS's own service models, which come with botocore.

    faults(request_shape("ecs", "RunTask"), {"cluster": "train"})
    -> ['Missing required parameter in input: "taskDefinition"']

botocore checks what its callers give it, and less than a service does: no pattern, no value of an
enumeration, no upper limit. The local AWS asks for every request in JSON, a test for the state that
starts heads.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape, StructureShape
from botocore.validate import ParamValidator, ValidationErrors

#: Of the values of an enumeration: EC2 has a thousand types of instances.
SHOWN = 8


@functools.cache
def service(name: str) -> ServiceModel:
    """AWS's model of a service, by the name that boto3 gives it.

    Raises:
        UnknownServiceError: there is none.
    """
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


def request_shape(service_name: str, action: str) -> StructureShape | None:
    """Shape of an action's request; None if it takes no parameters.

    Raises:
        UnknownServiceError: there is no such service.
        OperationNotFoundError: it has no such action.
    """
    found: StructureShape | None = service(service_name).operation_model(action).input_shape
    return found


def faults(shape: Shape | None, parameters: Mapping[str, Any]) -> list[str]:
    """Faults that a service would find in a request; empty for a valid one.

    Args:
        shape: of the request; None if it takes no parameters.
        parameters: of the request.
    """
    if shape is None:
        return [f"it takes no parameters: {parameters!r}"] if parameters else []
    check = _Service()
    found = check.validate(parameters, shape)
    return [*found.generate_report().splitlines(), *check.refused]


class _Service(ParamValidator):
    """botocore's checks, and those that it leaves to the service."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        # For what a list has to look at its members one by one.
        self.VALIDATED_METADATA_ATTRS = self.VALIDATED_METADATA_ATTRS | {"max", "enum", "pattern"}

    def _validate(self, params: Any, shape: Shape, errors: ValidationErrors, name: str) -> None:
        super()._validate(params, shape, errors, name)  # type: ignore[misc]  # not in the stubs
        said = f"Invalid value for parameter {name.removeprefix('.')}, value: {params!r}, "
        self.refused += [said + allowed for allowed in _limits(shape, params)]


def _limits(shape: Shape, value: Any) -> Iterator[str]:
    """Limits that a value violates: the service enforces them, botocore does not."""
    most, size = shape.metadata.get("max"), value
    if isinstance(value, str | list | dict):
        size = len(value)
    if most is not None and isinstance(size, int | float) and size > float(most):
        yield f"valid max: {most}"
    if not isinstance(value, str):
        return
    values = getattr(shape, "enum", None)
    if values and value not in values:
        more = ", ..." if len(values) > SHOWN else ""
        yield f"valid values: {', '.join(values[:SHOWN])}{more}"
    pattern = _pattern(str(shape.metadata.get("pattern", "")))
    if pattern and not pattern.search(value):
        yield f"valid pattern: {shape.metadata['pattern']}"


#: Java's words for what patterns of tags, and of most texts of EC2 Auto Scaling, are made of, and
#: Python's. ``\\w`` is letters, numbers and ``_``, which all of those patterns allow.
_FROM_JAVA: Mapping[str, str] = {
    r"\p{L}\p{Z}\p{N}_": r"\w \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\uD800\uDC00-\uDBFF\uDFFF": r"\U00010000-\U0010FFFF",
    r"\p{ASCII}": r"[\x00-\x7f]",
}


@functools.cache
def _pattern(text: str) -> "re.Pattern[str] | None":
    """A pattern of a model; None for one in other words that only Java knows, as ``\\p{M}``."""
    if not text:
        return None
    for java, python in _FROM_JAVA.items():
        text = text.replace(java, python)
    # A pattern without anchors is meant for the whole text.
    is_anchored = text.startswith("^") or text.endswith("$")
    try:
        return re.compile(text if is_anchored else f"^(?:{text})$")
    except re.error:
        return None
