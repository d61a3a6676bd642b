"""Time limits that several parts share or that must be in order, in seconds, with reasons.

What ends first must leave time for what ends next, and the parts run in different places: a
program, Ray, the ECS agent, a state machine, a function. ``tests/contract/test_times.py`` holds the
order. Limits of a single call (a socket, a subprocess) stay beside that call.
"""

import re
from typing import Final

# --- a node that is told to end: SIGTERM, then SIGKILL --------------------------------------------
PROCESS_GROUP_STOP_S: Final = 5  # workers that are about to be killed leave their process group
COMMAND_STOP_S: Final = 20  # a program that has failed, or lost a node: nothing it saves now counts
DEFAULT_GRACE_S: Final = 60  # a program that is stopped may save; its files are copied after that
MAX_GRACE_S: Final = 180
CHECKPOINT_STOP_S: Final = 75  # the workers of a recipe save a checkpoint, of many GB maybe
RECIPE_STOP_S: Final = 92  # a recipe's command: the checkpoint, then result and report
RAY_STOP_S: Final = 10  # Ray on a job's head, after the command: its workers go with the job
RAY_DRAIN_S: Final = 30  # Ray on a node that trains hands over what runs there; Ray's default
COORDINATOR_DRAIN_S: Final = 1  # Ray on a head that does not train would only wait for itself
STOP_TIMEOUT_S: Final = 270  # the ECS agent kills a container that was told to stop
SPOT_NOTICE_S: Final = 120  # EC2 takes a spot host; the time that AWS announces
SPOT_POLL_S: Final = 5  # spot notice polling interval, as AWS recommends
SPOT_MARGIN_S: Final = (
    10  # Ray ends a node this long before its host goes: as announced, no failure
)

# --- the files of a user's program ----------------------------------------------------------------
FILES_EVERY_S: Final = 30  # between two rounds: what a lost host costs, beside the upload itself
FILES_QUIET_S: Final = 5  # a file that has not changed for this long after a round's moment is read
FILES_SAVE_S: Final = 60  # the last copy of a node that is told to end; what is left is not copied
FILES_LIST_S: Final = 10  # of that, for the list of what was copied
FILES_SLACK_S: Final = 10  # a request that is being made when the time is over ends after it
FILES_REFUSED_S: Final = 120  # S3 refuses a node's files for so long: time will not change that

# --- a job that reaches its deadline --------------------------------------------------------------
HOLD_MARGIN_S: Final = 5  # hosts that are held go before it: its end is the command's
HEAD_GRACE_S: Final = 120  # the head ends the job itself; after this the state machine ends it
SWEEP_GRACE_S: Final = 420  # an execution cleans up; after this the sweep ends what is left
CLOSED_S: Final = 21600  # an execution that has ended: sweeps look for its record, S3 may be away
KEEP_STARTS_S: Final = 120  # hosts that are kept: their nodes end, so that another task fits
SWEEP_EVERY_S: Final = 300  # what escapes is found within this, and a day of it costs nothing
CONSISTENT_S: Final = 10  # answers of ECS and Step Functions show what has just changed
TAKEN_HOST_S: Final = 60  # one that was kept waits for the task that it was freed for
IDLE_HOST_S: Final = 300  # a host without a task is terminated; another job may come before
DISCONNECTED_S: Final = 540  # agents reconnect within minutes, says AWS; three sweeps have seen it
AGENT_LOST_S: Final = (
    3600  # the same below a task, which trains on, but whose end is never heard of
)
HEAD_REPORTS_S: Final = 60  # between two reports of a job's head that it runs
HEAD_SILENT_S: Final = 1200  # a head that has not reported for this long is dead, whatever ECS says
KEEPER_TIMEOUT_S: Final = 300  # the function that cleans up; over before the next sweep begins
JOB_STOP_S: Final = 420  # ``trainctl stop`` waits this long for the last node to be gone
JOB_TAIL_S: Final = HEAD_GRACE_S + STOP_TIMEOUT_S + KEEPER_TIMEOUT_S  # until its hosts are gone
HOST_JOINS_S: Final = 1200  # a host that has not joined by then, or takes no task, is replaced
SLOW_HOST_JOINS_S: Final = 2400  # the same of bare metal and of P instances: up to 15 min of start
TASK_STARTS_S: Final = HOST_JOINS_S  # a host makes a task's container: also a pull of 10 GB
SURPLUS_HOST_S: Final = 2400  # one too many that the sweep spares: its start, 15 min or more idle

