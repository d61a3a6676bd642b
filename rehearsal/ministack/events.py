"""What this project needs of EventBridge and MiniStack lacks. Imported inside ``.venv-aws`` only.

A log group can be the target of a rule: each event becomes a line of it, as on AWS. It is how
stopped tasks are remembered, and what a job has cost is computed from that.

EventBridge calls a function or writes into a group only where the policy of that lets it, and into
no group whose ARN has ``:*`` at its end. It says nothing when it cannot, as on AWS.
"""

import json
from typing import Any

from rehearsal.ministack import rights
from rehearsal.ministack.internals import cloudwatch_logs, eventbridge
from rehearsal.ministack.switches import Strict, is_strict

SERVICE = "events.amazonaws.com"
_GROUP = ":log-group:"
_FUNCTION = ":function:"


def deliver(arn: str, event: dict[str, Any]) -> None:
    """Append an event to a log group, in a stream of its own."""
    group = arn.partition(_GROUP)[2].removesuffix(":*")
    view = eventbridge._pattern_event_view(event)
    stream = {"logGroupName": group, "logStreamName": eventbridge.new_uuid()}
    cloudwatch_logs._create_log_stream(stream)
    line = {
        "timestamp": int(eventbridge._now_ts() * 1000),
        "message": json.dumps(view.event_with_detail()),
    }
    cloudwatch_logs._put_log_events({**stream, "logEvents": [line]})


def may_write(group: str, rule: str) -> bool:
    """Whether EventBridge may write for a rule into a group.

    It tells for which rule it does only when it writes, and not when it makes the stream.
    """
    if not is_strict(Strict.POLICIES):
        return True
    stream = f"{group}:log-stream:new"
    return (
        not group.endswith(":*")
        and rights.of_service(SERVICE, "logs:CreateLogStream", stream)
        and rights.of_service(SERVICE, "logs:PutLogEvents", stream, source=rule)
    )


def install() -> None:
    """Give the emulator this target."""
    stock = eventbridge._invoke_target

    def invoke(
        target: dict[str, Any], event: dict[str, Any], rule: dict[str, Any], view: Any = None
    ) -> None:
        arn, source = target.get("Arn", ""), rule.get("Arn", "")
        if _GROUP in arn:
            if may_write(arn, source):
                deliver(arn, event)
        elif _FUNCTION not in arn or rights.of_service(
            SERVICE, "lambda:InvokeFunction", arn, source=source
        ):
            stock(target, event, rule, view)

    eventbridge._invoke_target = invoke
