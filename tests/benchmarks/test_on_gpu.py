"""The steps for a machine with GPUs are commands that this code has, and end in time."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu, on_gpu
from training import command as commands


@pytest.mark.parametrize("step", on_gpu.STEPS, ids=lambda step: step.name)
def test_each_step_is_a_command_of_this_code(step: on_gpu.BenchmarkStep, tmp_path: Path) -> None:
    words = on_gpu.command(step, gpus=2, runs=tmp_path, data="d")
    assert words[0] == sys.executable
    assert ("--storage" in words) == any(word.startswith("training.") for word in words)
    if "training.launch" in words:
        recipe = words[words.index("training.launch") + 1 :]
        parsed = commands.parse(recipe[1:] if recipe[0] == "--" else recipe)
        assert parsed.storage == str(tmp_path)
        assert parsed.json
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
        assert words[2] != "benchmarks.gpu" or words[3] in gpu.CASES
    else:
        compile(words[2], step.name, "exec")
    assert not any("{" in word for word in words)


def test_a_step_that_hangs_is_ended_with_what_it_started_and_the_reason_is_kept(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    script = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    outcome = on_gpu.run([sys.executable, "-c", script], tmp_path / "log", limit_s=2)
    assert outcome.exit_code is None
    assert time.monotonic() - began < 30
    assert "begun" in (tmp_path / "log").read_text()
