"""The benchmarks of the sharded recipe run, at a small size, and say what they claim to say."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.night]


def printed(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "KINETO_LOG_LEVEL": "99"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_script_for_gpus_runs_on_a_cpu_and_trains_what_the_trainer_of_transformers_does() -> (
    None
):
    found = printed("benchmarks.gpu_fsdp", "--steps", "5", "--rounds", "1")
    assert found["device"].startswith("CPU")
    [case] = found["cases"]
    ways = case["recipe"], case["plain"], case["trainer"]
    speeds = [each["tokens_per_s"] for each in ways]
    assert found["ratio"] == min(speeds[0] / each for each in speeds[1:])
    assert all(each["mfu"] is None and not each["failure"] for each in ways)
    assert ways[0]["losses"][-1] < ways[0]["losses"][0]
    assert case["largest_difference_of_losses"] < 1e-4


def test_a_checkpoint_is_timed_in_all_ways() -> None:
    found = printed("benchmarks.checkpoint", "--mb", "60", "--rounds", "1")
    assert found["state_bytes"] > 50e6
    own, *others = (each["waited"] for each in found["seconds"].values())
    assert len(others) == 3
    assert found["ratio"] == min(others) / own
