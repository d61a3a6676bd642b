"""Exports in another reader than the one that wrote them: transformers 4.57 computes the same.

Its package is installed beside torch into a folder, which takes a minute and the package index.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import rank_groups
from tests.published import models, trained

pytestmark = [pytest.mark.night, pytest.mark.slow]

#: The last series of 4, and what it wants in older versions than are here.
PACKAGES = ("transformers==4.57.3", "tokenizers<0.23", "huggingface-hub<1")
#: One of each kind of rope and of names that version 5 has changed.
NAMES = (
    "EleutherAI/gpt-neox-20b",
    "Qwen/Qwen2.5-3B",
    "Qwen/Qwen3-30B-A3B",
    "allenai/Olmo-3.1-32B-Instruct",
    "google/gemma-3-1b-it",
    "gpt-oss-120b in bf16",
    "meta-llama/Llama-3.1-8B",
    "microsoft/phi-1",
    "microsoft/phi-4",
)
READ = """
import pathlib, sys, torch, transformers
assert transformers.__version__.startswith("4.57")
for folder in map(pathlib.Path, sys.argv[1:]):
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder / "exported", dtype=torch.float32).eval()
    tokens, expected = torch.load(folder / "logits.pt")
    with torch.no_grad():
        found = model(input_ids=tokens, use_cache=False).logits
    print(((found - expected).square().mean().sqrt() / expected.std()).item())
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with transformers 4.57."""
    folder = tmp_path_factory.mktemp("older")
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    command = [*pip, "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed here: {done.stderr[-200:]}")
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_an_export_computes_the_same_in_transformers_4(
    older: dict[str, str], tmp_path: Path
) -> None:
    folders = [tmp_path / str(number) for number, _ in enumerate(NAMES)]
    rank_groups.run(1, _export, tuple(zip(NAMES, folders, strict=True)))
    command = [sys.executable, "-c", READ, *map(str, folders)]
    told = subprocess.run(
        command, env=older, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    apart = dict(zip(NAMES, map(float, told.stdout.split()), strict=True))
    assert max(apart.values()) < 1e-5, apart


def _export(pairs: tuple[tuple[str, Path], ...]) -> None:
    torch.distributed.init_process_group("gloo")
    for name, folder in pairs:
        place = trained.exported(name, folder)
        model = models.from_pretrained(place).eval()
        tokens = torch.randint(3, models.VOCAB, (2, 24))
        with torch.no_grad():
            torch.save((tokens, model(input_ids=tokens).logits), folder / "logits.pt")
