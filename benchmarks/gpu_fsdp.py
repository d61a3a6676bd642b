"""Benchmark of the sharded recipe on one GPU beside transformers' Trainer: tokens/s, MFU, memory,
losses.

    python -m benchmarks.gpu_fsdp [--cases 0.6b 1.3b …] [--eager]

Needs torch, transformers and peft, not Ray, and no data: models have random weights, and train on
Python's help texts as bytes. The recipe's own loop runs, with everything that it does in a step;
the Trainer gets the same weights and sequences, in their order, and is used as someone would who
knows it: fused AdamW, mixed precision, attention that stores no matrix, no padding. Each has a
process of its own. On a machine without a GPU a tiny model is trained, which shows that the
script works and says nothing of a GPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks import rank_groups
from benchmarks.tables import report, say
from contract.errors import InputError
from training.data import PYTHON_HELP
from training.data.feed import Feed, feed_of
from training.fsdp import inputs
from training.fsdp import train as fsdp
from training.fsdp.settings import FsdpConfig
from training.loop import metrics
from training.models import language_models, lora, model_weights, pretrained
from training.models.model_shapes import SHAPES
from training.record.events import Event, Step
from training.runtime.torchrun import TorchrunWorker

#: Steps before the clock starts, for buffers, compiled kernels and one profiled step.
WARM_UP: Final = 5
LR: Final = 2e-4
BETAS: Final = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and the settings of its training."""

    name: str
    shape: Mapping[str, Any]
    """The model's ``config.json``."""
    seq_len: int = 2048
    microbatch: int = 4
    passes: int = 2
    lora_rank: int = 0
    recompute: str = "none"
    compile: bool = True
    """Blocks of the recipe, the model of the Trainer."""


def _llama(
    hidden: int, layers: int, heads: int, kv: int, wide: int, vocab: int, **more: Any
) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
        "intermediate_size": wide,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }


#: The first has the shape of Qwen3-0.6B, the second that of Llama-3.2-1B with embeddings that are
#: not tied, the third that of Llama-2-7B.
CASES: Final = (
    Case(
        name="0.6b",
        shape={
            **_llama(1024, 28, 16, 8, 3072, 151_936, tie_word_embeddings=True),
            "model_type": "qwen3",
            "head_dim": 128,
        },
    ),
    Case(name="1.3b", shape=_llama(2048, 24, 16, 16, 5504, 32_000)),
    Case(name="7b-lora", shape=_llama(4096, 32, 32, 32, 11_008, 32_000), lora_rank=16),
)
#: For a CPU.
TINY: Final = Case(
    name="tiny", shape={**SHAPES["tiny"], "vocab_size": 384}, seq_len=64, microbatch=2
)
#: The second post's model with the settings of preset dolly: for one GPU of 110 GiB or more.
POST: Final = Case(
    name="6.9b",
    shape={**SHAPES["6.9b"], "vocab_size": 50_432},
    seq_len=512,
    microbatch=8,
    passes=8,
    recompute="full",
)
ALL: Final = (*CASES, POST, TINY)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopFigures:
    """Figures of one of the two loops."""

    tokens_per_s: float = 0.0
    peak_memory_bytes: int = 0
    losses: tuple[float, ...] = ()
    """Mean of each five steps."""
    failure: str = ""
    """Reason why there are no figures."""


class _EnoughError(Exception):
    """The last timed step is done."""


class _Watch:
    """The clock of a loop, read after the warm-up and after the last step."""

    def __init__(self, case: Case, device: torch.device, *, steps: int) -> None:
        self._tokens = steps * case.passes * case.microbatch * case.seq_len
        self._device, self._last = device, WARM_UP + steps
        self._began = 0.0
        self.tokens_per_s = 0.0

    def step(self, number: int) -> bool:
        """Note the end of a step; true if it is the last that is needed."""
        if number == WARM_UP:
            self._began = self._now()
        if number == self._last:
            self.tokens_per_s = self._tokens / (self._now() - self._began)
        return number >= self._last

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def config_for(case: Case, folder: str, *, steps: int) -> FsdpConfig:
    """The recipe's settings: nothing is evaluated, sampled or saved while the clock runs."""
    return FsdpConfig(
        recipe="fsdp",
        run="benchmark",
        storage=folder,
        data=PYTHON_HELP,
        model=pretrained.NEW + folder,
        tokenizer=pretrained.BYTES,
        seq_len=case.seq_len,
        microbatch=case.microbatch,
        global_batch=case.microbatch * case.passes,
        max_steps=WARM_UP + steps + 1,  # the last one saves
        lr=LR,
        schedule="constant",
        lora_rank=case.lora_rank,
        recompute=case.recompute,
        compile=case.compile,
        report_every=WARM_UP,
        evaluate_every=10**6,
        eval_sequences=case.microbatch,
        checkpoint_every=10**6,
        checkpoint_minutes=0.0,
        sample_tokens=0,
    )


def run_recipe(case: Case, folder: str, steps: int) -> LoopFigures:
    """The recipe's own loop, in a group of one process, stopped before it saves."""
    worker = TorchrunWorker(run_uri=folder)
    watch = _Watch(case, worker.device, steps=steps)
    losses: list[float] = []

    def note(*events: Event) -> None:
        found = [each for each in events if isinstance(each, Step)]
        losses.extend(each.loss for each in found)
        if found and watch.step(found[-1].step):
            raise _EnoughError

    worker.on_events = note
    config = inputs.prepare(config_for(case, folder, steps=steps))
    try:
        fsdp.train(worker, config)
    except _EnoughError:
        pass
    except InputError as error:
        return LoopFigures(failure=str(error))
    return LoopFigures(
        tokens_per_s=watch.tokens_per_s,
        peak_memory_bytes=metrics.peak_memory(worker.device),
        losses=tuple(
            statistics.mean(losses[first : first + WARM_UP])
            for first in range(0, len(losses), WARM_UP)
        ),
    )


