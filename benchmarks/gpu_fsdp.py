"""Benchmark of the sharded recipe on one GPU beside a good plain loop and transformers' Trainer:
tokens/s, MFU, memory, losses.

    python -m benchmarks.gpu_fsdp [--cases 0.4b 1.3b …] [--loops recipe plain] [--profile]

Needs torch and transformers, not Ray, and no data: models have random weights, and train on
Python's help texts as bytes. The recipe's own loop runs, with everything that it does in a step.
The others get the same weights and sequences, in their order, and are used as someone would who
knows them: fused AdamW, bf16, attention that stores no matrix, no padding; the plain loop compiles
its blocks and its loss, and reads nothing from the device. Each has a process of its own. On a
machine without a GPU a small model is trained, by one thread, and CPU seconds count, which are
exact on a busy machine too.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
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
from training.loop.optimizers import decay_groups
from training.models import language_models, model_weights, pretrained
from training.models.model_shapes import SHAPES
from training.record.events import Event, Step
from training.runtime.torchrun import TorchrunWorker

#: Steps before the clock starts, for buffers, compiled kernels and one profiled step.
WARM_UP: Final = 5
#: Of the longest kernels.
_KERNELS: Final = 30
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
    recompute: str = "none"
    profile: bool = False


def _llama(hidden: int, layers: int, heads: int, kv: int, wide: int, vocab: int) -> Any:
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
    }


#: The second has the shape of Llama-3.2-1B with embeddings that are not tied.
CASES: Final = (
    Case(name="0.4b", shape={**SHAPES["400m"], "vocab_size": 50_432}),
    Case(name="1.3b", shape=_llama(2048, 24, 16, 16, 5504, 32_000)),
)
#: For a CPU.
SMALL: Final = Case(name="12m", shape=_llama(256, 4, 8, 4, 688, 16_384), seq_len=256, microbatch=2)
#: The second post's model with the settings of preset dolly: for one GPU of 110 GiB or more.
POST: Final = Case(
    name="6.9b",
    shape={**SHAPES["6.9b"], "vocab_size": 50_432},
    seq_len=512,
    microbatch=8,
    passes=8,
    recompute="full",
)
ALL: Final = (*CASES, POST, SMALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopFigures:
    """Figures of one of the loops."""

    tokens_per_s: float = 0.0
    """Per CPU second on a machine without a GPU."""
    peak_memory_bytes: int = 0
    losses: tuple[float, ...] = ()
    """Mean of each five steps."""
    failure: str = ""
    """Reason why there are no figures."""
    kernels: tuple[tuple[str, float], ...] = ()
    """Where a step's time on the GPU goes, in milliseconds, longest first, after a whole
    step by the clock and the sum of all."""


class _EnoughError(Exception):
    """The last timed step is done."""


class _Watch:
    """The clock of a loop, read after the warm-up and after the last step."""

    def __init__(self, case: Case, device: torch.device, *, steps: int) -> None:
        self._tokens = steps * case.passes * case.microbatch * case.seq_len
        self._device, self._steps = device, steps
        self._began = 0.0
        self._profile = torch.profiler.profile() if case.profile else None
        self.tokens_per_s = 0.0
        self.kernels: tuple[tuple[str, float], ...] = ()

    def step(self, number: int) -> bool:
        """Note the end of a step; true if it is the last that is needed."""
        last = WARM_UP + self._steps
        if number == WARM_UP:
            self._began = self._now()
        if number == last:
            took = self._now() - self._began
            self.tokens_per_s = self._tokens / took
            self.kernels = (("a whole step", 1e3 * took / self._steps),)
            if self._profile:
                self._profile.start()
        if self._profile and number == last + WARM_UP:
            self._now()
            self._profile.stop()
            found = sorted(
                (
                    (each.key[:100], each.self_device_time_total / 1e3 / WARM_UP)
                    for each in self._profile.key_averages()
                    if each.device_type.name != "CPU"
                ),
                key=lambda each: -each[1],
            )
            at_work = sum(each for name, each in found if not name.startswith("Optimizer.step"))
            self.kernels += (("all kernels", at_work), *found[:_KERNELS])
            return True
        return number >= last and not self._profile

    def _now(self) -> float:
        if self._device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def figures(self, losses: Sequence[float]) -> LoopFigures:
        """What the loop came to."""
        return LoopFigures(
            tokens_per_s=self.tokens_per_s,
            peak_memory_bytes=metrics.peak_memory(self._device),
            losses=tuple(losses),
            kernels=self.kernels,
        )


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
        # The last one saves.
        max_steps=WARM_UP + steps + (WARM_UP if case.profile else 0) + 1,
        lr=LR,
        schedule="constant",
        recompute=case.recompute,
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
    return watch.figures(in_fives(losses))


def in_fives(losses: Sequence[float]) -> list[float]:
    """Mean of each ``WARM_UP`` steps."""
    return [
        statistics.mean(losses[first : first + WARM_UP]) for first in range(0, len(losses), WARM_UP)
    ]


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
                torch_compile=on_gpu,
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


def inputs_for(
    case: Case, folder: str, steps: int
) -> tuple[nn.Module, Feed, FsdpConfig, torch.device]:
    """The weights and the sequences that the recipe gets, for a loop without a group."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = inputs.prepare(config_for(case, folder, steps=steps))
    store = inputs.store_of(config)
    feed = feed_of(
        store,
        seq_len=case.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
    )
    model: Any = language_models.build_on_meta(pretrained.model_config(config.model, runs=""))
    model_weights.allocate(model, device)
    model_weights.initialise(model, seed=config.seed)
    return model, feed, config, device


