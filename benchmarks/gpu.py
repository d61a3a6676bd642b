"""Benchmark of the recipes on one GPU beside loops of someone who knows torch: tokens or pictures a
second, use of the GPU, memory, losses, and the time to the first steps.

    python -m benchmarks.gpu CASE [--alone] [--rounds N]

The recipe runs as a user would start it, until the last timed step. Its peer:

* text: a plain loop on the same weights and sequences, in their order: fused AdamW, bf16, blocks
  and loss compiled, nothing read from the device;
* adapters (``-lora``): peft's, with Liger's kernels;
* ``ddp``: a whole step, of 28 x 28 pictures, as one CUDA graph;
* ``resnet50``: a compiled loop, which reads the same JPEGs by the GPU's own decoder (torchvision).

Text is Python's help, as bytes: no data is needed but FashionMNIST. Each loop has a process by
itself. The small cases run on a CPU, by one thread, without a graph or a compiler, where CPU
seconds count: they show that the loops train alike.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import rank_groups
from benchmarks.images import write_pictures
from benchmarks.tables import report, say
from contract.instance_types import INSTANCE_TYPES
from contract.nodes import Range
from contract.runs import RunPaths
from training import plan, recipes
from training.command import read_command
from training.data import PYTHON_HELP, augmentation, small_images
from training.data.feed import feed_of
from training.fsdp import inputs
from training.loop import metrics
from training.loop.optimizers import decay_groups
from training.models import estimates, language_models, model_weights, picture_models, pretrained
from training.models.model_shapes import SHAPES
from training.models.resnet import ResNet18
from training.record.events import Event, Step
from training.runtime.torchrun import TorchrunWorker
from training.system.copies import to_device

#: Steps before the clock starts, for compiled kernels, graphs and buffers: to the first report.
_WARM_UP: Final = 10
#: Files of each JPEG.
_LINKS: Final = 16
_ON_GPU: Final = torch.cuda.is_available()
_DEVICE: Final = torch.device("cuda" if _ON_GPU else "cpu")
_TEXT: Final = (
    f"fsdp --data {PYTHON_HELP} --tokenizer {pretrained.BYTES} --model {pretrained.NEW}{{folder}} "
    "--lr 2e-4 --schedule constant --sample-tokens 0 --max-steps 999 --eval-sequences 4 "
    "--evaluate-every 999 --checkpoint-every 999 --seq-len"
)
#: So many epochs that the recipe compiles.
_JPEGS: Final = (
    "imagenet --preset resnet50 --first-size 0 --epochs 9000 --data {folder}/pictures "
    "--batch-per-worker"
)


def _llama(hidden: int, layers: int, heads: int, kv: int, wide: int, vocab: int) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": wide,
        "vocab_size": vocab,
    }


class Case(NamedTuple):
    """A recipe's command."""

    words: str
    items: int
    """Pictures or tokens of a step."""
    steps: int = 20
    """Timed steps."""
    shape: Any = None
    """A language model's ``config.json``."""


