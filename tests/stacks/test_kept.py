"""Hosts that are kept for their user's next job, and for nobody else's."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from contract.admission import Limits
from contract.job import KEPT_GROUP, JobStatus, Outcome, keeps_as
from stacks.jobs.keeper import cluster, kept
from tests.stacks.test_job_keeper import SPEC

ANNA = replace(SPEC, user_id="anna", keep_s=600)
SUCCEEDED = Outcome(status=JobStatus.SUCCEEDED, reason="succeeded")


def keeper_task(number: int, *, user: str = "anna", family: str = "worker") -> dict[str, Any]:
    """A task that keeps a host."""
    return {
        "taskArn": f"kept-{number}",
        "startedBy": keeps_as(user),
        "group": f"{KEPT_GROUP}j",
        "taskDefinitionArn": f"arn:x:task-definition/{family}:1",
        "lastStatus": "RUNNING",
        "containerInstanceArn": f"host-{number}",
    }


def waiting(job: str, provider: str) -> dict[str, Any]:
    """A task of a job that waits for a host."""
    return {
        "taskArn": f"of-{job}",
        "group": f"job:{job}",
        "taskDefinitionArn": "arn:x:task-definition/worker:1",
        "lastStatus": "PROVISIONING",
        "capacityProviderName": provider,
    }


THERE = [
    keeper_task(1, family="head"),
    keeper_task(2),
    keeper_task(3),
    keeper_task(4, user="bert"),
    keeper_task(5, family="S-pool-l4"),
]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tasks of the cluster; those that are stopped leave."""
    found: list[Any] = [*THERE]
    monkeypatch.setattr(cluster, "running", lambda **_: [*found])

    def stop(gone: list[Any], _reason: str) -> None:
        found[:] = [each for each in found if each not in gone]

    monkeypatch.setattr(cluster, "stop", stop)
    monkeypatch.setattr(cluster, "GROUPS", {"h": "for-heads", "w": "for-workers"})
    monkeypatch.setattr(cluster, "PLACES", {"l4": "l4"})
    monkeypatch.setattr(cluster, "STACK", "S")
    monkeypatch.setattr(kept, "HEAD_FAMILY", "head")
    return found


@pytest.mark.parametrize(
    ("pool", "count", "others", "taken"),
    [
        ("", 1, [], ["kept-1"]),
        ("default", 1, [], ["kept-2"]),
        ("default", 4, [], ["kept-2", "kept-3"]),
        ("l4", 2, [], ["kept-5"]),
        # The host would go to a job that waits already; this job's own tasks do not count.
        ("default", 2, [waiting("other", "for-workers")], []),
        ("default", 2, [waiting("j2", "for-workers")], ["kept-2", "kept-3"]),
        ("default", 2, [waiting("other", "cp-S-pool-l4")], ["kept-2", "kept-3"]),
    ],
)
def test_a_job_takes_its_users_hosts_of_its_pool(
    tasks: list[Any], pool: str, count: int, others: list[Any], taken: list[str]
) -> None:
    tasks += others
    kept.take("j2", ANNA, count, pool=pool)
    assert [each["taskArn"] for each in THERE if each not in tasks] == taken


def test_hosts_that_are_kept_for_others_are_no_room(tasks: list[Any]) -> None:
    assert tasks
    limits = Limits(max_heads=2, max_workers=4, pools={"l4": 2})
    of_anna = kept.limits_left(limits, ANNA)
    assert (of_anna.max_heads, of_anna.max_workers, of_anna.pools) == (2, 3, {"l4": 2})
    of_bert = kept.limits_left(limits, replace(SPEC, user_id="bert"))
    assert (of_bert.max_heads, of_bert.max_workers, of_bert.pools) == (1, 2, {"l4": 1})


@pytest.mark.parametrize(
    ("spec", "outcome"),
    [
        (replace(ANNA, keep_s=0), SUCCEEDED),
        (replace(ANNA, user_id=""), SUCCEEDED),
        (ANNA, replace(SUCCEEDED, again=True)),
        (ANNA, replace(SUCCEEDED, status=JobStatus.STOPPED)),
        (None, SUCCEEDED),
    ],
)
def test_hosts_are_kept_only_after_a_command_that_has_ended(spec: Any, outcome: Outcome) -> None:
    assert kept.keep({"host-1"}, "j", spec, outcome) == {"host-1"}


def test_a_host_that_cannot_be_kept_is_released(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is busy for a moment, for one AWS refuses the task, and one never gets free."""
    now, asked = [0.0], list[str]()
    clock = SimpleNamespace(
        time=lambda: now[0],
        monotonic=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )

    def start(host: str, *_: object) -> bool:
        asked.append(host)
        if host == "refused":
            raise PermissionError("ecs:StartTask")
        return host == "busy" and now[0] > 5

    monkeypatch.setattr(kept, "time", clock)
    monkeypatch.setattr(kept, "_start", start)
    left = kept.keep({"busy", "refused", "hangs"}, "j", ANNA, SUCCEEDED)
    assert left == {"refused", "hangs"}
    assert asked.count("refused") == 1
    assert 120 <= now[0] < 130, "the function's own time is limited"
    assert "1 of 3 hosts are kept" in capsys.readouterr().out
