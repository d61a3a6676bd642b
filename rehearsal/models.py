"""Validation of requests against AWS's own service models, which come with botocore.

    faults(request_shape("ecs", "RunTask"), {"cluster": "train"})
    -> ["taskDefinition: it is required and missing"]

The SDKs check what their callers give them, and less than a service does: no pattern, no value of
an enumeration, no upper limit. Requests made by hand, and the states of Step Functions that call a
service (``state_faults``), are checked by the service only.

The local AWS asks it for every request in JSON, and tests ask it for the synthesized templates.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from botocore.exceptions import UnknownServiceError
from botocore.loaders import Loader
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StructureShape

#: A value that Step Functions only knows when it comes to it.
_EXPRESSION = re.compile(r"\{%.*%\}", re.DOTALL)
_INTEGRATION = re.compile(
    r"arn:(?:aws[\w-]*|<AWS::Partition>):states:::(?:aws-sdk:)?([\w-]+):(\w+)(?:\.[\w.:]+)?"
)
#: Of the values of an enumeration: EC2 has a thousand types of instances.
SHOWN = 8
#: Fields of a state's own whose end is ``.$``: an older way of writing an expression.
_PATH = ".$"

Spelling = Callable[[str], str]


def as_modelled(name: str) -> str:
    """A member's name as requests have it."""
    return name


def pascal(name: str) -> str:
    """A member's name as Step Functions and CloudFormation write it."""
    return name[:1].upper() + name[1:]


@functools.cache
def service(name: str) -> ServiceModel:
    """AWS's model of a service, by the name that boto3 gives it.

    Raises:
        UnknownServiceError: there is none.
    """
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


def request_shape(service_name: str, action: str) -> StructureShape | None:
    """What a request consists of; None for one that takes nothing.

    Raises:
        UnknownServiceError: there is no such service.
        OperationNotFoundError: it has no such action.
    """
    found: StructureShape | None = service(service_name).operation_model(action).input_shape
    return found


def faults(
    shape: Shape | None,
    given: object,
    *,
    spelling: Spelling = as_modelled,
    is_template: bool = False,
) -> list[str]:
    """What a service would refuse in a request; empty where it would take it.

    Args:
        shape: of the request.
        given: its parameters.
        spelling: of the members' names.
        is_template: values may be expressions of a state machine, which are not looked into; any
            JSON may stand for bytes.
    """
    if shape is None:
        names = given if isinstance(given, Mapping) else ()
        return [f"{name}: it takes no parameters" for name in names]
    return [*_Check(spelling, is_template).all(shape, given, "")]


class _Check:
    """One request's check, shape by shape."""

    def __init__(self, spelling: Spelling, is_template: bool) -> None:
        self._spelling, self._is_template = spelling, is_template

    def all(self, shape: Shape, value: object, where: str) -> Iterator[str]:
        """Faults of a value and of all that is in it."""
        if self._is_template and isinstance(value, str) and _EXPRESSION.search(value):
            return
        kind = shape.type_name
        if isinstance(shape, StructureShape):
            yield from self._structure(shape, value, where)
        elif isinstance(shape, ListShape):
            yield from self._list(shape, value, where)
        elif isinstance(shape, MapShape):
            yield from self._map(shape, value, where)
        elif kind == "blob" and self._is_template:
            return
        elif not isinstance(value, _TYPES[kind]) or (
            isinstance(value, bool) and kind in ("integer", "long", "float", "double")
        ):
            yield f"{where}: {value!r} is no {kind}"
        else:
            yield from _limits(shape, value, where)

    def _structure(self, shape: StructureShape, value: object, where: str) -> Iterator[str]:
        if getattr(shape, "is_document_type", False):
            return
        if not isinstance(value, Mapping):
            yield f"{where or shape.name}: {value!r} is no structure"
            return
        members = {self._spelling(name): each for name, each in shape.members.items()}
        given = dict(value)
        if self._is_template:
            for name in [each for each in given if str(each).endswith(_PATH)]:
                given[str(name).removesuffix(_PATH)] = "{%%}"
                del given[name]
        for name in shape.required_members:
            if self._spelling(name) not in given:
                yield f"{_within(where, self._spelling(name))}: it is required and missing"
        if getattr(shape, "is_tagged_union", False) and len(given) != 1:
            yield f"{where}: exactly one of {', '.join(members)} is allowed"
        for name, each in given.items():
            if name in members:
                yield from self.all(members[name], each, _within(where, str(name)))
            else:
                yield f"{_within(where, str(name))}: there is no such parameter"

    def _list(self, shape: ListShape, value: object, where: str) -> Iterator[str]:
        if not isinstance(value, list | tuple):
            yield f"{where}: {value!r} is no list"
            return
        yield from _size(shape, len(value), where)
        for number, each in enumerate(value):
            yield from self.all(shape.member, each, f"{where}[{number}]")

    def _map(self, shape: MapShape, value: object, where: str) -> Iterator[str]:
        if not isinstance(value, Mapping):
            yield f"{where}: {value!r} is no map"
            return
        yield from _size(shape, len(value), where)
        for name, each in value.items():
            yield from self.all(shape.key, name, f"{where}.{name}")
            yield from self.all(shape.value, each, f"{where}.{name}")


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "character": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "timestamp": (int, float, str, datetime),
    "blob": (str, bytes),
}