class Packed(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The sequences of each step, one by one."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        step = 0
        while True:
            batch = self._feed.step(step, rank=0, world_size=1)
            for row in torch.from_numpy(batch.tokens):
                # The labels that the model would shift by itself lack the last one of a sequence.
                yield {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}
            step += 1


def train_by_trainer(
    model: nn.Module,
    feed: Feed,
    config: FsdpConfig,
    *,
    on_step_end: Callable[[int], object],
) -> list[float]:
    """Train a model of transformers, where it is.

    Args:
        config: of the recipe, whose last step, after which it saves, is left out.
        on_step_end: called with the number of steps done.

    Returns:
        The mean loss of each ``config.report_every`` steps.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    on_gpu = next(model.parameters()).device.type == "cuda"

    class StepCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            on_step_end(int(state.global_step))

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    make: Any = TrainingArguments
    with tempfile.TemporaryDirectory(prefix="trainer-") as scratch:
        trainer: Any = Trainer(
            model=model,
            args=make(
                output_dir=scratch,
                max_steps=config.max_steps - 1,
                per_device_train_batch_size=config.microbatch,
                gradient_accumulation_steps=config.global_batch // config.microbatch,
                learning_rate=config.lr,
                lr_scheduler_type="constant",
                weight_decay=config.weight_decay,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                max_grad_norm=config.max_grad_norm,
                optim="adamw_torch_fused",
                bf16=on_gpu,
                tf32=True if on_gpu else None,
                use_cpu=not on_gpu,
                torch_compile=on_gpu and config.compile,
                logging_steps=config.report_every,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=Packed(feed),
            callbacks=[StepCallback()],
        )
        trainer.remove_callback(PrinterCallback)  # it prints on stdout, which is for the result
        trainer.train()
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]


def run_trainer(case: Case, folder: str, steps: int) -> LoopFigures:
    """transformers' Trainer."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # one process, and no group
        os.environ.pop(name, None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = inputs.prepare(config_for(case, folder, steps=steps))
    store = inputs.stores_of(config)[0]
    feed = feed_of(
        store,
        seq_len=case.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
    )
    watch = _Watch(case, device, steps=steps)
    # The weights that the recipe gives it.
    model: Any = language_models.build_on_meta(pretrained.model_config(config.model, runs=""))
    model_weights.allocate(model, device)
    model_weights.initialise(model, seed=config.seed)
    try:
        losses = train_by_trainer(model, feed, config, on_step_end=watch.step)
    except torch.OutOfMemoryError as error:
        return LoopFigures(failure=f"out of GPU memory: {str(error).splitlines()[0]}")
    return LoopFigures(
        tokens_per_s=watch.tokens_per_s,
        peak_memory_bytes=metrics.peak_memory(device),
        losses=tuple(losses),
    )


def measure(case: Case, *, steps: int, trainer_too: bool) -> dict[str, object]:
    """Both loops, one after the other."""
    with tempfile.TemporaryDirectory(prefix="gpu-fsdp-") as folder:
        Path(folder, pretrained.CONFIG_FILE).write_text(json.dumps(case.shape), "utf-8")
        say(f"{case.name}: the recipe")
        [recipe] = rank_groups.run(1, run_recipe, case, folder, steps)
        say(f"{case.name}: {recipe}")
        trainer = LoopFigures(failure="left out")
        if trainer_too and not case.lora_rank:
            [trainer] = rank_groups.run(1, run_trainer, case, folder, steps)
            say(f"{case.name}: transformers' Trainer: {trainer}")
    model: Any = language_models.build_on_meta(pretrained.config_of(case.shape))
    num_parameters = language_models.num_parameters(model)
    if case.lora_rank:
        lora.add(model, rank=case.lora_rank)
    flops = language_models.flops_per_token(model, case.seq_len)
    on_gpu = torch.cuda.is_available()
    peak = metrics.peak_flops(torch.device("cuda" if on_gpu else "cpu"))
    ways = {
        name: {**asdict(each), "mfu": each.tokens_per_s * flops / peak if peak else None}
        for name, each in (("recipe", recipe), ("trainer", trainer))
    }
    both = recipe.tokens_per_s and trainer.tokens_per_s
    return {
        **{name: value for name, value in asdict(case).items() if name != "shape"},
        "parameters": num_parameters,
        "ratio": recipe.tokens_per_s / trainer.tokens_per_s if both else 0.0,
        "largest_difference_of_losses": max(
            (abs(a - b) for a, b in zip(recipe.losses, trainer.losses, strict=False)), default=None
        ),
        **ways,
    }


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_fsdp", description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[each.name for each in ALL],
        metavar="CASE",
        default=[each.name for each in CASES] if on_gpu else [TINY.name],
        help=f"of {', '.join(each.name for each in ALL)}",
    )
    parser.add_argument("--eager", action="store_true", help="compile neither")
    parser.add_argument("--steps", type=int, default=15, help="timed steps, a multiple of 5")
    parser.add_argument("--without-trainer", action="store_true", help="only the recipe")
    options = parser.parse_args()
    cases = [replace(each, compile=not options.eager) for each in ALL if each.name in options.cases]
    trainer_too = not options.without_trainer
    found = [measure(case, steps=options.steps, trainer_too=trainer_too) for case in cases]
    result = {
        "benchmark": "gpu_fsdp",
        "ratio": found[0]["ratio"],
        "ratio_is_of": "tokens/s of the recipe to transformers' Trainer's, first case",
        "device": torch.cuda.get_device_name() if on_gpu else "CPU: says nothing of a GPU",
        "cases": found,
    }
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
