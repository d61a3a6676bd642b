"""State machine of a job: queue, run the head task, clean up, then retry or end.

    Begin -> Queue -> Admit -> Admitted -> Head | Queue | Failed
    Head -> CleanUp -> Ended -> Succeeded | Failed | Again -> Pause -> Head

Written with CDK's JSONata states where they suffice. The head does not: CDK's ``EcsRunTask`` has no
group, by which a job's head is found, wants capacity that CDK itself has added to the cluster, and
runs the newest revision of its task definition, not the one that the role may run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import Aws, Duration
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_stepfunctions as sfn
from aws_cdk import aws_stepfunctions_tasks as tasks
from constructs import Construct

from contract.job import (
    DEFAULT_MAX_SECONDS,
    HEAD_STATE,
    JOB_GROUP,
    JOB_TAG,
    MAX_SECONDS,
    PAUSE_STATE,
    RUN_TAG,
    USER_ID_TAG,
    USER_TAG,
    JobStatus,
    head_variables,
)
from contract.nodes import CONTAINER
from contract.times import (
    CONSISTENT_S,
    HEAD_ASKED_AGAIN_S,
    HEAD_ASKED_LATER_S,
    HEAD_GRACE_S,
)

# An execution has at most 25,000 events, and about 20 from one start of its head to the next.
#: Seconds between two requests for a head's host, or for workers in another pool: a sixtieth of the
#: time that they have been waited for.
_PAUSE: Final = (
    f"$min([{HEAD_ASKED_LATER_S}, $max([$count($outcome.pools) > 1 ? 0 : {HEAD_ASKED_AGAIN_S}, "
    "$floor(($millis() / 1000 - $asked) / 60)])])"
)
#: Seconds after a fault of AWS, the host or the storage: more from one to the next.
_PAUSE_AFTER_FAULT: Final = (
    f"$min([{HEAD_ASKED_LATER_S}, {HEAD_ASKED_AGAIN_S} * ($outcome.in_a_row - 1)])"
)
#: The order with the worker nodes that it was granted, and its pools as the keeper has them now.
_ORDER: Final = (
    "$string($merge([$states.context.Execution.Input, "
    "{'nodes': $granted, 'pools': $outcome.pools}]))"
)
#: Seconds to the deadline: the next head notices that it has come.
_LEFT: Final = "$max([0, $deadline - $floor($millis() / 1000)])"
_STARTED: Final = "$toMillis($states.context.Execution.StartTime) / 1000"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTask:
    """Task that the state machine starts, and where it starts."""

    cluster_arn: str
    definition_arn: str
    capacity_provider: str
    subnet_ids: Sequence[str]
    security_group_id: str


def job_states(
    scope: Construct,
    *,
    head: HeadTask,
    keeper: lambda_.Function,
    max_seconds: int,
) -> sfn.IChainable:
    """The states, from the first. Their input is the JSON of ``contract.job.JobSpec``.

    Args:
        max_seconds: longest time to a job's deadline, whatever its order says.
    """
    begin = sfn.Pass.jsonata(
        scope,
        "Begin",
        assign={
            "job": _value("$states.context.Execution.Name"),
            # As text: the head and the function that cleans up read it as a whole.
            "order": _value("$string($states.input)"),
            "attempt": 1,
            "row": 1,
            # At most 64 characters; rules of EventBridge name executions with 73.
            "token": _value("$substring($states.context.Execution.Name, 0, 64)"),
            "began": _value(_STARTED),
            # Until lists of executions show all that began before: no two jobs take one place.
            "pause": CONSISTENT_S,
            # Enforced here too: an execution can be started without trainctl, with any order.
            "seconds": _value(
                f"$min([{max_seconds}, $exists($states.input.max_seconds) ? "
                f"$states.input.max_seconds : {DEFAULT_MAX_SECONDS}])"
            ),
        },
    )
    queue = sfn.Wait.jsonata(scope, "Queue", time=sfn.WaitTime.seconds(_value("$pause")))
    admit = tasks.LambdaInvoke.jsonata(
        scope,
        "Admit",
        lambda_function=keeper,
        payload=sfn.TaskInput.from_object(
            {
                "Action": "admit",
                "Job": _value("$job"),
                "Spec": _value("$order"),
                "Began": _value("$began"),
            }
        ),
        assign={
            "outcome": _value("$states.result.Payload"),
            "pause": _value("$states.result.Payload.pause"),
        },
        retry_on_service_exceptions=False,  # those and all others are retried after another pause
    )
    admit.add_catch(queue, errors=[sfn.Errors.ALL], assign={"pause": HEAD_ASKED_AGAIN_S})
    run_head = sfn.CustomState(scope, HEAD_STATE, state_json=_head(head))
    clean_up = tasks.LambdaInvoke.jsonata(
        scope,
        "CleanUp",
        lambda_function=keeper,
        payload=sfn.TaskInput.from_text(
            _value(
                "$merge([$ended, {'Action': 'end', 'Job': $job, 'Spec': $order, "
                "'Attempt': $attempt, 'InARow': $row, "
                "'Began': $began, 'Asked': $asked, 'Deadline': $deadline}])"
            )
        ),
        assign={"outcome": _value("$states.result.Payload")},
        outputs=_value("$states.result.Payload"),
        retry_on_service_exceptions=False,  # those and all others are retried below
    )
    # No failure of this ends a job: S3, which keeps its record, may be away for hours.
    clean_up.add_retry(
        errors=[sfn.Errors.ALL],
        interval=Duration.seconds(3),
        max_attempts=math.ceil(MAX_SECONDS / HEAD_ASKED_LATER_S) + 10,
        max_delay=Duration.seconds(HEAD_ASKED_LATER_S),
        backoff_rate=2,
    )
    run_head.add_retry(
        # Throttling comes as the second, and as the third where ECS's own look-ups are throttled.
        errors=["ECS.ServerException", "ECS.AmazonECSException", "ECS.InvalidParameterException"],
        interval=Duration.seconds(5),
        max_attempts=4,
        backoff_rate=2,
    )
    run_head.add_catch(
        clean_up,
        errors=[sfn.Errors.ALL],
        assign={
            "ended": {
                "Error": _value("$states.errorOutput.Error"),
                "Cause": _value("$states.errorOutput.Cause"),
            }
        },
    )
    # ECS ends a head that has waited for a host for 10 to 30 minutes: asked for again, it counts as
    # the same attempt, for as long as the job wants to wait.
    waits = f"$outcome.status = '{JobStatus.NO_CAPACITY}'"
    seconds = f"$min([{_LEFT}, {waits} ? {_PAUSE} : {_PAUSE_AFTER_FAULT}])"
    again = sfn.Pass.jsonata(
        scope,
        "Again",
        assign={
            "attempt": _value("$outcome.attempts + 1"),
            "row": _value("$outcome.in_a_row + 1"),
            "token": _value("$substring($job, 0, 50) & '-' & $millis()"),
            "asked": _value(f"{waits} ? $asked : $millis() / 1000"),
            "order": _value(_ORDER.replace("$granted", "$nodes")),
        },
        # The input of the pause, which trainctl reads from the history.
        outputs={
            "reason": _value("$outcome.reason"),
            "until": _value(f"$floor($millis() / 1000) + {seconds}"),
        },
    )
    pause = sfn.Wait.jsonata(scope, PAUSE_STATE, time=sfn.WaitTime.seconds(_value(seconds)))
    again.next(pause).next(run_head)
    failed = sfn.Fail.jsonata(
        scope, "Failed", error=_value("$outcome.status"), cause=_value("$string($outcome)")
    )
    admitted = sfn.Choice.jsonata(scope, "Admitted")
    admitted.when(_has_status(JobStatus.QUEUED), queue)
    admitted.when(
        _has_status(JobStatus.RUNNING),
        run_head,
        # Deadline and patience begin with the admission: until then a job costs nothing. Of the
        # worker nodes that its order asks for, it may have those that earlier jobs leave.
        assign={
            "order": _value(_ORDER.replace("$granted", "$outcome.nodes")),
            "nodes": _value("$outcome.nodes"),
            "asked": _value("$millis() / 1000"),
            "deadline": _value("$floor($millis() / 1000) + $seconds"),
        },
    )
    admitted.otherwise(failed)
    ended = sfn.Choice.jsonata(scope, "Ended")
    ended.when(sfn.Condition.jsonata(_value("$outcome.again")), again)
    ended.when(_has_status(JobStatus.SUCCEEDED), sfn.Succeed.jsonata(scope, "Succeeded"))
    ended.otherwise(failed)
    run_head.next(clean_up).next(ended)
    return begin.next(queue).next(admit).next(admitted)


def _has_status(status: JobStatus) -> sfn.Condition:
    return sfn.Condition.jsonata(_value(f"$outcome.status = '{status}'"))


def _head(task: HeadTask) -> dict[str, Any]:
    """The state that runs the head's task and waits for its end."""
    variables = head_variables(
        job=_value("$job"), deadline=_value("$string($deadline)"), spec=_value("$order")
    )
    left = f"$ceil($deadline - $millis() / 1000) + {HEAD_GRACE_S}"
    return {
        "Type": "Task",
        # Step Functions runs no integration of another partition (aws-cdk 4597).
        "Resource": f"arn:{Aws.PARTITION}:states:::ecs:runTask.sync",
        # The head keeps its deadline itself, so that its code can save before it ends.
        "TimeoutSeconds": _value(f"$max([{HEAD_GRACE_S}, {left}])"),
        "Arguments": {
            "Cluster": task.cluster_arn,
            "TaskDefinition": task.definition_arn,
            # The same in each retry: a head whose start a lost answer hides is not started twice.
            "ClientToken": _value("$token"),
            "CapacityProviderStrategy": [{"CapacityProvider": task.capacity_provider, "Weight": 1}],
            "NetworkConfiguration": {
                "AwsvpcConfiguration": {
                    "Subnets": [*task.subnet_ids],
                    "SecurityGroups": [task.security_group_id],
                }
            },
            # startedBy is Step Functions' own; the group is how the head's job is known.
            "Group": _value(f"'{JOB_GROUP}' & $job"),
            "Tags": [
                {"Key": JOB_TAG, "Value": _value("$job")},
                {"Key": RUN_TAG, "Value": _order_field("run")},
                {"Key": USER_TAG, "Value": _order_field("submitter")},
                {"Key": USER_ID_TAG, "Value": _order_field("user_id")},
            ],
            "EnableExecuteCommand": True,
            "PropagateTags": "TASK_DEFINITION",
            "Overrides": {
                "ContainerOverrides": [
                    {
                        "Name": CONTAINER,
                        "Environment": [
                            {"Name": name, "Value": value} for name, value in variables.items()
                        ],
                    }
                ]
            },
        },
        "Assign": {"ended": {"Task": _value("$states.result")}},
    }


def _order_field(field: str) -> str:
    """A text of the job's order, which may lack it."""
    value = f"$states.context.Execution.Input.{field}"
    return _value(f"$exists({value}) ? {value} : ''")


def _value(expression: str) -> str:
    """A JSONata expression, as Amazon States Language marks it."""
    return f"{{% {expression} %}}"
