"""Blocks are compiled for the shapes of training, by a backend that only looks at the graphs."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import rank_groups
from contract.nodes import Range
from tests.conftest import ROOT
from tests.training.local_runs import trained
from training.command import read_command
from training.fsdp import inputs
from training.fsdp.settings import FsdpConfig
from training.system import devices


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_samples_and_uneven_evaluation_leave_the_shapes_of_training_static(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs: list[tuple[bool, str]] = []  # trained through, and the shapes of the inputs

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        inputs = [each.meta["example_value"] for each in graph.graph.find_nodes(op="placeholder")]
        shapes = [
            [*each.shape] if isinstance(each, torch.Tensor) else each
            for each in inputs
            if not isinstance(each, nn.Parameter)
        ]
        graphs.append((torch.is_grad_enabled(), str(shapes)))
        return graph.forward

    counted = functools.partialmethod(nn.Module.compile, backend=backend)
    monkeypatch.setattr(nn.Module, "compile", counted)
    monkeypatch.setattr(devices, "check_compiler", lambda _option: None)
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**rank, "MASTER_PORT": str(rank_groups.free_port())}.items():
        monkeypatch.setenv(name, value)
    words = ["fsdp", "--preset", "tiny", "--data", str(ROOT / "LICENSE"), "--held-out-every", "5"]
    words += ["--max-steps", "2", "--evaluate-every", "1", "--sample-tokens", "3", "--compile"]
    # Passes of four sequences, also while evaluating, and the last two sequences by themselves.
    words += ["--global-batch", "8", "--microbatch", "5", "--eval-sequences", "6"]
    config = read_command(words, run="run", workers=Range(1, 1), storage=str(tmp_path))
    assert isinstance(config, FsdpConfig)
    trained(inputs.prepare(config))
    # One graph serves all blocks. A dynamic dimension is a symbol: s33.
    assert [trains for trains, _ in graphs] == [False, True]
    assert [shapes for _, shapes in graphs if "s" in shapes] == []
    assert all(shapes.startswith("[[4, 128, 128]") for _, shapes in graphs)
