"""Refusal of requests that the model of their service does not allow. Inside ``.venv-aws`` only.

Refused are parameters that do not exist or are missing, other types, values outside of an
enumeration, a pattern or a limit: of requests, of the states of Step Functions that call a service,
and of what CloudFormation makes of a template. ``rehearsal.models`` decides.

SDKs write requests by a service's model; this reads them by the same model, in each of the ways
that AWS's services speak: JSON, forms (``query`` and ``ec2``), and REST with JSON or XML. What is
sent in another way, CBOR, is not read, nor are bodies that are bytes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote
from xml.etree import ElementTree

from botocore.exceptions import UnknownServiceError
from botocore.model import (
    ListShape,
    MapShape,
    OperationModel,
    ServiceModel,
    Shape,
    StructureShape,
)

from rehearsal.ministack import validation
from rehearsal.ministack.internals import app, iam_actions, provisioners, router, stepfunctions
from rehearsal.ministack.switches import Strict, is_strict
from rehearsal.models import faults, pascal, request_shape, service, state_faults, task_faults

Answer = tuple[int, dict[str, str], bytes]


class Request(NamedTuple):
    """A request as the emulator's server takes it."""

    method: str
    path: str
    headers: dict[str, str]
    """Their names in lower case."""
    body: bytes
    query: dict[str, Any]
    id_: str


def refuse(
    of_request: Callable[[Request], Answer | None],
    of_state: Callable[[str, Any], tuple[str, str] | None],
) -> None:
    """Have the emulator ask first, before all that it asks already.

    Args:
        of_request: the answer to a request that is refused; None where it is not.
        of_state: the same of a state of Step Functions that calls a service: its resource and its
            arguments, and for the answer the name of an error and its cause.
    """
    stock, stock_resource = app._dispatch_service_request, stepfunctions._invoke_resource

    async def dispatch(*given: Any) -> Any:
        return of_request(Request(*given)) or await stock(*given)

    def invoke(resource: str, arguments: Any) -> Any:
        if found := of_state(resource, arguments):
            raise stepfunctions._ExecutionError(*found)
        return stock_resource(resource, arguments)

    app._dispatch_service_request = dispatch
    stepfunctions._invoke_resource = invoke


#: Where botocore calls a service otherwise than its requests do.
NAMES = {"monitoring": "cloudwatch", "states": "stepfunctions", "api.ecr": "ecr"}
NOT_UNDERSTOOD = "the body is not understood"
FORM = "application/x-www-form-urlencoded"
_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request")
_PLACE = re.compile(r"\{(\w+)(\+?)\}")

Parameters = dict[str, Any]


def found_in(
    method: str, path: str, headers: Mapping[str, str], body: bytes, query: Mapping[str, Any]
) -> list[str]:
    """What the service of a signed request would refuse in it; empty where it would take it.

    Args:
        headers: their names in lower case.
        query: of the address: name -> value, or a list of values.
    """
    scope = _SCOPE.search(headers.get("authorization", ""))
    if not scope:
        return []
    try:
        model = service(NAMES.get(scope[1], scope[1]))
    except UnknownServiceError:
        return [f"there is no service {scope[1]}"]
    target = headers.get("x-amz-target", "")
    if target:
        return _json_faults(model, target.rpartition(".")[2], body)
    protocol = model.metadata["protocol"]
    if headers.get("content-type", "").startswith(FORM) and "query" in _protocols(model):
        protocol = "query"
    if protocol in ("query", "ec2"):
        sent = dict(parse_qsl(body.decode(), keep_blank_values=True)) | _single(query)
        return _form_faults(model, sent, is_ec2=protocol == "ec2")
    if protocol.startswith("rest-"):
        return _rest_faults(model, method, path, headers, body, _single(query))
    return []


def _protocols(model: ServiceModel) -> list[str]:
    return [*model.metadata.get("protocols", ()), model.metadata["protocol"]]


def _single(query: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(v[0] if isinstance(v, list) else v) for name, v in query.items()}


