"""The start-up benchmark compares two checkouts, and notices a difference in the last bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import equality
from tests.conftest import ROOT


def a_run(folder: Path, *, weight: float = 0.0, loss: float = 0.5, seconds: float = 1.0) -> Path:
    """A small run's folder, as the ddp recipe writes it."""
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    save_file({"fc.weight": torch.tensor([1.0, weight])}, checkpoint / "model.safetensors")
    state = {
        "optimizer": {"fc.weight": {"step": torch.tensor(1.0)}},
        "position": {"step": 1, "seconds": seconds},
        "config": {"lr": 0.1, "storage": str(folder.parent)},
    }
    torch.save(state, checkpoint / "state.pt")
    (checkpoint / "manifest.json").write_text(json.dumps({"of": seconds}))
    events = [
        {"type": "step", "step": 1, "loss": loss, "time": seconds},
        {"type": "evaluation", "step": 1, "loss": loss, "seconds": seconds},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_runs_that_differ_only_in_their_clocks_and_places_are_equal(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one" / "run")
    other = a_run(tmp_path / "other" / "run", seconds=2.0)
    found = equality.compare(one, other)
    assert found.differences == ()
    assert found.equal
    assert (found.steps, found.evaluations, found.tensors) == (1, 1, 2)
    assert found.files_with_equal_bytes == ("checkpoints/step-00000001/model.safetensors",)
    assert found.files == 3


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"loss": 0.5000000000000001}, "event 0 differs"),
        ({"weight": -0.0}, "model.safetensors: fc.weight differs"),
    ],
)
def test_a_difference_in_the_last_bit_is_found(
    tmp_path: Path, change: dict[str, float], difference: str
) -> None:
    found = equality.compare(a_run(tmp_path / "one"), a_run(tmp_path / "other", **change))
    assert not found.equal
    assert any(difference in each for each in found.differences), found.differences


def test_a_missing_checkpoint_is_a_difference(tmp_path: Path) -> None:
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    shutil.rmtree(other / "checkpoints")
    assert not equality.compare(one, other).equal
    assert not equality.compare(other, other).equal  # nothing was compared


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
