"""The module ``cfnresponse`` that AWS puts beside the code of an inline Lambda function.

The functions of the local AWS import this one. The signature is the one that AWS documents; the
answer goes to the address in the event, which CloudFormation waits for.
"""

import json
import urllib.request
from typing import Any

SUCCESS = "SUCCESS"
FAILED = "FAILED"

# Named as on AWS, where callers pass these by keyword too.
# ruff: noqa: N803


def send(
    event: dict[str, Any],
    context: Any,
    responseStatus: str,
    responseData: dict[str, Any] | None,
    physicalResourceId: str | None = None,
    noEcho: bool = False,
    reason: str | None = None,
) -> None:
    """Tell CloudFormation how creating, updating or deleting a custom resource went."""
    log = context.log_stream_name
    answer = {
        "Status": responseStatus,
        "Reason": reason or f"See the details in CloudWatch Log Stream: {log}",
        "PhysicalResourceId": physicalResourceId or log,
        "StackId": event["StackId"],
        "RequestId": event["RequestId"],
        "LogicalResourceId": event["LogicalResourceId"],
        "NoEcho": noEcho,
        "Data": responseData or {},
    }
    request = urllib.request.Request(
        event["ResponseURL"],
        data=json.dumps(answer).encode(),
        headers={"Content-Type": ""},  # the address that S3 signs allows no other
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=30):
        pass