def _json_faults(model: ServiceModel, action: str, body: bytes) -> list[str]:
    if action not in model.operation_names:
        return [f"there is no action {model.service_name}:{action}"]
    try:
        given = json.loads(body or b"{}")
    except ValueError as error:
        return [f"the body is no JSON: {error}"]
    return faults(model.operation_model(action).input_shape, given)


def is_text(shape: Shape) -> bool:
    return bool(shape.type_name == "string")


def simple(shape: Shape, text: str) -> Any:
    """A value that was sent as text; the text itself where it is none of its type."""
    kind: Callable[[str], Any] = str
    if shape.type_name in ("integer", "long"):
        kind = int
    elif shape.type_name in ("float", "double"):
        kind = float
    elif shape.type_name == "boolean":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text


# --- forms ----------------------------------------------------------------------------------------
def _form_faults(model: ServiceModel, sent: Mapping[str, str], *, is_ec2: bool) -> list[str]:
    action = sent.get("Action", "")
    if action not in model.operation_names:
        return [f"there is no action {model.service_name}:{action}"]
    form = _Form({k: v for k, v in sent.items() if k not in ("Action", "Version")}, is_ec2=is_ec2)
    shape = model.operation_model(action).input_shape
    given = form.structure(shape, "") if shape else {}
    # EC2 refuses both, but its SDKs leave out much of what its model calls required.
    left = [f"{name}: there is no such parameter" for name in sorted(form.left)]
    return [*left, *faults(shape, given)]


class _Form:
    """The pairs of a form, read by a shape."""

    def __init__(self, sent: Mapping[str, str], *, is_ec2: bool) -> None:
        self._sent, self._is_ec2 = sent, is_ec2
        self.left = {*sent}
        """Names that no shape has asked for."""

    def structure(self, shape: StructureShape, prefix: str) -> Parameters:
        found = {}
        for name, member in shape.members.items():
            key = f"{prefix}{self._name(name, member)}"
            if self._has(key):
                found[name] = self._value(member, key)
        return found

    def _name(self, name: str, member: Shape) -> str:
        given = member.serialization
        if self._is_ec2:
            if "queryName" in given:
                return str(given["queryName"])
            name = str(given.get("name", name))
            return name[:1].upper() + name[1:]
        if isinstance(member, ListShape) and given.get("flattened"):
            return str(member.member.serialization.get("name", name))
        return str(given.get("name", name))

    def _has(self, key: str) -> bool:
        return key in self._sent or any(each.startswith(f"{key}.") for each in self._sent)

    def _value(self, shape: Shape, key: str) -> Any:
        if isinstance(shape, StructureShape):
            self.left.discard(key)
            return self.structure(shape, f"{key}.")
        if isinstance(shape, ListShape):
            return self._list(shape, key)
        if isinstance(shape, MapShape):
            return self._map(shape, key)
        self.left.discard(key)
        return simple(shape, self._sent.get(key, ""))

    def _list(self, shape: ListShape, key: str) -> list[Any]:
        self.left.discard(key)  # an empty list is the name alone
        if not (self._is_ec2 or shape.serialization.get("flattened")):
            key = f"{key}.{shape.member.serialization.get('name', 'member')}"
        return [self._value(shape.member, each) for each in self._numbered(key)]

    def _map(self, shape: MapShape, key: str) -> Parameters:
        self.left.discard(key)
        names = [
            str(part.serialization.get("name", default))
            for part, default in ((shape.key, "key"), (shape.value, "value"))
        ]
        if not shape.serialization.get("flattened"):
            key = f"{key}.entry"
        return {
            str(self._value(shape.key, f"{each}.{names[0]}")): self._value(
                shape.value, f"{each}.{names[1]}"
            )
            for each in self._numbered(key)
        }

    def _numbered(self, key: str) -> Iterator[str]:
        number = 1
        while self._has(f"{key}.{number}"):
            yield f"{key}.{number}"
            number += 1


