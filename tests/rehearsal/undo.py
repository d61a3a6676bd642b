"""Each behavior that the local AWS is strict about has code that deals with it, and a test that
fails without that code: ``python -m tests.rehearsal.undo [SWITCH ...]``.

For each switch of ``rehearsal/ministack/switches.py``, one edit takes the code away in a copy of
the project, and the test must fail there. Quick tests only; it takes a minute or two, so CI leaves
it out. It prints a table, and ends with 1 where a test did not notice.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

#: Beside what git knows, without which no test runs.
ENVIRONMENTS: Final = (".venv", ".venv-aws", "node_modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class Undo:
    """One edit that takes the code away, and the test that must fail then."""

    switch: str
    file: str
    old: str
    new: str
    test: str

    def is_noticed(self, copy: Path) -> bool:
        """Whether the test passes as the project is, and fails after the edit."""
        file = copy / self.file
        before = file.read_text()
        if before.count(self.old) != 1:
            raise SystemExit(f"error: {self.file} has {self.old!r} {before.count(self.old)} times")
        passes = self._test(copy)
        file.write_text(before.replace(self.old, self.new))
        try:
            return passes == 0 and self._test(copy) == 1
        finally:
            file.write_text(before)

    def _test(self, copy: Path) -> int:
        command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, "-x", self.test],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            check=False,
        ).returncode


UNDOS: Final = (
    Undo(
        switch="policies",
        file="stacks/rights.py",
        old='sid="Secrets", actions=["secretsmanager:GetSecretValue"]',
        new='sid="Secrets", actions=["secretsmanager:DescribeSecret"]',
        test="tests/stacks/test_roles.py::test_what_a_job_needs_is_allowed",
    ),
    Undo(
        switch="patience",
        file="contract/verdicts.py",
        old="again=time.time() < patience",
        new="again=False",
        test="tests/stacks/test_job_keeper.py::"
        "test_a_head_that_ecs_has_given_up_on_is_asked_for_again_as_long_as_the_job_waits",
    ),
    Undo(
        switch="revisions",
        file="stacks/ray_nodes.py",
        old="update_replace_policy = CfnDeletionPolicy.RETAIN",
        new="update_replace_policy = CfnDeletionPolicy.DELETE",
        test="tests/stacks/test_training_stack.py::"
        "test_a_job_keeps_its_task_definition_while_the_stack_is_updated",
    ),
    Undo(
        switch="filters",
        file="containers/autoscaler.py",
        old=", startedBy=self._settings.job\n",
        new=', startedBy=self._settings.job, desiredStatus="RUNNING"\n',
        test="tests/containers/test_autoscaler.py",
    ),
    Undo(
        switch="exec",
        file="containers/autoscaler.py",
        old='"enableExecuteCommand": True,',
        new='"enableExecuteCommand": False,',
        test="tests/containers/test_autoscaler.py::"
        "test_workers_take_a_shell_and_the_tags_that_costs_are_told_apart_by",
    ),
    Undo(
        switch="requests",
        file="stacks/job_machine.py",
        old='"EnableExecuteCommand": True,',
        new='"enableExecuteCommand": True,',
        test="tests/stacks/test_state_machine.py::"
        "test_the_calls_of_the_machine_are_calls_that_there_are",
    ),
    Undo(
        switch="architecture",
        file="contract/endings.py",
        old="|no such image|platform",
        new="|no such image",
        test="tests/rehearsal/test_hosts.py::"
        "test_a_job_with_an_image_for_other_processors_is_not_tried_again",
    ),
    Undo(
        switch="consistency",
        file="stacks/job_keeper/index.py",
        old="if statuses[job] == UNKNOWN and is_new and not is_over:",
        new="if not job and is_new and not is_over:",
        test="tests/stacks/test_job_keeper.py::test_the_sweep_ends_what_nobody_looks_after",
    ),
    Undo(
        switch="consistency",
        file="stacks/job_keeper/index.py",
        old="if pending <= len(never_ran) and pending + alive <= len(stopping):",
        new="if host:",
        test="tests/stacks/test_job_keeper.py::test_a_task_that_no_list_has_yet_keeps_its_host",
    ),
    Undo(
        switch="deletion",
        file="stacks/gpu_cluster.py",
        old="self.teardown.hosts.node.add_dependency(self.storage.export)",
        new="pass",
        test="tests/stacks/test_shared_storage.py::"
        "test_it_is_exported_when_no_host_is_left_and_before_anything_of_it_goes",
    ),
    Undo(
        switch="errors",
        file="stacks/job_machine.py",
        old='"ECS.AmazonECSException", ',
        new="",
        test="tests/stacks/test_state_machine.py::test_what_ecs_calls_throttling_is_asked_again",
    ),
)


def copied(folder: Path) -> Path:
    """The project as it is now, with the environments of this one."""
    copy = folder / "project"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for name in ENVIRONMENTS:
        (copy / name).symlink_to((ROOT / name).resolve())
    return copy


def main(wanted: list[str]) -> int:
    if unknown := {*wanted} - {each.switch for each in UNDOS}:
        print(f"error: there is no switch {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for each in UNDOS:
            if wanted and each.switch not in wanted:
                continue
            is_noticed = each.is_noticed(copy)
            missed += not is_noticed
            seen = "fails" if is_noticed else "DOES NOT NOTICE"
            print(f"{each.switch:13} {each.file:28} {each.test.rpartition('::')[2]}: {seen}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
