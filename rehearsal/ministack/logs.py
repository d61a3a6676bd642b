"""CloudWatch Logs as on AWS: targets of rules, groups of functions, filters. ``.venv-aws`` only.

A log group can be the target of an EventBridge rule: each event becomes a line of it. It is how
stopped tasks are remembered, and what a job has cost is computed from that. EventBridge calls a
function or writes into a group only where the policy of that lets it, and into no group whose ARN
has ``:*`` at its end. It reports nothing when it cannot, as on AWS.

A function with a log group of its own may write into that, and its role may not make another: one
that still runs when its stack goes leaves no group behind.

A filter between percent signs is a regular expression.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from rehearsal.ministack import authorization
from rehearsal.ministack.internals import cloudwatch_logs, eventbridge, lambda_svc

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
    """True if EventBridge may write to a log group for a rule.

    EventBridge names the rule only when it writes, not when it creates the stream.
    """
    stream = f"{group}:log-stream:new"
    return (
        not group.endswith(":*")
        and authorization.of_service(SERVICE, "logs:CreateLogStream", stream)
        and authorization.of_service(SERVICE, "logs:PutLogEvents", stream, source=rule)
    )


def install_targets() -> None:
    """Give the emulator this target."""
    stock = eventbridge._invoke_target

    def invoke(
        target: dict[str, Any], event: dict[str, Any], rule: dict[str, Any], view: Any = None
    ) -> None:
        arn, source = target.get("Arn", ""), rule.get("Arn", "")
        if _GROUP in arn:
            if may_write(arn, source):
                deliver(arn, event)
        elif _FUNCTION not in arn or authorization.of_service(
            SERVICE, "lambda:InvokeFunction", arn, source=source
        ):
            stock(target, event, rule, view)

    eventbridge._invoke_target = invoke


def install_function_logs() -> None:
    """Teach the emulator that."""
    stock = lambda_svc._emit_lambda_logs

    def emit(function: dict[str, Any], *arguments: Any, **options: Any) -> None:
        settings = (function.get("config") or function).get("LoggingConfig") or {}
        group = settings.get("LogGroup")
        if group is None or group in cloudwatch_logs._log_groups:
            stock(function, *arguments, **options)

    lambda_svc._emit_lambda_logs = emit


def install_filters() -> None:
    """Teach the emulator that."""
    stock = cloudwatch_logs._compile_filter_pattern

    def compiled(text: str) -> Callable[[str], bool]:
        if len(text) > 2 and text[0] == text[-1] == "%":
            pattern = re.compile(text[1:-1])
            return lambda message: pattern.search(message) is not None
        matches: Callable[[str], bool] = stock(text)
        return matches

    cloudwatch_logs._compile_filter_pattern = compiled
