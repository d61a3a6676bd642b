"""Requests that are refused before the emulator sees them. Imported inside ``.venv-aws`` only."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rehearsal.ministack.internals import app, stepfunctions

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