_SMALL: Final = _llama(256, 4, 8, 4, 688, 16_384)
#: 1.3b has the shape of Llama-3.2-1B with embeddings that are not tied, 8b-lora that of Llama 3 8B;
#: 6.9b is the second post's model with the settings of preset dolly, for a GPU of 110 GiB or more.
CASES: Final = {
    # All steps of a case are of one epoch.
    "ddp": Case("ddp --preset tuned --compile --data {data} --batch-per-worker 128", 128, 400),
    "resnet50": Case(f"{_JPEGS} 256", 256, 40),
    "0.4b": Case(
        f"{_TEXT} 2048 --microbatch 4 --global-batch 8",
        8 * 2048,
        shape={**SHAPES["400m"], "vocab_size": 50_432},
    ),
    "1.3b": Case(
        f"{_TEXT} 2048 --microbatch 4 --global-batch 8",
        8 * 2048,
        shape=_llama(2048, 24, 16, 16, 5504, 32_000),
    ),
    "8b-lora": Case(
        f"{_TEXT} 2048 --microbatch 2 --global-batch 4 --lora-rank 16",
        4 * 2048,
        shape=_llama(4096, 32, 32, 8, 14_336, 128_256),
    ),
    "6.9b": Case(
        f"{_TEXT} 512 --microbatch 8 --global-batch 64 --recompute full",
        64 * 512,
        steps=10,
        shape={**SHAPES["6.9b"], "vocab_size": 50_432},
    ),
    "small-ddp": Case("ddp --preset digits --batch-per-worker 16", 16),
    "small-resnet50": Case(f"{_JPEGS} 8 --image-size 64", 8, 2),
    "12m": Case(f"{_TEXT} 256 --microbatch 2 --global-batch 4", 4 * 256, shape=_SMALL),
    "12m-lora": Case(
        f"{_TEXT} 256 --microbatch 2 --global-batch 4 --lora-rank 8", 4 * 256, shape=_SMALL
    ),
}


@dataclass(kw_only=True, slots=True)
class LoopFigures:
    """Figures of one of the loops."""

    per_s: float = 0.0
    """Pictures or tokens, per CPU second on a machine without a GPU."""
    ready_s: float = 0.0
    """From the start of the loop to the end of its warm-up: it is built and compiled."""
    gpu_utilization: float | None = None
    peak_memory_bytes: int = 0
    losses: Sequence[float] = ()
    """Of each step."""
    failure: str = ""
    """Reason why there are no figures."""


class EnoughError(Exception):
    """The last timed step is done."""


class Watch:
    """The clock of a loop: it starts before anything is built."""

    def __init__(self, case: Case) -> None:
        self.case, self._found = case, LoopFigures()
        self._began = time.perf_counter()
        self._use = metrics.GpuUse(_DEVICE)

    def step(self, number: int) -> bool:
        """Note the end of a step; true if it is the last that is needed."""
        if number == _WARM_UP:
            self._found.ready_s = time.perf_counter() - self._began
            self._use.take()
            self._began = self._now()
        num = number - _WARM_UP
        if num < self.case.steps:
            return False
        self._found.per_s = num * self.case.items / (self._now() - self._began)
        self._found.gpu_utilization = self._use.take()
        return True

    def _now(self) -> float:
        if not _ON_GPU:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def figures(self, losses: Sequence[Any]) -> LoopFigures:
        """What the loop came to; ``losses`` are those of each step."""
        self._found.peak_memory_bytes = metrics.peak_memory(_DEVICE)
        self._found.losses = [float(each) for each in losses]
        return self._found


def config_of(case: Case, folder: str, data: str) -> Any:
    words = case.words.format(folder=folder, data=data).split()
    config = read_command(words, run="benchmark", workers=Range(1, 1), storage=folder)
    return recipes.by_name(config.recipe).prepare(config)


def run_recipe(case: Case, folder: str, data: str) -> LoopFigures:
    """The recipe's own loop, in a group of one process, stopped before it saves."""
    watch, losses = Watch(case), list[float]()
    worker = TorchrunWorker(run_uri=RunPaths.of(folder, "benchmark").uri)

    def note(*events: Event) -> None:
        found = [each for each in events if isinstance(each, Step)]
        losses.extend(each.loss for each in found)
        if found and watch.step(found[-1].step):
            raise EnoughError

    worker.on_events = note
    config = config_of(case, folder, data)
    with contextlib.suppress(EnoughError):
        recipes.by_name(config.recipe).train()(worker, config)
    return watch.figures(losses)