# --- REST -----------------------------------------------------------------------------------------
def _rest_faults(
    model: ServiceModel,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    query: Mapping[str, str],
) -> list[str]:
    """Of the operations that it may be, the one that it fits best decides."""
    fits = []
    for name in model.operation_names:
        operation = model.operation_model(name)
        address, _, fixed = str(operation.http["requestUri"]).partition("?")
        wanted = dict(parse_qsl(fixed, keep_blank_values=True))
        # A bucket's name may end in a slash.
        found = re.fullmatch(_PLACE.sub(_group, address) + "/?", path)
        if operation.http["method"] != method or found is None:
            continue
        if all(query.get(each) == value for each, value in wanted.items()):
            fits.append((len(wanted), operation, found.groupdict()))
    if not fits:
        return [f"there is no action {model.service_name}: {method} {path}"]
    most = max(number for number, _, _ in fits)
    tried = [
        _rest_request(operation, places, headers, body, query)
        for number, operation, places in fits
        if number == most
    ]
    # Where two operations have one address, a body that is none is the other's.
    return min(tried, key=lambda found: (any(NOT_UNDERSTOOD in each for each in found), len(found)))


def _group(place: "re.Match[str]") -> str:
    return f"(?P<{place[1]}>{'.+' if place[2] else '[^/]+'})"


def _rest_request(
    operation: OperationModel,
    places: Mapping[str, str],
    headers: Mapping[str, str],
    body: bytes,
    query: Mapping[str, str],
) -> list[str]:
    shape = operation.input_shape
    if shape is None:
        return []
    found: Parameters = {}
    for name, member in shape.members.items():
        where, key = member.serialization.get("location"), member.serialization.get("name", name)
        if where == "uri":
            found[name] = simple(member, unquote(places[key]))
        elif where == "querystring" and key in query:
            found[name] = simple(member, query[key]) if member.type_name != "list" else []
        elif where == "header" and key.lower() in headers:
            found[name] = _spelled(member, headers[key.lower()])
            if member.type_name == "list":
                found[name] = [each.strip() for each in headers[key.lower()].split(",")]
    try:
        found |= _body(operation, shape, body)
    except (ValueError, ElementTree.ParseError) as error:
        return [f"{NOT_UNDERSTOOD}: {error}"]
    return faults(shape, found)


def _spelled(shape: Shape, text: str) -> Any:
    """A header's value, as its enumeration writes it: AWS's SDK for C++, which PyArrow uses, sends
    some in lower case, and S3 takes them."""
    values = getattr(shape, "enum", ())
    return next((each for each in values if each.lower() == text.lower()), simple(shape, text))


def _body(operation: OperationModel, shape: StructureShape, body: bytes) -> Parameters:
    """The parameters that are in the body."""
    payload = str(shape.serialization.get("payload", ""))
    member = shape.members.get(payload)
    if member is not None and member.type_name not in ("structure", "list"):
        return {payload: simple(member, body.decode()) if is_text(member) else body} if body else {}
    if not body:
        return {}
    if operation.service_model.metadata["protocol"] == "rest-xml":
        root = ElementTree.fromstring(body)
        return {payload: _element(member, root)} if member is not None else {}
    given = json.loads(body)
    return {payload: given} if payload else dict(given)


def _element(shape: Shape, element: "ElementTree.Element") -> Any:
    """What an element of XML says, by its shape."""
    if isinstance(shape, StructureShape):
        return _structure(shape, element)
    if isinstance(shape, ListShape):
        return [_element(shape.member, child) for child in element]
    return simple(shape, element.text or "")


def _structure(shape: StructureShape, element: "ElementTree.Element") -> Parameters:
    """The members that an element has; what it has beside them is among them, by its own name."""
    left = [*element]
    found: Parameters = {}
    for name, member in shape.members.items():
        key = member.serialization.get("name", name)
        if isinstance(member, ListShape) and member.serialization.get("flattened"):
            keys = (key, member.member.serialization.get("name", key))
            if own := [each for each in left if _tag(each) in keys]:
                found[name] = [_element(member.member, each) for each in own]
        elif own := [each for each in left if _tag(each) == key]:
            found[name] = _element(member, own[0])
        left = [each for each in left if each not in own]
    return found | {_tag(each): "" for each in left}


def _tag(element: "ElementTree.Element") -> str:
    return element.tag.rpartition("}")[2]