def run_trainer(case: Case, folder: str, steps: int) -> LoopFigures:
    """transformers' Trainer."""
    model, feed, config, device = inputs_for(case, folder, steps)
    watch = _Watch(case, device, steps=steps)
    try:
        losses = train_by_trainer(model, feed, config, on_step_end=watch.step)
    except torch.OutOfMemoryError as error:
        return LoopFigures(failure=f"out of GPU memory: {str(error).splitlines()[0]}")
    return watch.figures(losses)


def run_plain(case: Case, folder: str, steps: int) -> LoopFigures:
    """A loop of some lines, whose logits are stored."""
    built, feed, config, device = inputs_for(case, folder, steps)
    model: Any = built
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    # What goes from block to block is in bf16 too.
    model.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: output.bfloat16() if on_gpu else output
    )

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_of: Any = cross_entropy
    if on_gpu:
        for block in language_models.blocks(model):
            block.compile()
        loss_of = torch.compile(cross_entropy)
    groups = decay_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)
    watch = _Watch(case, device, steps=steps)
    losses: list[torch.Tensor] = []
    model.train()
    try:
        for step in range(config.max_steps):
            tokens = torch.from_numpy(feed.step(step, rank=0, world_size=1).tokens)
            if on_gpu:
                tokens = tokens.pin_memory().to(device, non_blocking=True)
            total = torch.zeros((), device=device)
            for part in tokens.split(case.microbatch):
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                    logits = model(input_ids=part[:, :-1], use_cache=False).logits
                    loss = loss_of(logits, part[:, 1:]) / case.passes
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            if watch.step(step + 1):
                break
    except torch.OutOfMemoryError as error:
        return LoopFigures(failure=f"out of GPU memory: {str(error).splitlines()[0]}")
    return watch.figures(in_fives([float(each) for each in losses]))


#: Loop -> what runs it.
LOOPS: Final = {"recipe": run_recipe, "plain": run_plain, "trainer": run_trainer}


def measure(case: Case, *, steps: int, loops: Sequence[str], rounds: int) -> dict[str, object]:
    """The loops, in turn; of each the round of median speed."""
    all_rounds: dict[str, list[LoopFigures]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-fsdp-") as folder:
        Path(folder, pretrained.CONFIG_FILE).write_text(json.dumps(case.shape), "utf-8")
        for name in rounds * [*loops]:
            say(f"{case.name}: {name}")
            [figures] = rank_groups.run(1, LOOPS[name], case, folder, steps)
            say(f"{case.name}: {name}: {figures}")
            all_rounds.setdefault(name, []).append(figures)
    found = {
        name: sorted(each, key=lambda one: one.tokens_per_s)[len(each) // 2]
        for name, each in all_rounds.items()
    }
    model: Any = language_models.build_on_meta(pretrained.config_of(case.shape))
    num_parameters = language_models.num_parameters(model)
    flops = language_models.flops_per_token(model, case.seq_len)
    on_gpu = torch.cuda.is_available()
    peak = metrics.peak_flops(torch.device("cuda" if on_gpu else "cpu"))
    ways = {
        name: {**asdict(each), "mfu": each.tokens_per_s * flops / peak if peak else None}
        for name, each in found.items()
    }
    own = found.get("recipe", LoopFigures())
    others = {name: each for name, each in found.items() if name != "recipe"}
    return {
        **{name: value for name, value in asdict(case).items() if name != "shape"},
        "parameters": num_parameters,
        "ratios": {
            name: own.tokens_per_s / each.tokens_per_s if each.tokens_per_s else 0.0
            for name, each in others.items()
        },
        "largest_difference_of_losses": max(
            (
                abs(a - b)
                for each in others.values()
                for a, b in zip(own.losses, each.losses, strict=False)
            ),
            default=None,
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
        default=[each.name for each in CASES] if on_gpu else [SMALL.name],
        help=f"of {', '.join(each.name for each in ALL)}",
    )
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=[*LOOPS], metavar="LOOP")
    parser.add_argument("--profile", action="store_true", help="five more steps, kernel by kernel")
    parser.add_argument("--rounds", type=int, default=1 if on_gpu else 3, help="of each loop")
    parser.add_argument("--steps", type=int, default=15, help="timed steps, a multiple of 5")
    options = parser.parse_args()
    found = [
        measure(
            replace(case, profile=options.profile),
            steps=options.steps,
            loops=options.loops,
            rounds=options.rounds,
        )
        for case in ALL
        if case.name in options.cases
    ]
    ratios: Any = found[0]["ratios"]
    result = {
        "benchmark": "gpu_fsdp",
        "ratio": min(ratios.values(), default=0.0),
        "ratio_is_of": "tokens/s of the recipe to those of the fastest other loop, first case",
        "device": torch.cuda.get_device_name() if on_gpu else "CPU: tokens per CPU second",
        "cases": found,
    }
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
