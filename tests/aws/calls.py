"""Calls of AWS as boto3's clients make them: the pages of an answer, and errors."""

import functools
from types import SimpleNamespace
from typing import Any, Final

from botocore import xform_name
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from botocore.paginate import Paginator

#: Those whose operations come in pages here.
_SERVICES: Final = ("autoscaling", "cloudformation", "ec2", "ecs", "logs", "s3", "stepfunctions")
#: HTTP statuses of errors by their codes (API reference of S3, "Error responses"); of others 400.
_STATUS: Final = {
    **{"NoSuchBucket": 404, "NoSuchKey": 404, "404": 404, "AccessDenied": 403},
    **{"PreconditionFailed": 412, "ConditionalRequestConflict": 409, "SlowDown": 503},
}


def refused(code: str, operation: str = "Operation", message: str = "") -> ClientError:
    """An error that a service of AWS answers."""
    answer: Any = {"Error": {"Code": code, "Message": message or f"{code} happened"}}
    answer["ResponseMetadata"] = {"HTTPStatusCode": _STATUS.get(code, 400)}
    return ClientError(answer, operation)


@functools.cache
def _pages() -> dict[str, Any]:
    """What botocore knows of the pages of each operation."""
    models = [Loader().load_service_model(each, "paginators-1") for each in _SERVICES]
    return {
        xform_name(name): pages for each in models for name, pages in each["pagination"].items()
    }


#: In the place of an operation's model, which tells the type of a page's size.
_SIZE: Any = SimpleNamespace(type_name="integer")
_MODEL: Any = SimpleNamespace(
    input_shape=SimpleNamespace(members=SimpleNamespace(get=lambda _: _SIZE))
)


class Paged:
    """A client with botocore's own paginators."""

    def get_paginator(self, operation: str) -> Any:
        return Paginator(getattr(self, operation), _pages()[operation], _MODEL)
