"""Functions log where they do on AWS. Imported inside ``.venv-aws`` only.

A function with a log group of its own may write into that, and its role may not make another: one
that still runs when its stack goes leaves no group behind. The emulator, which enforces no policy,
would make the group again.
"""

from typing import Any

from rehearsal.ministack.internals import cloudwatch_logs, lambda_svc


def install() -> None:
    """Teach the emulator that."""
    stock = lambda_svc._emit_lambda_logs

    def emit(function: dict[str, Any], *arguments: Any, **options: Any) -> None:
        settings = (function.get("config") or function).get("LoggingConfig") or {}
        group = settings.get("LogGroup")
        if group is None or group in cloudwatch_logs._log_groups:
            stock(function, *arguments, **options)

    lambda_svc._emit_lambda_logs = emit
