"""Faults that a user would feel, planted one at a time in a copy of the project:
``python -m tests.planted_faults [NAME ...] [--all]``.

Prints the test that fails with each fault, and exits with 1 if a fault survives. A fault first
meets the quick tests closest to it; with ``--all``, one that survives those meets every quick test.

The first ten of ``FAULTS`` were chosen by reading the product only, not its tests. The next ten
survived an earlier review by hand. Each fault of ``STRICT`` removes the code that handles one
behavior of AWS that the local AWS copies.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

#: What the tests need and git does not track.
_LINKED: Final = (".venv", ".venv-aws", "node_modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One wrong edit."""

    name: str
    file: str
    old: str
    """Occurs exactly once in ``file``."""
    new: str
    felt: str
    """What a user would notice."""
    tests: str
    """Quick tests closest to it, separated by spaces."""

    def planted(self, text: str) -> str:
        """The text of its file with the edit.

        Raises:
            ValueError: the edit does not fit.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)}x {self.old!r}")
        return text.replace(self.old, self.new)


FAULTS: Final = (
    # --- chosen by reading the product only
    Fault(
        name="answer-without-end",
        file="training/data/conversations.py",
        old="                learned[stop] = True\n",
        new="",
        felt="a model trained on chats never ends its answer",
        tests="tests/training/test_conversations.py",
    ),
    Fault(
        name="mixture-learns-questions",
        file="training/data/mixed_feed.py",
        old="labels[own] = batch.labels",
        new="labels[own] = batch.tokens[:, 1:]",
        felt="in a mixture of text and chats, the questions are learned too",
        tests="tests/training/test_mixtures.py",
    ),
    Fault(
        name="same-order-each-epoch",
        file="training/data/images.py",
        old="if epoch != self._epoch:",
        new="if not len(self._order):",
        felt="each epoch has the same order, and a resumed run another one",
        tests="tests/training/test_data.py",
    ),
    Fault(
        name="average-not-published",
        file="training/checkpoint/checkpoints.py",
        old="model=snapshot.average or snapshot.model",
        new="model=snapshot.model",
        felt="the model of a run is not the averaged one that was evaluated",
        tests="tests/training/test_checkpoints.py",
    ),
    Fault(
        name="evaluation-lost-on-resume",
        file="training/record/events.py",
        old="line.step <= step]",
        new="line.step < step]",
        felt="each resume removes the evaluation of its checkpoint from the report",
        tests="tests/training/test_record.py",
    ),
    Fault(
        name="drain-until-the-end",
        file="containers/spot.py",
        old="notice.seconds() - times.SPOT_MARGIN_S",
        new="notice.seconds()",
        felt="Ray still runs when a spot host goes: the announced end counts as a failure",
        tests="tests/containers/test_spot.py",
    ),
    Fault(
        name="old-file-over-new-code",
        file="containers/program/files.py",
        old="if is_newer and not self._is_older_than_its_code(file):",
        new="if is_newer:",
        felt="a file that the user has fixed and submitted again is replaced by its old copy",
        tests="tests/containers/program/test_files.py",
    ),
    Fault(
        name="lost-files-succeed",
        file="containers/job.py",
        old="return code if is_saved or code != exits.OK else exits.FILES_LOST",
        new="return code",
        felt="a job that could not save its files is reported as succeeded",
        tests="tests/containers/test_job.py",
    ),
    Fault(
        name="ended-nodes-billed-twice",
        file="trainctl/aws/jobs.py",
        old="[*{task.id: task for task in tasks}.values()]",
        new="tasks",
        felt="`trainctl cost` counts a node twice for the hour in which ECS still shows it",
        tests="tests/trainctl/test_costs.py",
    ),
    Fault(
        name="tag-without-lock",
        file="contract/images.py",
        old='    "requirements/training.txt",\n    "requirements.lock",\n',
        new="",
        felt="after an upgrade of packages, `make images` finds the old images and builds none",
        tests="tests/contract/test_images.py",
    ),
    # --- survived a review by hand
    Fault(
        name="waits-only-once",
        file="stacks/job_machine.py",
        old='_value(f"{waits} ? $asked : $millis() / 1000")',
        new='_value("$asked")',
        felt="a job that loses its head after an hour gives up at once where no host is free",
        tests="tests/stacks/test_lives.py",
    ),
    Fault(
        name="max-cost-of-fewest-nodes",
        file="trainctl/job_plan.py",
        old="num_nodes=wanted.high, max_seconds=seconds)",
        new="num_nodes=wanted.low, max_seconds=seconds)",
        felt="with --nodes 1:8 the bill is up to eight times --max-cost",
        tests="tests/trainctl/test_submit.py tests/trainctl/test_costs.py",
    ),
    Fault(
        name="waits-longer-than-it-lasts",
        file="trainctl/job_plan.py",
        old="min(round(given.wait_minutes * 60), max_seconds)",
        new="round(given.wait_minutes * 60)",
        felt="a job of two hours waits for days for a host",
        tests="tests/trainctl/test_costs.py",
    ),
    Fault(
        name="silent-upload",
        file="training/loop/saving.py",
        old="                self._report()\n        self._thread, error",
        new="                pass\n        self._thread, error",
        felt="an upload of more than five minutes is taken for a hang, and killed, for ever",
        tests="tests/training/test_saving.py",
    ),
    Fault(
        name="shared-position",
        file="training/checkpoint/checkpoints.py",
        old="position=replace(position),",
        new="position=position,",
        felt="a slow save writes a later step into a checkpoint: a resume leaves data out",
        tests="tests/training/test_checkpoints.py",
    ),
    Fault(
        name="ddp-mean-of-ranks",
        file="training/ddp/train.py",
        old="(loss_sum * (world_size / size)).backward()",
        new="(loss_sum / len(labels)).backward()",
        felt="on three workers another curve than on two: images of smaller shares weigh more",
        tests="tests/training/test_ddp.py tests/training/test_recipe_steps.py",
    ),
    Fault(
        name="fsdp-mean-of-passes",
        file="training/fsdp/train.py",
        old="(mean_loss * (part.num_labels * world_size / num_labels)).backward()",
        new="(mean_loss / config.num_microbatches).backward()",
        felt="short chats and padded sequences weigh more than they should",
        tests="tests/training/test_recipe_steps.py tests/training/test_fsdp_input.py",
    ),
    Fault(
        name="fsdp-applies-bad-step",
        file="training/fsdp/train.py",
        old="            if is_finite(loss_sum, norm, world_size=world_size):\n"
        "                optimizer.step()\n",
        new="            optimizer.step()\n",
        felt="one infinite gradient makes every weight NaN",
        tests="tests/training/test_recipe_steps.py",
    ),
    Fault(
        name="fsdp-loss-counted-twice",
        file="training/bookkeeping.py",
        old="self._save(reported if evaluates else self._position)",
        new="self._save(self._position)",
        felt="the training curve jumps after each resume",
        tests="tests/training/test_recipe_steps.py",
    ),
    Fault(
        name="lost-node-counted",
        file="containers/autoscaler.py",
        old="if now - at < _SETTLES_S",
        new="if now >= at",
        felt="a node that never comes is counted for ever: the job trains with one node less",
        tests="tests/containers/test_autoscaler.py",
    ),
)

STRICT: Final = (
    Fault(
        name="policies",
        file="stacks/rights.py",
        old='"secretsmanager:GetSecretValue"',
        new='"secretsmanager:DescribeSecret"',
        felt="a job is refused its secrets",
        tests="tests/stacks/test_roles.py",
    ),
    Fault(
        name="patience",
        file="contract/job_outcome.py",
        old="again=ended_at < patience",
        new="again=False",
        felt="a job gives up before --wait-minutes are over",
        tests="tests/test_verdicts.py",
    ),
    Fault(
        name="revisions",
        file="stacks/ray_nodes.py",
        old="update_replace_policy = CfnDeletionPolicy.RETAIN",
        new="update_replace_policy = CfnDeletionPolicy.DELETE",
        felt="a running job is not continued after an update of the stack",
        tests="tests/stacks/test_training_stack.py",
    ),
    Fault(
        name="filters",
        file="containers/autoscaler.py",
        old=', startedBy=self._settings["job"]\n',
        new=', startedBy=self._settings["job"], desiredStatus="RUNNING"\n',
        felt="no worker is found",
        tests="tests/containers/test_autoscaler.py",
    ),
    Fault(
        name="exec",
        file="containers/autoscaler.py",
        old='"enableExecuteCommand": True,',
        new='"enableExecuteCommand": False,',
        felt="`trainctl shell` does not reach a worker",
        tests="tests/containers/test_autoscaler.py",
    ),
    Fault(
        name="requests",
        file="stacks/job_machine.py",
        old='"EnableExecuteCommand": True,',
        new='"enableExecuteCommand": True,',
        felt="the head is not started",
        tests="tests/stacks/test_state_machine.py",
    ),
    Fault(
        name="architecture",
        file="contract/job_outcome.py",
        old="|no such image|platform",
        new="|no such image",
        felt="an image that cannot start is tried again",
        tests="tests/rehearsal/test_hosts.py",
    ),
    Fault(
        name="consistency-2",
        file="stacks/job_keeper/cluster.py",
        old="if pending <= len(never_ran) and pending + alive <= len(stopping):",
        new="if host:",
        felt="the host of a starting task is terminated",
        tests="tests/stacks/test_job_keeper.py",
    ),
    Fault(
        name="deletion",
        file="stacks/gpu_cluster.py",
        old="self.teardown.hosts.node.add_dependency(self.storage.export)",
        new="pass",
        felt="`make destroy` leaves the file system behind",
        tests="tests/stacks/test_shared_storage.py",
    ),
    Fault(
        name="errors",
        file="stacks/job_machine.py",
        old='"ECS.AmazonECSException", ',
        new="",
        felt="a throttled call ends a job",
        tests="tests/stacks/test_state_machine.py",
    ),
)

#: Of the control plane: listed before there was a simulation of jobs' lives. The first twenty were
#: chosen by reading the product only; the others by what its tests had looked at until then.
_LIVES: Final = "tests/stacks/test_lives.py"
_keeper = partial(Fault, file="stacks/job_keeper/index.py", tests=_LIVES)
_cluster = partial(Fault, file="stacks/job_keeper/cluster.py", tests=_LIVES)
_verdict = partial(Fault, file="contract/job_outcome.py", tests=_LIVES)
_machine = partial(Fault, file="stacks/job_machine.py", tests=_LIVES)
_provider = partial(Fault, file="containers/autoscaler.py", tests=_LIVES)
_head = partial(Fault, file="containers/job.py", tests=_LIVES)
_admission = partial(Fault, file="contract/admission.py", tests="tests/contract/test_admission.py")
CONTROL: Final = (
    # --- chosen by reading the product only
    _cluster(
        name="looked-at-once",
        old="            if found := unused(instance, until=until):",
        new="            if found := ecs.describe_container_instances(cluster=CLUSTER, "
        'containerInstances=[instance])["containerInstances"][0]:',
        felt="a host is terminated under the task that has just come to it",
    ),
    _cluster(
        name="released-without-drain",
        old="            drain(instance)\n",
        new="",
        felt="a task comes to a host while it is being terminated",
    ),
    _cluster(
        name="pending-task-not-seen",
        old="if pending <= len(never_ran) and pending + alive <= len(stopping):",
        new="if alive <= len(stopping):",
        felt="a host is terminated under a task that is about to start",
    ),
    _keeper(
        name="heads-of-all-jobs-stopped",
        old="for task in heads if job_of(task) == job}",
        new="for task in heads}",
        felt="the end of one job stops the heads of all others",
    ),
    _keeper(
        name="workers-outlive-their-job",
        old='found = {task["taskArn"]: task for task in running(startedBy=job)}',
        new="found = {}",
        felt="workers are billed after their job until a sweep finds them",
    ),
    _keeper(
        name="record-written-twice",
        old='            IfNoneMatch="*",\n',
        new="",
        felt="an abort during the clean-up changes how a job is said to have ended",
    ),
    _keeper(
        name="record-of-an-attempt",
        old="        if not outcome.again:\n            outcome = replace(",
        new="        if True:\n            outcome = replace(",
        felt="the record says host_lost of a job that then succeeds",
    ),
    _keeper(
        name="bad-host-kept",
        old="if ending_of(task) is Ending.BAD_HOST:",
        new="if False:",
        felt="each attempt begins on the same broken host",
    ),
    _cluster(
        name="bad-host-taken-again",
        old="            if not are_bad and not unused(",
        new="            if not unused(",
        felt="each job that waits for a host fails on the same broken one",
    ),
    _keeper(
        name="orphans-not-swept",
        old='if statuses[job] != "RUNNING":',
        new="if False:",
        felt="tasks of an ended job run until its deadline, or for ever",
    ),
    _keeper(
        name="patience-ends-what-runs",
        old="    waits = is_waiting(task)\n",
        new="    waits = True\n",
        felt="a head that runs is stopped for want of a host",
    ),
    _cluster(
        name="waiting-task-loses-its-host",
        old='if wanted.keys() & {"", provider} and host["status"] != "DRAINING":',
        new="if False:",
        felt="a host that has just come is taken from the task that waits for it",
    ),
    _cluster(
        name="unjoined-hosts-billed",
        old="if name in joined or age < limit:",
        new="if True:",
        felt="a host that never joins its cluster is billed for ever",
    ),
    _cluster(
        name="pending-for-ever",
        old='        what, limit_s = "did not start", times.TASK_STARTS_S\n',
        new="        pass\n",
        felt="a host whose Docker hangs is billed for ever, and its job stands still",
    ),
    _cluster(
        name="unhealthy-for-ever",
        old='        what, limit_s = "did not answer its health check", times.SWEEP_EVERY_S // 2\n',
        new="        pass\n",
        felt="a node that hangs is billed until its job's deadline",
    ),
    _cluster(
        name="draining-waits-for-days",
        old="    if at_once:\n",
        new="    if False:\n",
        felt="a host that never joined is billed for two days more",
    ),
    _cluster(
        name="launches-stay-suspended",
        old='            if not reason.startswith("User suspended"):\n',
        new="            if False:\n",
        felt="after a day without a host no job gets one any more",
    ),
    _keeper(
        name="waits-in-vain",
        old='    elif not is_in_vain(why):\n        return ""\n',
        new='    else:\n        return ""\n',
        felt="a job waits for hosts that a quota of nothing never lets start",
    ),
    _verdict(
        name="killed-head-fails",
        old='        Ending.KILLED: "the head was killed",\n',
        new="",
        felt="a head that Linux or a host's end has killed is not tried again",
    ),
    _verdict(
        name="one-attempt-more",
        old="again = in_a_row < MOST_IN_VAIN or",
        new="again = in_a_row <= MOST_IN_VAIN or",
        felt="a job whose head is killed is tried once more than it may be",
    ),
    _machine(
        name="attempts-not-counted",
        old='"row": _value("$outcome.in_a_row + 1"),',
        new='"row": _value("$row"),',
        felt="a job whose head is lost again and again never ends",
    ),
    _machine(
        name="head-killed-at-its-deadline",
        old='"TimeoutSeconds": _value(f"$max([{HEAD_GRACE_S}, {left}])"),',
        new='"TimeoutSeconds": _value("$max([1, $ceil($deadline - $millis() / 1000)])"),',
        felt="a head has no time to save at its deadline",
    ),
    _provider(
        name="nodes-started-twice",
        old="_SETTLES_S: Final = 60.0",
        new="_SETTLES_S: Final = 0.0",
        felt="more workers are started, and billed, than the job asks for",
    ),
    _head(
        name="waits-for-ever-after-a-loss",
        old="(bool(self._spec.recipe) or not has_lost)",
        new="not has_lost",
        felt="after a lost worker the other hosts are billed until the deadline",
    ),
    _head(
        name="killed-command-tried-again",
        old="            return exits.FAILED, text\n        is_program =",
        new="            return own, text\n        is_program =",
        felt="a program that needs too much memory is tried again as if a host were lost",
    ),
    # --- by what the tests had looked at
    _cluster(
        name="idle-since-it-joined",
        old='[host["registeredAt"], *ends]',
        new='[host["registeredAt"]]',
        felt="a host is terminated while the next attempt of its job is about to use it",
    ),
    _cluster(
        name="group-lowered-below-a-waiting-task",
        old='if group["DesiredCapacity"] > there and not wanted.keys() & {"", GROUPS[name]}:',
        new='if group["DesiredCapacity"] > there:',
        felt="EC2 stops to look for the host that a task waits for",
    ),
    _keeper(
        name="who-aborted-is-not-known",
        old='if found.get("status") == "ABORTED" or time.monotonic() > until:',
        new="if found:",
        felt="the record does not say that a user has stopped the job",
    ),
    _cluster(
        name="dead-agent-kept",
        old="elif wrong or seen_s(host, DISCONNECTED_SINCE, away) >= times.DISCONNECTED_S:",
        new="elif wrong:",
        felt="a host whose agent is dead is billed for ever, with the task on it",
    ),
    _verdict(
        name="no-host-counts-as-an-attempt",
        old="return replace(found, attempts=attempt - 1, in_a_row=in_a_row - 1)",
        new="return found",
        felt="a job that waits for a spot host runs out of attempts before it began",
    ),
    _verdict(
        name="deadline-tried-again",
        old="if code == exits.DEADLINE or ordered == JobStatus.DEADLINE or is_late:",
        new="if code == exits.DEADLINE or ordered == JobStatus.DEADLINE:",
        felt="a job goes on after its deadline",
    ),
    _machine(
        name="time-out-without-clean-up",
        old="    head.add_catch(\n        clean_up,\n        errors=[sfn.Errors.ALL],",
        new='    head.add_catch(\n        clean_up,\n        errors=["States.TaskFailed"],',
        felt="a job that is ended by its time limit leaves its workers",
    ),
    _provider(
        name="lost-answer-starts-twice",
        old='            "clientToken": uuid.uuid4().hex,\n',
        new="",
        felt="a lost answer of ECS doubles the workers",
    ),
    _head(
        name="no-word-before-the-deadline",
        old="if seen.now > self._deadline - self.early_s:",
        new="if seen.now > self._deadline + 600:",
        felt="a program is killed at its deadline, and what it did since it last saved is lost",
    ),
    # --- of admission, by reading it
    _admission(
        name="head-beside-too-many",
        old="if len(earlier) >= self.max_heads or",
        new="if len(earlier) > self.max_heads or",
        felt="a head is started that has no host, and its job ends for want of it",
    ),
    _admission(
        name="fewest-nodes-of-earlier-jobs",
        old="sum(each.high for each in earlier)",
        new="sum(each.low for each in earlier)",
        felt="a job starts beside one that has grown into its hosts, and ends without them",
    ),
    _admission(
        name="all-or-no-nodes",
        old="or nodes.low > left:",
        new="or nodes.high > left:",
        felt="a job for one node or more waits until there are all that it may have",
    ),
    _admission(
        name="grows-over-the-limit",
        old="return Range(nodes.low, min(nodes.high, left))",
        new="return nodes",
        felt="a later job grows into the hosts of an earlier one, whose head waits for them",
    ),
    _admission(
        name="newest-first",
        old='found = sorted((each["startDate"], each["name"]) for each in executions)',
        new='found = [(each["startDate"], each["name"]) for each in executions]',
        felt="the last who submits is the first who trains",
    ),
    _keeper(
        name="first-page-only",
        old='order = in_order(each_of("stepfunctions", "list_executions", "executions", **of))',
        new="order = in_order([*each_of('stepfunctions', 'list_executions', 'executions', **of)]"
        "[:1])",
        felt="jobs behind many others are not found in the queue",
        tests="tests/stacks/test_job_keeper.py",
    ),
    _keeper(
        name="not-in-the-list-yet",
        old="    if job not in order or order",
        new="    order += [job] if job not in order else []\n    if order",
        felt="two jobs that are submitted at once take one place",
        tests="tests/stacks/test_job_keeper.py",
    ),
    _keeper(
        name="never-fits-and-queues",
        old="if spec and LIMITS.admit(spec.nodes, []) is None:",
        new="if False:",
        felt="a job for more hosts than there can be waits for two weeks",
        tests="tests/stacks/test_job_keeper.py",
    ),
    _keeper(
        name="queues-for-ever",
        old="elif spec and waited < times.QUEUE_S:",
        new="elif spec:",
        felt="a job waits until its execution has too many events, and ends without a word",
        tests="tests/stacks/test_job_keeper.py",
    ),
    _machine(
        name="looks-at-once",
        old='"pause": CONSISTENT_S,',
        new='"pause": 0,',
        felt="two jobs that are submitted at once take one place",
    ),
    _machine(
        name="deadline-of-the-submission",
        old='"deadline": _value("$floor($millis() / 1000) + $seconds"),',
        new='"deadline": _value("$floor($began) + $seconds"),',
        felt="the time in the queue is taken from the training",
    ),
)

#: Of checkpoints, lease and record: all but two must die in the simulation of the storage, in which
#: no process acts in the middle of what another one does.
_STORED: Final = "tests/training/test_storage_simulated.py"
_checkpoint = partial(Fault, file="training/checkpoint/checkpoints.py", tests=_STORED)
_lease = partial(Fault, file="training/system/lease.py", tests=_STORED)
_storage = partial(Fault, file="training/system/storage.py", tests=_STORED)
_record = partial(Fault, file="training/record/writer.py", tests=_STORED)
STORED: Final = (
    _checkpoint(
        name="manifest-before-files",
        old="            files = write(snapshot, Path(folder))\n",
        new="            files = write(snapshot, Path(folder))\n"
        "            complete(place, uri, files, check=check)\n",
        felt="an upload that was cut off is counted as a checkpoint, and whole ones go for it",
    ),
    _checkpoint(
        name="no-check-before-the-manifest",
        old="    check()\n    manifest = ",
        new="    manifest = ",
        felt="a process that lost the run reports a checkpoint that nobody resumes from",
    ),
    Fault(
        name="name-without-lease",
        file="contract/runs.py",
        old='(f"-lease{lease}" if lease > 1 else "")',
        new='""',
        felt="a process that lost the run writes into a checkpoint of its successor",
        tests=_STORED,
    ),
    _checkpoint(
        name="torn-ones-count",
        old="        verify(place_of(run_uri, name), num_parts=0)\n",
        new="        pass\n",
        felt="after failed saves fewer whole checkpoints are left than were asked for",
    ),
    _checkpoint(
        name="newest-removed",
        old="*whole[:-keep], *_damaged",
        new="*whole[keep:], *_damaged",
        felt="the last checkpoint is removed as soon as it is saved",
    ),
    _checkpoint(
        name="hash-not-looked-at",
        old="        if num_parts and number % num_parts == part:",
        new="        if False:",
        felt="a run resumes from weights that are damaged",
    ),
    _checkpoint(
        name="reported-before-the-upload",
        old="            for name in files:\n                storage.upload(",
        new="            for name in [*files][1:]:\n                storage.upload(",
        felt="a save is reported that lacks a file",
    ),
    _checkpoint(
        name="removed-from-the-end",
        old="            storage.remove_file(storage.join(uri, MANIFEST_FILE))\n",
        new="",
        felt="a run whose only checkpoint is half removed refuses to start",
    ),
    _checkpoint(
        name="successor-pruned",
        old="if number <= own and name not in late]",
        new="if name not in late]",
        felt="a process that lost the run removes the checkpoints of its successor",
        tests="tests/training/test_checkpoint_faults.py",
    ),
    _checkpoint(
        name="hidden-folder-of-successor-removed",
        old="        if _lease_of(hidden.stem[1:]) <= _lease_of(place.name):\n",
        new="        if True:\n",
        felt="a process that lost the run removes what its successor is saving",
        tests="tests/training/test_checkpoint_faults.py",
    ),
    _lease(
        name="lease-taken-by-overwriting",
        old="            if storage.create_bytes(_file(uri, number + 1), own.as_json()):",
        new="            storage.write_bytes(_file(uri, number + 1), own.as_json())\n"
        "            if True:",
        felt="two processes hold a run and write the same checkpoints",
    ),
    _lease(
        name="ranks-keep-their-number",
        old="            return newest + 1\n",
        new="            return number\n",
        felt="ranks that were cut off write into the checkpoints of those that replaced them",
    ),
    _lease(
        name="sure-after-a-stall",
        old="        return not self._lost and self._clock() - self._confirmed_at",
        new="        return not self._lost or self._clock() - self._confirmed_at",
        felt="a process that lost the run writes over the record of its successor",
    ),
    _storage(
        name="not-synced",
        old="    _sync_folder(Path(hidden))\n    check()",
        new="    check()",
        felt="after a loss of power a reported checkpoint is empty",
    ),
    _storage(
        name="name-not-synced",
        old="    sync(Path(uri).parent)\n",
        new="",
        felt="after a loss of power a reported checkpoint has no name",
    ),
    _record(
        name="record-truncated-in-place",
        old="                storage.write_bytes(str(self._metrics), content.encode())",
        new="                self._metrics.write_text(content)",
        felt="a crash at the start of a resumed run loses its record",
    ),
    _record(
        name="refused-lines-lost",
        old="            self._on_disk(write)\n            self._note_lines()",
        new="            self._on_disk(write)\n            self._lines, self._is_anew = [], False\n"
        "            self._note_lines()",
        felt="lines that a disk refused once are missing, or those of steps done again stay",
    ),
)


def copied(folder: Path) -> Path:
    """The project as it is now, with the environments and the data of this one."""
    copy = folder / "project"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if not (ROOT / name).is_file():
            continue  # deleted, or a link to an environment
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for name in _LINKED:
        (copy / name).symlink_to((ROOT / name).resolve())
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    return copy


def killer(project: Path, tests: list[str]) -> str:
    """The first quick test that fails in ``project``; "" if none does."""
    command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-qxrfE", "-p", "no:cacheprovider"]
    # It compares the list with the sources, so every fault would die of it.
    command += ["--ignore", "tests/test_planted_faults.py"]
    done = subprocess.run(
        [*command, "-m", "not slow and not night", *tests],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (1, 2) or failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return failed[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant [all]")
    parser.add_argument("--all", action="store_true", help="survivors meet every quick test")
    given = parser.parse_args(argv)
    known = {each.name: each for each in (*FAULTS, *STRICT, *CONTROL, *STORED)}
    if unknown := {*given.names} - known.keys():
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")

    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        project = copied(Path(folder))
        for fault in [known[name] for name in given.names or known]:
            file = project / fault.file
            text = file.read_text()
            file.write_text(fault.planted(text))
            began = time.monotonic()
            died = killer(project, fault.tests.split())
            if not died and given.all:
                died = killer(project, [])
            seconds = time.monotonic() - began
            file.write_text(text)
            num_survivors += not died
            print(f"{fault.name:26} {seconds:4.0f} s  {died or 'SURVIVES'}", flush=True)
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
