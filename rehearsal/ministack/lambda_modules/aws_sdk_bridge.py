"""Bridge from a JavaScript Lambda function to boto3; started by ``aws_sdk.js``.

python aws_sdk_bridge.py SERVICE              prints the names of the service's operations
python aws_sdk_bridge.py SERVICE OPERATION    input on stdin, output or error on stdout, as JSON
"""

import base64
import datetime
import json
import sys
from typing import Any

import boto3
from botocore import xform_name
from botocore.exceptions import ClientError
from botocore.response import StreamingBody

# Services whose JavaScript package is named differently from boto3's client.
NAMES = {
    "auto-scaling": "autoscaling",
    "cloudwatch-logs": "logs",
    "eventbridge": "events",
    "route-53": "route53",
    "secrets-manager": "secretsmanager",
    "sfn": "stepfunctions",
}


def as_json(value: Any) -> dict[str, str]:
    """Encode a value of a type that JSON lacks; ``aws_sdk.js`` decodes it."""
    if isinstance(value, datetime.datetime):
        return {"$date": value.isoformat()}
    if isinstance(value, StreamingBody):
        value = value.read()
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    raise TypeError(f"cannot pass a {type(value).__name__} to JavaScript")


def main(service: str, operation: str | None = None) -> None:
    make: Any = boto3.client  # typed by the service's name, which varies here
    client = make(NAMES.get(service, service))
    model = client.meta.service_model
    answer: dict[str, Any]
    if operation is None:
        answer = {"id": model.service_id.replace(" ", ""), "operations": model.operation_names}
    else:
        try:
            output = getattr(client, xform_name(operation))(**json.load(sys.stdin))
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            found = error.response["Error"]
            message = found.get("Message", "")
            answer = {"error": {"name": found["Code"], "message": message, "status": status}}
        else:
            output.pop("ResponseMetadata", None)
            answer = {"output": output}
    print(json.dumps(answer, default=as_json))


if __name__ == "__main__":
    main(*sys.argv[1:])