# --- a node that starts ---------------------------------------------------------------------------
HOST_WARMUP_S: Final = 300  # a GPU host joins the cluster; ECS starts no second one meanwhile
SLOW_HOST_WARMUP_S: Final = 900  # the same of bare metal and of P instances
QUEUE_LOOK_S: Final = 3600  # between two looks of a job that has waited for days for its turn
QUEUE_S: Final = 14 * 24 * 3600  # a job waits no longer for its turn: the longest job is over then
COUNTS_AS_HIGH_S: Final = 12 * 3600  # a job of a lower priority: no later one overtakes it then
HEAD_ASKED_AGAIN_S: Final = 30  # after ECS has given up on a head's host, or a fault; at first
HEAD_ASKED_LATER_S: Final = 1800  # the same for a job that has waited for days
LONG_RUN_S: Final = 3600  # a head that ran for longer has saved: a loss is the first in a row
HEAD_WAIT_S: Final = 600  # a worker waits for its head, whose host may still pull the image
RAY_START_S: Final = 240  # Ray on a job's head is up, also on one busy processor
AGENT_START_S: Final = 120  # Ray's agent on a worker node listens; else the node leaves
START_TURN_S: Final = 60  # a node waits for another of its host that starts, and is waited for
NODE_ASKED_S: Final = 180  # Ray asks again for a node that does not show; its default is 600
WORKER_REGISTER_S: Final = 600  # a process of Ray reports; Ray's default is a minute
WORKER_GROUP_START_S: Final = 10  # after a loss, Ray Train looks again which nodes there are
WORKER_ASKED_S: Final = 5  # the head asks the bucket whether a worker could not prepare
HEAD_DNS_TTL_S: Final = 10  # a replaced head has another address

# --- a storage that fails -------------------------------------------------------------------------
S3_TIMEOUT_S: Final = 20  # S3 stops in the middle of an answer; botocore's default is 60
S3_QUICK_S: Final = 5  # the same for what is written again later: the command has more to do

# --- who trains a run, or builds a store of tokens ------------------------------------------------
LEASE_RENEW_S: Final = 20  # between two heartbeats of its writer
LEASE_S: Final = 120  # lease expires after this long without a heartbeat

# --- workers that do not train any more -----------------------------------------------------------
WORKER_ANSWER_S: Final = 60  # a worker's process that is stopped; Ray Train's default is 600
SILENCE_S: Final = 300  # no step was reported, and none takes long: the workers start again
COLLECTIVE_S: Final = 600  # one rank waits for the others; the command, which says more, is sooner
COLLECTIVE_START_S: Final = 1800  # the same before the first steps: compilers, a first look at data

# --- a node that does not answer any more ---------------------------------------------------------
HEALTH_PROBE_S: Final = 3  # the container's check of itself
HEALTH_TIMEOUT_S: Final = 4  # ECS ends the check
HEALTH_EVERY_S: Final = 5  # ECS repeats it
HEALTH_START_S: Final = 120  # failures do not count: a first start reads its image from a cold disk
RAY_HEALTH_DELAY_S: Final = 2  # Ray's head checks a new node
RAY_HEALTH_EVERY_S: Final = 2  # and repeats it
RAY_HEALTH_TIMEOUT_S: Final = 6  # shorter, and a node with busy processors would be taken for dead
HOST_CHECK_S: Final = 90  # after a failure; 10 s as a rule, 60 s until nvidia-smi counts as hung
RAY_RECONNECT_S: Final = 30  # a worker that has lost its head ends, and releases its host


def is_slow(instance_type: str) -> bool:
    """True for types whose hosts take up to 15 minutes to start: bare metal and P instances."""
    return re.match(r"p\d|.*metal", instance_type) is not None
