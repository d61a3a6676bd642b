"""``trainctl runs`` and ``trainctl checkpoints``: what ``golden/runs`` does not show."""

import json
from datetime import timedelta

from contract.job import JobSpec, JobStatus, Outcome, record_json
from contract.nodes import Range
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli


def put(account: Account, key: str, content: object, *, hours_ago: float = 0.0) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    key = f"runs/{key}".replace("runs/../", "")
    account.objects[key] = text.encode()
    account.modified[key] = account.now - timedelta(hours=hours_ago)


def checkpoint(account: Account, run: str, step: int, *, hours_ago: float, lost: str = "") -> None:
    """A checkpoint of two files; ``lost`` is missing or cut off."""
    files = {"model.safetensors": "x" * 1000, "state.pt": "y" * 500}
    folder = f"{run}/checkpoints/step-{step:08d}"
    listed = {name: {"bytes": len(text), "sha256": "0"} for name, text in files.items()}
    for name, text in files.items():
        content = text[:10] if lost == f"end of {name}" else text
        if lost != name:
            put(account, f"{folder}/{name}", content, hours_ago=hours_ago)
    if lost != "manifest.json":
        put(account, f"{folder}/manifest.json", {"files": listed}, hours_ago=hours_ago)


def ended(account: Account, run: str, job: str, reason: str, *, hours_ago: float) -> None:
    spec = JobSpec(run=run, command=("true",), nodes=Range(1, 1))
    status = JobStatus(reason.split(":")[0].split()[0])
    outcome = Outcome(status=status, reason=reason, exit_code=3)
    put(account, f"../ends/{run}/{job}.json", record_json(job, spec, outcome), hours_ago=hours_ago)


def test_checkpoints_are_listed_of_the_runs_that_are_shown_only(account: Account, cli: Cli) -> None:
    put(account, "done/config.json", {"recipe": "ddp"}, hours_ago=30)
    checkpoint(account, "done", 470, hours_ago=29)
    checkpoint(account, "goes-on", 400, hours_ago=2)
    put(account, "mine/output/node-0/output/a.pt", "z" * 2000, hours_ago=50)
    ended(account, "mine", "mine-aaaaa", "failed: user code exit 3", hours_ago=50)
    put(account, "refused/leases/00000001.json", {})  # of which there are only leases
    (found,) = cli.json("runs --limit 1")
    assert (found["name"], found["step"]) == ("goes-on", 400)
    listed = account.sent("list_objects_v2")
    whole = {each["Prefix"] for each in listed if "Delimiter" not in each}
    # A program of the user's own writes nothing into the run's folder itself.
    assert whole == {"runs/goes-on/", "ends/goes-on/", "runs/mine/", "runs/refused/"}
    assert [each["is_complete"] for each in cli.json("checkpoints goes-on")] == [True]
    assert cli.json("runs")[-1]["reason"] == "failed: user code exit 3"


def test_the_keepers_record_of_a_run_of_this_name_counts(account: Account, cli: Cli) -> None:
    ended(account, "r1", "r1-removed", "stopped by user", hours_ago=9)
    put(account, "r1/jobs/r1-a.json", {"status": "failed"}, hours_ago=3)  # any job can write there
    states = [cli.json("runs")[0]["state"]]
    ended(account, "r1", "r1-b", "succeeded", hours_ago=2)
    put(account, "../ends/r1/r1-b.reported", {}, hours_ago=1)
    states += [cli.json("runs")[0]["state"]]
    assert states == ["", "succeeded"]
