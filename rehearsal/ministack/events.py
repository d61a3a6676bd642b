"""What this project needs of EventBridge and MiniStack lacks. Imported inside ``.venv-aws`` only.

A log group can be the target of a rule: each event becomes a line of it, as on AWS. It is how
stopped tasks are remembered, and what a job has cost is computed from that.
"""

import json
from typing import Any

from rehearsal.ministack.internals import cloudwatch_logs, eventbridge

_GROUP = ":log-group:"


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


def install() -> None:
    """Give the emulator this target."""
    stock = eventbridge._invoke_target

    def invoke(
        target: dict[str, Any], event: dict[str, Any], rule: dict[str, Any], view: Any = None
    ) -> None:
        if _GROUP in target.get("Arn", ""):
            deliver(target["Arn"], event)
        else:
            stock(target, event, rule, view)

    eventbridge._invoke_target = invoke
