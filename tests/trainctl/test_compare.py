"""``trainctl compare``: runs of the bucket, or of this machine, side by side."""

import json
import sys
from pathlib import Path

import pytest

from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli

HOSTILE = "<script>alert(1)</script>"


def files(*, lr: float, accuracy: float, label: str = "") -> dict[str, bytes]:
    """The record of a run of two steps, by file."""
    lines = [
        {"type": "measure", "name": "accuracy", "form": "percent", "label": label},
        {"type": "step", "step": 1, "loss": 2.0},
        {"type": "step", "step": 2, "loss": 1.5},
        {"type": "evaluation", "step": 2, "epoch": 1, "loss": 1.4}
        | {"measures": ["accuracy"], "accuracy": accuracy, "images_per_s": 100},
    ]
    config = {"recipe": "ddp", "run": f"lr-{lr}", "storage": "s3://b/runs", "lr": lr, "seed": 0}
    result = {"recipe": "ddp", "status": "succeeded", "steps": 2, "world_size": 2, "usd": 1.25}
    result |= {"parameters": 10, "loss": 1.4, "measures": ["accuracy"], "accuracy": accuracy}
    return {
        "config.json": json.dumps(config).encode(),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines).encode(),
        "result.json": json.dumps(result).encode(),
    }


@pytest.fixture
def two_runs(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Run ``slow`` in the bucket, and ``runs/fast`` on this machine."""
    monkeypatch.chdir(tmp_path)
    for name, content in files(lr=0.1, accuracy=0.9).items():
        account.objects[f"runs/slow/{name}"] = content
    for name, content in files(lr=0.3, accuracy=0.8, label=HOSTILE).items():
        Path("runs/fast").mkdir(parents=True, exist_ok=True)
        Path("runs/fast", name).write_bytes(content)
    return account


@pytest.mark.usefixtures("two_runs")
def test_results_cost_and_settings_that_differ_are_shown_with_the_curves_in_a_page(
    cli: Cli,
) -> None:
    shown = cli("compare", "slow", "runs/fast", "-o", "page.html")
    rows = {line.split()[0]: line.split()[-1] for line in shown.out.splitlines()}
    assert (rows["accuracy"], rows["lr"]) == ("80.00%", "0.3")
    assert "about $1.25" in shown.out
    assert not {"run", "storage", "seed"} & rows.keys()
    assert "with curves: page.html" in shown.err
    page = Path("page.html").read_text()
    assert page.count("<svg") == 4
    assert ">runs/fast</text>" in page
    assert "<td>0.3</td>" in page
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page


@pytest.mark.usefixtures("two_runs")
def test_json_has_the_settings_and_results_and_no_page_is_written(
    cli: Cli,
) -> None:
    found = cli.json("compare", "slow", "runs/fast")
    assert found["differing"] == ["lr"]
    assert found["settings"]["slow"]["lr"] == 0.1
    assert found["results"]["runs/fast"]["accuracy"] == 0.8
    assert not Path("comparison.html").exists()


@pytest.mark.usefixtures("two_runs")
def test_the_table_is_shown_also_where_nothing_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Path("runs/fast/result.json").unlink()
    shown = cli("compare", "slow", "runs/fast")
    assert "not ended" in shown.out
    assert "no page with curves: it needs matplotlib, which make venv installs" in shown.err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["slow"], "give the names of two to 5 runs, each once"),
        (["slow", "slow"], "give the names of two to 5 runs, each once"),
        (["slow", "mine"], "mine is not the run of a recipe: it has no config.json"),
        (["slow", "runs/nowhere"], "runs/nowhere is not the run of a recipe"),
    ],
)
@pytest.mark.usefixtures("two_runs")
def test_what_cannot_be_compared_is_refused(names: list[str], message: str, cli: Cli) -> None:
    assert message in cli.refuses("compare", *names)
