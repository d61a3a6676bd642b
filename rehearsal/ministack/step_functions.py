"""Step Functions' integration with ECS as on AWS. Imported inside ``.venv-aws`` only.

The emulator runs the machine itself. Replaced is the one state that runs a task and waits for its
end: it fails when the task does, with its description as the cause, it writes down which
task it started, and a time limit or an abort stops that task.
"""

import json
import time
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from rehearsal.ministack.internals import ecs, stepfunctions

RUN_AND_WAIT = "arn:aws:states:::ecs:runTask.sync"
STARTED_BY = "AWS Step Functions"
POLL_S = 0.25
#: Errors of ECS with a name of their own in state machines; the others have one name together.
NAMED = {
    *("AccessDeniedException", "ClientException", "ClusterNotFoundException"),
    *("InvalidParameterException", "ServerException"),
}
ANY_OTHER = "AmazonECSException"

Record = dict[str, Any]

# Not of the thread: a state with a time limit runs in a thread of its own, with a copy of these.
_execution: ContextVar[Record] = ContextVar("execution")
_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def current_execution() -> Record:
    """The execution whose state is being run."""
    return _execution.get()


def pascal(value: Any) -> Any:
    """The names of an answer of ECS as Step Functions writes them, without what has no value."""
    if isinstance(value, dict):
        return {
            name[:1].upper() + name[1:]: milliseconds(each) if name[-2:] == "At" else pascal(each)
            for name, each in value.items()
            if each is not None
        }
    return [pascal(each) for each in value] if isinstance(value, list) else value


def milliseconds(at: float | str) -> int:
    """A time as it writes them."""
    seconds = datetime.fromisoformat(at).timestamp() if isinstance(at, str) else at
    return round(seconds * 1000)


def has_failed(task: Record) -> bool:
    codes = [each.get("exitCode") for each in task.get("containers", [])]
    return task.get("stopCode") == "TaskFailedToStart" or any(code != 0 for code in codes)


def run_and_wait(arguments: Record) -> Record:
    """Start a task and follow it to its end, for as long as the state and the execution last."""
    execution = current_execution()
    wanted = stepfunctions._pascal_to_camel(arguments) | {"startedBy": STARTED_BY}
    status, _, body = ecs._ACTION_MAP["RunTask"](wanted)
    answer = json.loads(body)
    if status >= 400:
        kind = str(answer.get("__type", "Unknown")).rpartition("#")[2]
        error = kind if kind in NAMED else ANY_OTHER
        raise stepfunctions._ExecutionError(f"ECS.{error}", str(answer.get("message", answer)))
    if answer.get("failures") or not answer.get("tasks"):
        raise stepfunctions._ExecutionError("AmazonECS.Unknown", json.dumps(answer["failures"]))
    (started,) = answer["tasks"]
    stepfunctions._add_event(
        execution,
        "TaskSubmitted",
        {
            "taskSubmittedEventDetails": {
                "resourceType": "ecs",
                "resource": "runTask.sync",
                "output": json.dumps({"Tasks": [pascal(started)], "Failures": []}, default=str),
            }
        },
    )
    which = {"cluster": wanted["cluster"], "tasks": [started["taskArn"]]}
    while True:
        (task,) = json.loads(ecs._describe_tasks(which)[2])["tasks"]
        if task["lastStatus"] == "STOPPED":
            break
        deadline = _deadline.get()
        is_late = deadline is not None and time.monotonic() > deadline
        if is_late or execution["status"] != "RUNNING":
            why = "timed out" if is_late else "was aborted"
            ecs._ACTION_MAP["StopTask"](
                {
                    "cluster": wanted["cluster"],
                    "task": started["taskArn"],
                    "reason": f"The execution which was managing this resource {why}",
                }
            )
            raise stepfunctions._ExecutionError("States.Timeout", f"the task {why}")
        time.sleep(POLL_S)
    if has_failed(task):
        raise stepfunctions._ExecutionError(
            "States.TaskFailed", json.dumps(pascal(task), default=str)
        )
    result: Record = pascal(task)
    return result


def install() -> None:
    """Give the emulator this state, in place of its own."""
    stock_task, stock_resource = stepfunctions._execute_task, stepfunctions._invoke_resource
    stock_fail = stepfunctions._fail_execution

    def execute_task(state: Record, state_input: Any, execution: Record, ctx: Record) -> Any:
        _execution.set(execution)
        if state.get("Resource") != RUN_AND_WAIT:
            return stock_task(state, state_input, execution, ctx)
        limit = state.get("TimeoutSeconds")
        if isinstance(limit, str):
            limit = stepfunctions._apply_jsonata_template(limit, state_input, ctx)
        _deadline.set(time.monotonic() + float(limit) if limit is not None else None)
        rest = {name: value for name, value in state.items() if name != "TimeoutSeconds"}
        return stock_task(rest, state_input, execution, ctx)

    def invoke(resource: str, arguments: Any) -> Any:
        if resource == RUN_AND_WAIT:
            return run_and_wait(arguments)
        return stock_resource(resource, arguments)

    def fail(execution: Record, error: str, cause: str) -> None:
        if execution["status"] == "RUNNING":  # what was aborted stays so
            stock_fail(execution, error, cause)

    stepfunctions._execute_task = execute_task
    stepfunctions._invoke_resource = invoke
    stepfunctions._fail_execution = fail
