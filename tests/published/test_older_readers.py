"""Configurations in another reader than the one that writes them: transformers 4.57 computes the
same with what a checkpoint and an export have.

Its package is installed beside torch into a folder, which takes a minute and the package index.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.published import models
from training.models import pretrained

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
    "openai-community/gpt2",
)
READ = """
import pathlib, sys, torch, transformers
assert transformers.__version__.startswith("4.57")
for folder in map(pathlib.Path, sys.argv[1:]):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, expected = torch.load(folder / "logits.pt")
    with torch.no_grad():
        found = model(input_ids=tokens, use_cache=False).logits
    print(((found - expected).square().mean().sqrt() / expected.std()).item())
"""


@pytest.mark.night
@pytest.mark.slow
def test_transformers_4_computes_the_same_with_what_is_written_here(tmp_path: Path) -> None:
    older, folders = tmp_path / "older", [tmp_path / str(number) for number in range(len(NAMES))]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(older), *PACKAGES]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed here: {done.stderr[-200:]}")
    tokens = torch.randint(3, models.VOCAB, (2, 24))
    for name, folder in zip(NAMES, folders, strict=True):
        model = models.publish(name, folder).eval()
        with torch.no_grad():
            torch.save((tokens, model(input_ids=tokens).logits), folder / "logits.pt")
        config = pretrained.model_config(str(folder), runs="")
        (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    read = subprocess.run(
        [sys.executable, "-c", READ, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(older)},
        capture_output=True,
        text=True,
        check=True,
    )
    apart = dict(zip(NAMES, map(float, read.stdout.split()), strict=True))
    assert max(apart.values()) < 1e-5, apart
