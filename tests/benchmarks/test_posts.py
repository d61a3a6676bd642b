"""The table of the posts' figures shows what the files hold, and each part of it is a command of
this code."""

import importlib.util
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import on_gpu, posts
from tests.conftest import ROOT
from tests.eventually import eventually
from training.recipes import command as commands

FASHION = {"images_per_s": 6000.0, "world_size": 2, "total_seconds": 100.0}
PICTURES = {"runs": [{"model": "resnet50", "images_per_s": 3000.0}]}


def test_the_page_has_the_table_that_the_program_prints() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    _, _, rest = page.partition("test_posts.py -->\n")
    assert rest.partition("<!-- end of posts -->")[0] == posts.table()


@pytest.mark.parametrize("part", posts.PARTS, ids=lambda part: part.name)
def test_each_part_is_a_command_of_this_code(part: posts.Part) -> None:
    module, *words = shlex.split(part.words)
    assert importlib.util.find_spec(module) is not None
    assert "--json" in words
    if module == "training.launch":
        assert commands.parse(words).recipe.name == words[0]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-smi; returns a file that is there once it has printed samples."""
    script, printed = tmp_path / "bin" / "nvidia-smi", tmp_path / "printed"
    script.parent.mkdir()
    samples = f"printf '0\\n0\\n97\\n99\\n'; touch {printed}; exec sleep 60"
    script.write_text(f"#!/bin/sh\ncase $1 in *=name) echo 'NVIDIA H100';; *) {samples};; esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return printed


def test_what_is_measured_is_written_part_by_part_and_not_measured_again(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_run: list[str] = []
    broken = {"b7"}

    def run(words: Sequence[str], into: Path, *, limit_s: int) -> on_gpu.Outcome:
        assert limit_s == 480
        eventually("samples of the GPU's use", smi.exists)
        smi.unlink()
        commands_run.append(" ".join(words[2:]))
        case = {"tokens_per_s": 9000.0, "peak_memory_bytes": 100 * 2**30, "failure": ""}
        found = {
            "training.launch": {**FASHION, "accuracy": 0.92, "loss": 0.2},
            "benchmarks.gpu_fsdp": {"cases": [{"recipe": case}]},
            "benchmarks.imagenet_gpu": PICTURES,
        }[words[2]]
        into.write_text(f"$ words\nprogress\n{json.dumps(found, indent=1)}\na warning\n")
        failed = "efficientnet-b7" in words and "b7" in broken
        return on_gpu.Outcome(exit_code=1 if failed else 0, seconds=1.0)

    monkeypatch.setattr(on_gpu, "run", run)
    monkeypatch.setattr(posts, "FIGURES", tmp_path)
    assert not posts.fill("1 x NVIDIA H100", only=None, data="d")
    assert len(commands_run) == 4
    assert "--data d " in commands_run[0]
    file = json.loads((tmp_path / "1-x-nvidia-h100.json").read_text())
    values = {key: each["value"] for key, each in file["figures"].items()}
    assert values == {
        "fashion_epoch_s": 10.0,
        "fashion_images_per_s": 3000.0,
        "fashion_total_s": 100.0,
        "fashion_accuracy": 0.92,
        "fashion_loss": 0.2,
        "dolly_tokens_per_s": 9000.0,
        "dolly_gib": 100.0,
        "dolly_gpu_use": 98.0,
        "resnet50_images_per_s": 3000.0,
    }
    assert {*values} <= {*posts.ROWS}
    assert all(each["how"] == "measured" for each in file["figures"].values())
    assert "| ImageNet: accuracy | not published | none |" in posts.table(tmp_path)
    broken.clear()
    assert posts.fill("1 x NVIDIA H100", only=None, data="d")
    assert len(commands_run) == 5  # only what had failed
