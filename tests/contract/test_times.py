"""Each time limit leaves time for the one that follows it.

Each line is a promise of the documentation: a checkpoint is saved before a spot host goes, a job
ends by itself before the state machine ends it, and that before the sweep does.
"""

import pytest

from containers.host import hardware
from contract import job, times
from training.runtime.local import LocalWorkers

# Shorter, longer, and why they must be in this order.
IN_ORDER = [
    (
        times.PROCESS_GROUP_STOP_S,
        times.CHECKPOINT_STOP_S,
        "processes end before the driver gives up",
    ),
    (
        LocalWorkers.stop_grace_s,
        times.CHECKPOINT_STOP_S,
        "a checkpoint on a cluster may take longer than on a laptop",
    ),
    (
        times.CHECKPOINT_STOP_S + 15,
        times.RECIPE_STOP_S,
        "the driver writes result and report before it is killed",
    ),
    (
        times.RECIPE_STOP_S + times.RAY_STOP_S,
        times.STOP_TIMEOUT_S - 5,
        "a job's head releases its workers before ECS kills it",
    ),
    (
        times.MAX_GRACE_S + times.FILES_SAVE_S + times.FILES_SLACK_S + times.RAY_STOP_S,
        times.STOP_TIMEOUT_S,
        "a program's files are saved before ECS kills the container",
    ),
    (
        # SIGTERM comes so long before the deadline.
        times.FILES_SAVE_S + times.FILES_SLACK_S + times.RAY_STOP_S,
        times.HEAD_GRACE_S,
        "a program's files are saved before the state machine ends a job at its deadline",
    ),
    (times.FILES_LIST_S, times.FILES_SAVE_S, "the list leaves time for the files that it names"),
    (times.FILES_QUIET_S, times.FILES_EVERY_S, "a folder that is whole is copied the next time"),
    (hardware._DRIVER_S, times.HOST_CHECK_S - 15, "a driver that hangs is reported in time"),
    (times.RAY_DRAIN_S, times.STOP_TIMEOUT_S, "Ray drains before ECS kills the container"),
    (times.COORDINATOR_DRAIN_S, times.RAY_STOP_S, "a job's Ray drains before the head kills it"),
    (
        times.RECIPE_STOP_S + times.RAY_STOP_S,
        times.SPOT_NOTICE_S,
        "a service's task that ECS stops for a notice ends before its host goes",
    ),
    (
        times.SPOT_POLL_S + times.RAY_DRAIN_S + times.SPOT_MARGIN_S,
        times.SPOT_NOTICE_S,
        "a node that heard of its notice drains before its host goes",
    ),
    (
        times.RECIPE_STOP_S + times.RAY_STOP_S,
        times.HEAD_GRACE_S,
        "a job ends at its deadline by itself before the state machine ends it",
    ),
    (
        times.HEAD_GRACE_S + times.STOP_TIMEOUT_S,
        times.SWEEP_GRACE_S,
        "a head that the state machine ends is gone before the sweep looks for it",
    ),
    (5 * times.LEASE_RENEW_S, times.LEASE_S, "a lease outlives some answers that are lost"),
    (times.WORKER_ANSWER_S, times.SILENCE_S, "Ray Train sees a process that is stopped first"),
    (times.SILENCE_S, times.COLLECTIVE_S, "the command sees a hang before a rank gives up"),
    (times.COLLECTIVE_S, times.COLLECTIVE_START_S, "compilers take longer than steps"),
    (times.STOP_TIMEOUT_S, times.JOB_STOP_S, "a node that does not react is killed meanwhile"),
    (times.RAY_START_S, job.DEFAULT_CAPACITY_WAIT_S, "Ray is up before a job gives up waiting"),
    (times.HOST_WARMUP_S, times.HEAD_WAIT_S, "a worker waits until a head's host has come"),
    (times.HOST_WARMUP_S, times.SLOW_HOST_WARMUP_S, "bare metal starts later"),
    (times.SLOW_HOST_WARMUP_S, job.DEFAULT_CAPACITY_WAIT_S, "a job waits until hosts have come"),
    (times.DISCONNECTED_S, times.AGENT_LOST_S, "a host that trains is given more time"),
    (9 * times.HEAD_REPORTS_S, times.HEAD_SILENT_S, "a head outlives some answers that are lost"),
    (times.HEAD_REPORTS_S, times.SWEEP_EVERY_S // 2, "it reports again before a second sweep"),
    (times.HEALTH_PROBE_S, times.HEALTH_TIMEOUT_S, "the check says itself what is wrong"),
    (times.HEALTH_TIMEOUT_S, times.HEALTH_EVERY_S, "one check ends before the next"),
    (times.RAY_HEALTH_EVERY_S, times.RAY_HEALTH_TIMEOUT_S, "a slow answer still counts"),
    (times.HEAD_DNS_TTL_S, times.RAY_RECONNECT_S, "a replaced head is found while workers look"),
]


@pytest.mark.parametrize(("shorter", "longer", "why"), IN_ORDER, ids=[each[2] for each in IN_ORDER])
def test_limits_are_in_order(shorter: float, longer: float, why: str) -> None:
    assert shorter < longer, why


def test_the_function_that_cleans_up_is_done_before_its_next_sweep() -> None:
    assert times.KEEPER_TIMEOUT_S <= times.SWEEP_EVERY_S


def test_every_limit_is_in_seconds_and_all_are_in_the_table() -> None:
    limits = {name: value for name, value in vars(times).items() if name.isupper()}
    assert len(limits) > 20
    assert all(name.endswith("_S") and isinstance(value, int) for name, value in limits.items())