def _within(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _limits(shape: Shape, value: object, where: str) -> Iterator[str]:
    """What a value of a simple type must be."""
    if isinstance(value, str) and shape.type_name == "string":
        yield from _size(shape, len(value), where)
        values = getattr(shape, "enum", None)
        if values and value not in values:
            more = ", ..." if len(values) > SHOWN else ""
            yield f"{where}: {value!r} is not one of {', '.join(values[:SHOWN])}{more}"
        pattern = _pattern(str(shape.metadata.get("pattern", "")))
        if pattern and not pattern.search(value):
            yield f"{where}: {value!r} does not match {shape.metadata['pattern']}"
    elif isinstance(value, int | float) and shape.type_name in ("integer", "long", "double"):
        yield from _size(shape, value, where)


def _size(shape: Shape, size: float, where: str) -> Iterator[str]:
    """A number, or a length, within the limits of its shape."""
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and size < float(least):
        yield f"{where}: {size} is less than {least}"
    if most is not None and size > float(most):
        yield f"{where}: {size} is more than {most}"


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


# --- state machines -------------------------------------------------------------------------------
def state_faults(definition: Mapping[str, object]) -> list[str]:
    """What Step Functions would refuse in the states that call a service, or that service then.

    Args:
        definition: a state machine in Amazon States Language.
    """
    return [
        f"{name}: {fault}"
        for name, state in _states(definition)
        if state.get("Type") == "Task"
        for fault in task_faults(state)
    ]


def _states(definition: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """All states of a machine, those inside of others too."""
    states = definition.get("States")
    for name, state in states.items() if isinstance(states, Mapping) else ():
        yield name, state
        inner = [state.get(each) for each in ("Iterator", "ItemProcessor")]
        for each in [*inner, *(state.get("Branches") or [])]:
            if isinstance(each, Mapping):
                yield from _states(each)


def task_faults(state: Mapping[str, object]) -> list[str]:
    """The same of one state: what it calls, and with what."""
    resource = str(state.get("Resource"))
    found = _INTEGRATION.fullmatch(resource)
    if not found:
        return [] if resource.split(":")[2:3] == ["lambda"] else [f"{resource} calls no service"]
    arguments = state.get("Arguments", state.get("Parameters", {}))
    name = {"sfn": "stepfunctions", "states": "stepfunctions"}.get(found[1], found[1])
    try:
        names = {each[:1].lower() + each[1:]: each for each in service(name).operation_names}
        shape = request_shape(name, names[found[2]])
    except (UnknownServiceError, KeyError):
        return [f"there is no action {name}:{found[2]}"]
    if isinstance(arguments, str) and _EXPRESSION.search(arguments):
        return []
    return faults(shape, arguments, spelling=pascal, is_template=True)
