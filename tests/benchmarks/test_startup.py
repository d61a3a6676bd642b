"""The start-up benchmark compares two checkouts, and notices a difference in the last bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import startup
from tests.conftest import ROOT


def a_run(folder: Path, *, weight: float = 0.0, loss: float = 0.5, seconds: float = 1.0) -> Path:
    """A small run's folder, as the ddp recipe writes it."""
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    save_file({"fc.weight": torch.tensor([1.0, weight])}, checkpoint / "model.safetensors")
    events = [
        {"type": "step", "step": 1, "epoch": 0, "loss": loss, "lr": 0.1, "time": seconds},
        {"type": "evaluation", "step": 1, "epoch": 1, "loss": loss, "measures": []},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"seconds": 2.0}, []),
        ({"loss": 0.5000000000000001}, ["event 0", "event 1"]),
        ({"weight": -0.0}, ["checkpoints/step-00000001/model.safetensors"]),
    ],
)
def test_runs_differ_in_the_last_bit_and_not_in_their_clocks(
    tmp_path: Path, change: dict[str, float], differences: list[str]
) -> None:
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", **change)
    assert startup.different(startup.computed(one), startup.computed(other)) == differences


def test_runs_without_results_are_not_equal(tmp_path: Path) -> None:
    assert startup.different(startup.computed(tmp_path), startup.computed(tmp_path)) == ["nothing"]


@pytest.mark.slow
@pytest.mark.night
def test_a_checkout_starts_and_computes_as_itself() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.startup", "--json"),
            *("--recipes", "ddp", "--runs", "1", "--baseline", str(ROOT)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["ddp"]
    assert found["equal"]
    assert found["ratio"] == found["seconds"]["baseline"] / found["seconds"]["now"]
    assert all(0.5 < seconds < 300 for seconds in found["seconds"].values())
