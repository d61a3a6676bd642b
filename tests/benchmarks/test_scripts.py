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


@pytest.mark.parametrize("case", ["12m", "12m-lora", "small-ddp"])
def test_the_recipes_and_their_peers_on_a_gpu_train_alike_on_a_cpu(case: str) -> None:
    found = printed("benchmarks.gpu", case)
    (own,), (peer,) = (found["rounds"][name] for name in ("recipe", "plain"))
    assert found["ratio"] == own["per_s"] / peer["per_s"] > 0
    if case == "12m":  # the others begin with weights of their own
        assert own["losses"] == pytest.approx(peer["losses"], rel=1e-4)
    for each in (own, peer):
        assert each["losses"][-1] < each["losses"][0]


def test_pictures_that_were_packed_raw_cost_less_than_the_plain_way() -> None:
    small = ("--pictures", "40", "--batch", "8", "--processes", "1")
    found = printed("benchmarks.images", *small, "--seconds", "1", "--rounds", "1")
    per_s, per_cpu_s = found["pictures_per_s"], found["pictures_per_cpu_s"]
    assert found["ratio"] == per_s["tree"] / per_s["plain"]
    # CPU seconds, whatever else the machine does; the others are nearer to each other.
    assert per_cpu_s["plain"] < per_cpu_s["packed_raw"]


def test_a_checkpoint_is_timed_in_all_ways() -> None:
    found = printed("benchmarks.checkpoint", "--mb", "60", "--rounds", "1")
    assert found["state_bytes"] > 50e6
    own, *others = (each["waited"] for each in found["seconds"].values())
    assert len(others) == 3
    assert found["ratio"] == min(others) / own