#: What the services that are asked most call such a request.
CODES = {
    "autoscaling": "ValidationError",
    "cloudformation": "ValidationError",
    "ec2": "InvalidParameterValue",
    "ecs": "InvalidParameterException",
    "iam": "ValidationError",
    "lambda": "InvalidParameterValueException",
    "logs": "InvalidParameterException",
    "s3": "InvalidArgument",
    "secretsmanager": "InvalidParameterException",
}
ANY_OTHER = "ValidationException"
MACHINES = {f"AWSStepFunctions.{each}StateMachine" for each in ("Create", "Update")}
#: Types of CloudFormation whose properties are the parameters of one call of ECS, spelled
#: otherwise: the call, and the name that CloudFormation makes up where there is none.
CALLS = {
    "AWS::ECS::Service": ("CreateService", "ServiceName"),
    "AWS::ECS::TaskDefinition": ("RegisterTaskDefinition", "Family"),
}
STATE_MACHINE = "AWS::StepFunctions::StateMachine"


def refusal(service: str, code: str, found: list[str], request: Request) -> Answer:
    """A service's answer to a request that it does not take."""
    number = f"{len(found)} validation error{'s' if len(found) > 1 else ''} detected: "
    _forbidden, answer, body = iam_actions.access_denied_response(
        service,
        "",
        "",
        request.id_,
        error_code=code,
        message=number + "; ".join(found),
        headers=request.headers,
    )
    return 400, answer, body


def of_request(request: Request) -> Answer | None:
    """The answer to a request that its service would refuse; None to any other."""
    if not is_strict(Strict.REQUESTS):
        return None
    method, path, headers, body, query, _id = request
    params = app._routing_params(method, path, headers, body, query)
    service = router.detect_service(method, path, headers, params)
    if found := validation.found_in(method, path, headers, body, query):
        return refusal(service, CODES.get(service, ANY_OTHER), found, request)
    if found := of_machine(headers.get("x-amz-target", ""), body):
        return refusal(service, "InvalidDefinition", found, request)
    return None


def of_state(resource: str, arguments: Any) -> tuple[str, str] | None:
    """Error and cause of a state's call that its service would refuse; None of any other."""
    if is_strict(Strict.REQUESTS):
        found = task_faults({"Resource": resource, "Arguments": arguments})
        if found:
            return "States.Runtime", "; ".join(found)
    return None


def of_machine(target: str, body: bytes) -> list[str]:
    """What Step Functions would refuse in the definition of a machine that a request has."""
    if target not in MACHINES:
        return []
    try:
        definition = json.loads(json.loads(body).get("definition", "{}"))
    except ValueError:  # the emulator refuses what is no JSON
        return []
    return state_faults(definition)


def of_properties(kind: str, properties: dict[str, Any]) -> list[str]:
    """What the service would refuse in what CloudFormation makes of a resource.

    CloudFormation itself makes numbers of text, and a name where there is none.
    """
    if kind == STATE_MACHINE:
        text = properties.get("DefinitionString")
        return state_faults(json.loads(text) if text else properties.get("Definition", {}))
    action, name = CALLS[kind]
    given = {name: "made"} | properties
    found = faults(request_shape("ecs", action), given, spelling=pascal, is_template=True)
    return [each for each in found if not each.endswith((" is no integer", " is no boolean"))]


def check_resources() -> None:
    """Have CloudFormation make none of the resources above that its service would refuse."""
    for kind in (*CALLS, STATE_MACHINE):
        handlers = provisioners._RESOURCE_HANDLERS[kind]
        stock = handlers["create"]

        def create(
            logical_id: str, properties: Any, stack: str, kind: str = kind, stock: Any = stock
        ) -> Any:
            if is_strict(Strict.REQUESTS) and (found := of_properties(kind, properties)):
                raise ValueError(f"{kind} {logical_id}: {'; '.join(found)}")
            return stock(logical_id, properties, stack)

        provisioners._RESOURCE_HANDLERS[kind] = handlers | {"create": create}


def install() -> None:
    """Give the emulator this. Before what asks for rights: AWS answers that first."""
    refuse(of_request, of_state)
    check_resources()
