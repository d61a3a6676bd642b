"""``from trainctl import submit, Job``: the same orders and the same errors as the command line."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InputError
from contract.job import JobStatus
from tests.aws.calls import refused
from tests.conftest import ROOT
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from tests.trainctl.saved import save
from trainctl import CliError, Job, UsageError, plan, submit


def end(account: Account, job: str, **outcome: Any) -> None:
    """An execution ends, as the function that cleans up ends it."""
    values = {"status": "succeeded", "reason": "succeeded", "exit_code": 0} | outcome
    account.executions[job] |= {
        "status": "SUCCEEDED",
        "stopDate": account.now,
        "output": json.dumps(values),
    }


def test_python_and_the_command_line_send_the_same_order(
    account: Account, code: Path, cli: Cli
) -> None:
    words = ["python", "mine.py", "--lr", "0.1"]
    job = submit(
        *words,
        run="r7",
        nodes="1:3",
        on="head",
        max_hours=2,
        wait_minutes=5,
        hang_minutes=30,
        keep_files=["*.pt", "out"],
        skip_files="data",
        not_secret=["--lr"],
        spot=False,
        env={"COLOR": "a=b"},
        secret={"KEY": "training/key"},
        code=code,
    )
    given = ["submit", "--run", "r7", "--nodes", "1:3", "--max-hours", "2", "--wait-minutes", "5"]
    given += ["--hang-minutes", "30", "--keep-files", "*.pt", "--keep-files", "out"]
    given += ["--skip-files", "data"]
    given += [
        "--on",
        "head",
        "--on-demand",
        "--env",
        "COLOR=a=b",
        "--secret",
        "KEY=training/key",
        "--yes",
    ]
    end(account, job.id)
    cli(*given, "--code", str(code), "--", *words)
    first, second = (json.loads(each.to_json()) for each in account.orders)
    assert first.pop("code") != second.pop("code"), "each job has an archive of its own"
    assert first == second
    assert (first["variables"], first["hang_s"]) == ({"COLOR": "a=b"}, 1800)
    assert (first["keep_files"], first["skip_files"]) == (["*.pt", "out"], ["data"])
    assert (job.run, job.spec) == ("r7", account.orders[0])


def test_numbers_and_paths_are_words_too(account: Account) -> None:
    submit("ddp", "--epochs", 3, "--lr", 0.1, env={"DEPTH": 2, "PLACE": Path("a/b")}, profile=None)
    (order,) = account.orders
    assert order.command[-4:] == ("--epochs", "3", "--lr", "0.1")
    assert order.variables == {"DEPTH": "2", "PLACE": "a/b"}


def test_nothing_is_printed(account: Account, capsys: pytest.CaptureFixture[str]) -> None:
    job = submit("ddp")
    end(account, job.id)
    job.wait()
    job.stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("dpd", {}),
        ("ddp", {"nodes": 9}),
        ("ddp", {"nodes": None}),
        ("ddp", {"env": ["A=1"]}),
    ],
)
def test_a_wrong_value_is_a_usage_error(
    account: Account, recipe: str, options: dict[str, Any]
) -> None:
    for call in (submit, plan):
        with pytest.raises(UsageError) as caught:
            call(recipe, **options)
        assert not isinstance(caught.value, InputError), "one kind of error to catch"
    assert account.changes == []


def test_what_aws_refuses_is_explained(account: Account) -> None:
    account.fails["start_execution"] = refused("AccessDeniedException")
    with pytest.raises(CliError):
        submit("ddp")


def test_a_job_is_found_by_its_run_waited_for_and_asked_how_it_ended(account: Account) -> None:
    account.add("j1", run="r1")
    job = Job.find("r1")
    assert (job.id, job.run, job.status, job.is_over) == ("j1", "r1", JobStatus.RUNNING, False)
    assert "j1" in repr(job)
    assert job.result() is None
    with pytest.raises(TimeoutError, match="j1"):
        job.wait(timeout_s=0)
    end(account, "j1", status="failed", reason="failed: user code exit 3", exit_code=3)
    outcome = job.wait()
    assert (outcome.status, outcome.exit_code) == (JobStatus.FAILED, 3)
    assert (job.outcome, job.is_over) == (outcome, True)
    asked = len(account.calls)
    assert job.status == JobStatus.FAILED
    assert len(account.calls) == asked, "what has ended does not change"
    with pytest.raises(UsageError, match="r9"):
        Job.find("r9")


def test_a_job_is_stopped(account: Account) -> None:
    account.add("j1", run="r1")
    account.add_head("j1", "t1")
    outcome = Job.find("j1").stop()
    assert (outcome.status, outcome.reason) == (JobStatus.STOPPED, "stopped by user")
    assert account.sent("stop_task")


def test_what_the_program_wrote_is_fetched(
    account: Account,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    account.add("j1", run="r1")
    save(account, 0, {"work/last.pt": b"weights"})
    save(account, 1, {"output/log.txt": b"one"})
    job = Job.find("r1")
    found = job.download(tmp_path / "all")
    assert {path: path.read_bytes() for path in found} == {
        tmp_path / "all/node-0/work/last.pt": b"weights",
        tmp_path / "all/node-1/output/log.txt": b"one",
    }
    assert job.download(str(tmp_path / "some"), pattern="*.pt") == [
        tmp_path / "some/node-0/work/last.pt"
    ]
    assert job.download(tmp_path / "one", node=1) == [tmp_path / "one/node-1/output/log.txt"]
    monkeypatch.chdir(tmp_path)
    assert job.download(node=1) == [Path("r1/node-1/output/log.txt")]
    assert capsys.readouterr() == ("", "")


# --- the example ----------------------------------------------------------------------------------
def test_the_sweep_prints_its_trials_the_best_first(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    start = account.on_start_execution

    def start_and_end(*, name: str, input: str, **named: Any) -> Any:
        answer = start(name=name, input=input, **named)
        rows = [
            {"run": f"rates-{lr}", "lr": lr, "accuracy": float(lr)} for lr in ("0.0005", "0.001")
        ]
        table = {"metric": "accuracy", "higher_is_better": True, "trials": rows}
        account.objects["runs/rates/trials.json"] = json.dumps(table).encode()
        end(account, name)
        return answer

    account.__dict__["on_start_execution"] = start_and_end
    runpy.run_path(str(ROOT / "examples" / "sweep.py"))
    (order,) = account.orders
    assert order.command[:3] == ("python", "-m", "training.tune")
    assert order.command[-3:] == ("ddp", "--preset", "digits")
    assert (order.recipe, str(order.nodes)) == ("", "2")
    best, other = capsys.readouterr().out.splitlines()
    assert "'lr': '0.001'" in best
    assert "'lr': '0.0005'" in other