def run_plain(case: Case, folder: str, data: str) -> LoopFigures:
    """The peer."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    watch = Watch(case)
    try:
        return (train_text if case.shape else train_pictures)(watch, config_of(case, folder, data))
    except ModuleNotFoundError as error:
        return LoopFigures(failure=f"left out: {error}")


# --- text -----------------------------------------------------------------------------------------
def train_text(watch: Watch, config: Any) -> LoopFigures:
    """A loop of some lines, whose logits are stored, unless Liger's kernels are used."""
    has_liger = config.lora_rank > 0 and _ON_GPU
    if has_liger:  # it replaces classes before the model is built
        from liger_kernel.transformers import (  # type: ignore[import-not-found]
            apply_liger_kernel_to_llama,
        )

        apply_liger_kernel_to_llama()
    feed = feed_of(
        inputs.store_of(config),
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
    )
    model: Any = language_models.build_on_meta(pretrained.model_config(config.model, runs=""))
    model.config.use_cache = False
    model_weights.allocate(model, _DEVICE)
    model_weights.initialise(model, seed=config.seed)
    if config.lora_rank:
        model = adapted(model, config.lora_rank)
    elif _ON_GPU:
        # What goes from block to block is in bf16 too.
        model.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, output: output.bfloat16()
        )

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_of: Any = cross_entropy
    if _ON_GPU and not has_liger:
        for block in language_models.blocks(model):
            block.compile()
        loss_of = torch.compile(cross_entropy)
    groups = decay_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    losses: list[torch.Tensor] = []
    model.train()
    while not watch.step(len(losses)):
        rows = torch.from_numpy(feed.step(len(losses), rank=0, world_size=1).tokens)
        passes = to_device(rows, _DEVICE).split(config.microbatch)
        losses.append(torch.zeros((), device=_DEVICE))
        for each in passes:
            ids, labels = each[:, :-1], each[:, 1:].contiguous()
            with torch.autocast(_DEVICE.type, torch.bfloat16, enabled=_ON_GPU):
                if has_liger:
                    loss = model(input_ids=ids, labels=ids, shift_labels=labels).loss
                else:
                    loss = loss_of(model(input_ids=ids).logits, labels)
            (loss / len(passes)).backward()
            losses[-1] += loss.detach() / len(passes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return watch.figures(losses)


def adapted(model: Any, rank: int) -> Any:
    """A model with peft's adapters, in fp32, beside all its linear layers."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model.bfloat16() if _ON_GPU else model, adapters)


# --- pictures -------------------------------------------------------------------------------------
def train_pictures(watch: Watch, config: Any) -> LoopFigures:
    """A loop whose step is one CUDA graph, of a small model, or compiled."""
    is_small = config.recipe == "ddp"
    model: Any = (
        ResNet18() if is_small else picture_models.build("resnet50", classes=[*"0123456789"])
    )
    model.to(_DEVICE, memory_format=torch.channels_last).train()
    forward = torch.compile(model) if _ON_GPU and not is_small else model
    parameters = [*model.parameters()]
    # Capturable: the count of steps is on the device, where a replay advances it.
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=_ON_GPU)
    batches = (in_memory if is_small else decoded)(config, watch.case.items)
    pictures, labels = next(batches)
    loss = torch.zeros((), device=_DEVICE)

    def step() -> None:
        with torch.autocast(_DEVICE.type, torch.bfloat16, enabled=_ON_GPU):
            logits = forward(pictures).logits
        found = F.cross_entropy(logits.float(), labels)
        found.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        # A graph writes gradients to fixed addresses: they are zeroed, not dropped.
        optimizer.zero_grad(set_to_none=False)
        loss.copy_(found.detach())

    launch = captured(step) if _ON_GPU and is_small else step
    losses: list[torch.Tensor] = []
    while not watch.step(len(losses)):
        for into, each in zip((pictures, labels), next(batches), strict=True):
            into.copy_(each)
        launch()
        losses.append(loss.clone())
    return watch.figures(losses)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Replay of a step, after some on a side stream, in which buffers are made."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def in_memory(config: Any, batch: int) -> Batches:
    """Pictures on the device, and labels."""
    found = small_images.load(config.data)
    split = small_images.DeviceImages(found, _DEVICE)
    order = small_images.BatchOrder(num_images=len(split), global_batch=batch, seed=config.seed)
    for number in range(order.steps_per_epoch):
        yield split.batch(order.indices(number))


def decoded(config: Any, batch: int) -> Batches:
    """Random views of JPEGs, and labels, made one step ahead."""
    from torchvision.io import (  # type: ignore[import-not-found]
        ImageReadMode,
        decode_jpeg,
        read_file,
    )
    from torchvision.transforms import v2  # type: ignore[import-not-found]

    view = v2.Compose(
        [v2.RandomResizedCrop(config.full_size, antialias=False), v2.RandomHorizontalFlip()]
    )
    normalized = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize(augmentation.MEAN, augmentation.STD)]
    )
    classes = sorted(Path(config.data, "train").iterdir())
    files = [(str(path), label) for label, each in enumerate(classes) for path in each.iterdir()]

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        paths, labels = zip(*random.sample(files, batch), strict=True)
        found = decode_jpeg([*readers.map(read_file, paths)], ImageReadMode.RGB, _DEVICE)
        pictures = normalized(torch.stack([view(each) for each in found]))
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        return pictures, to_device(torch.tensor(labels), _DEVICE)

    with ThreadPoolExecutor() as readers, ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(make)
        while True:
            made = coming.result()
            coming = ahead.submit(make)
            yield made


def write_tree(folder: Path, num: int) -> None:
    """JPEGs: some, and links to them."""
    write_pictures(folder, num=num // _LINKS)
    for path in [*(folder / "train").rglob("*.JPEG")]:
        for number in range(_LINKS):
            os.link(path, path.with_name(f"{number}-{path.name}"))


def planned(config: Any) -> dict[str, float] | None:
    """Figures of the plan for this GPU, where it is known."""
    name = torch.cuda.get_device_name() if _ON_GPU else ""
    for machine in INSTANCE_TYPES.values():
        if config.recipe == "fsdp" and machine.gpu and machine.gpu.name == name:
            shape = plan.shape_of(config.model, asks_hub=False)
            found = estimates.make(
                shape, estimates.Setup.of(config.to_json(), machine, num_workers=1)
            )
            return {"per_s": found.tokens_per_s, "peak_memory_bytes": found.memory.total}
    return None


# --- all ------------------------------------------------------------------------------------------
LOOPS: Final = {"recipe": run_recipe, "plain": run_plain}


def measure(case: Case, loops: Sequence[str], data: str, rounds: int) -> dict[str, Any]:
    """The loops, in turn. The recipe starts with an empty cache of the compiler each time, and with
    what its run has kept."""
    found: dict[str, list[LoopFigures]] = {name: [] for name in loops}
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        if case.shape:
            Path(folder, pretrained.CONFIG_FILE).write_text(json.dumps(case.shape), "utf-8")
        if "pictures" in case.words:
            write_tree(Path(folder, "pictures"), case.items * (_WARM_UP + case.steps + 1))
        for number in range(rounds):
            for name in loops:
                if name == "recipe":
                    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled-{number}"
                found[name] += rank_groups.run(1, LOOPS[name], case, folder, data)
                os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
                say(f"{name}: {found[name][-1]}")
        plan_of_this = planned(config_of(case, folder, data))
    speeds = {
        name: statistics.median(each.per_s for each in figures) for name, figures in found.items()
    }
    ready = [each.ready_s for each in found["recipe"]]
    return {
        "benchmark": "gpu",
        "ratio": speeds["recipe"] / speeds["plain"] if speeds.get("plain") else 0.0,
        "ready_of_second_start": ready[1] / ready[0] if rounds > 1 and ready[0] else None,
        **speeds,
        "plan": plan_of_this,
        "rounds": {name: [asdict(each) for each in figures] for name, figures in found.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--alone", action="store_true", help="the recipe without its peer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data", default="fashion-mnist")
    options = parser.parse_args()
    loops = [*LOOPS][: 2 - options.alone]
    report(measure(CASES[options.case], loops, options.data, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
