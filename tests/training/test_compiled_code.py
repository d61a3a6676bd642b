"""What a run has compiled is not compiled again: by its next start, or by the next run."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests import forks
from tests.conftest import ROOT
from tests.training.local_runs import trained
from tests.training.test_compiled_blocks import TEXT, config_of
from training.bookkeeping import Score
from training.fsdp import train as fsdp
from training.fsdp.held_out import HeldOut
from training.loop import compiled
from training.record.events import Warned

#: A start of a run: it compiles a function, unless an earlier start has left it.
START = """
import sys
from types import SimpleNamespace
import torch
from torch._dynamo.utils import counters
from training.loop.compiled import CompiledCode

worker = SimpleNamespace(run_uri=sys.argv[1], rank=0, device=torch.device("cpu"))
code = CompiledCode(worker, {"recipe": "ddp", "compile": True})
wave = torch.compile(lambda x: (x.sin() + x.cos()).sum())
wave(torch.ones(64, requires_grad=True)).backward()
code.keep()
code.keep()  # nothing new: nothing is written
import threading
for each in threading.enumerate():
    if each.daemon and each is not threading.current_thread() and "_write" in each.name:
        each.join()
found = counters["inductor"]
print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


def hits_and_misses(run: Path, host: Path) -> list[int]:
    """Of a start of the run on a host with these caches."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(host), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", START, str(run)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=300,
    )
    return [int(each) for each in done.stdout.split()]


def test_what_cannot_be_compiled_is_counted_and_said(tmp_path: Path) -> None:
    # Torch counts what its process compiles, that of other tests too.
    forks.run(1, compile_nothing, f"{tmp_path}")


def compile_nothing(uri: str) -> None:
    said: list[Warned] = []
    worker: Any = SimpleNamespace(run_uri=uri, rank=0, device=torch.device("cpu"), emit=said.append)

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel")

    with torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert compiled.uncompiled() == ""
        torch.compile(lambda x: x + 2, backend=broken)(torch.ones(2))
        code = compiled.CompiledCode(worker, {"recipe": "ddp", "compile": True})
        code.keep()
        assert said == [], "compiled before"
        torch.compile(lambda x: x + 3, backend=broken)(torch.ones(2))
        code.keep()
        code.keep()
    (warning,) = said
    assert "could not compile 2 of 3 parts" in warning.message


def test_what_was_compiled_is_loaded_before_the_first_evaluation_which_compiles_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load, books = Mock(), Mock(side_effect=EOFError)

    def evaluate(*_: object) -> Score:
        load.assert_called_once()
        return Score(loss=1.0, measures={})

    monkeypatch.setattr(fsdp, "CompiledCode", load)
    monkeypatch.setattr(fsdp, "Bookkeeping", books)
    monkeypatch.setattr(HeldOut, "evaluate", evaluate)
    with pytest.raises(EOFError):
        trained(config_of(f"{TEXT} --sample-tokens 0", tmp_path, monkeypatch))
    dist.destroy_process_group()
    assert books.call_args.kwargs["compiled"] is load.return_value


@pytest.mark.slow
@pytest.mark.long
def test_the_next_start_on_another_host_loads_what_was_compiled(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    first = hits_and_misses(run, tmp_path / "one")
    assert first[1] > 0, "it had to compile"
    assert (run / "compiled.bin").stat().st_size
    (shared,) = tmp_path.glob("*-compiled.bin")
    shared.unlink()
    assert hits_and_misses(run, tmp_path / "two") == [first[1], 0]
    # Runs of a kind share it; what is damaged is passed over.
    other = tmp_path / "other"
    other.mkdir()
    (other / "compiled.bin").write_bytes(b"damaged")
    assert hits_and_misses(other, tmp_path / "three") == [first[1], 0]
