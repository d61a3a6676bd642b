"""Memory that it takes to load a model whose every process keeps only a part of it.

    python -m benchmarks.loading [--shape 400m] [--workers 2] [--json]

A model with random weights is written as a Hugging Face folder. Then each process builds it on the
meta device, shards it and fills its part, while a thread watches the process's own memory. Beside
it stands the plain way, ``from_pretrained`` in each process, measured the same way.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import processes
from benchmarks.output import command_line, report, say
from training.models import language_models, model_weights, pretrained
from training.models.language_models import WithLoss
from training.models.model_shapes import SHAPES
from training.recipes.fsdp.loop import make_mesh
from training.runtime.torchrun import TorchrunWorker

_SAMPLE_S: Final = 0.002


class Watch:
    """Most anonymous memory of this process while it is open, above what it had before, in bytes.

    Pages of the mapped files are not counted: the kernel takes them back when it wants.
    """

    def __enter__(self) -> "Watch":
        self.peak = self._before = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, self._now()) - self._before

    def _run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("this kernel does not tell a process's memory: use Linux")


def load_sharded(folder: str) -> dict[str, float]:
    worker = TorchrunWorker(run_uri="")
    model = language_models.build_on_meta(pretrained.model_config(folder, runs=""))
    mesh = make_mesh(worker.device, world_size=worker.world_size, replicas=1)
    began = time.perf_counter()
    with Watch() as watch:
        language_models.shard(WithLoss(model), mesh, bf16=False)
        model_weights.allocate(model, worker.device)
        model_weights.load(model, Path(folder))
    shard = sum(language_models.local(each).nbytes for each in model.parameters())
    largest = max(each.numel() * each.element_size() for each in model.parameters())
    return {
        "peak_bytes": watch.peak,
        "shard_bytes": shard,
        "largest_tensor_bytes": largest,
        "of_bound": watch.peak / (shard + largest),
        "seconds": time.perf_counter() - began,
    }


def load_whole(folder: str) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    with Watch() as watch:
        model = load(folder, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # as training does when it changes them
    return {"peak_bytes": watch.peak}


def main() -> int:
    parser = command_line("loading", __doc__)
    parser.add_argument("--shape", choices=[*SHAPES], default="400m")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        say("writing a model with random weights")
        config = pretrained.model_config(f"new:{options.shape}", runs="")
        model: Any = language_models.build_on_meta(config)
        model_weights.allocate(model, torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        num_parameters = language_models.num_parameters(model)
        model.save_pretrained(folder, max_shard_size="500MB")
        del model
        say(f"loading {num_parameters:,} parameters on {options.workers} processes")
        sharded = processes.run(options.workers, load_sharded, folder)
        say("loading all of it in each")
        whole = processes.run(options.workers, load_whole, folder)
    worst = max(sharded, key=lambda each: each["peak_bytes"])
    result = {
        "benchmark": "loading",
        "ratio": max(each["peak_bytes"] for each in whole) / worst["peak_bytes"],
        "parameters": num_parameters,
        "workers": options.workers,
        "sharded": worst,
        "whole": {"peak_bytes": max(each["peak_bytes"] for each in whole)},
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
