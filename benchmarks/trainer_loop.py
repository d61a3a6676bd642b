"""Baseline for language models: transformers' Trainer on packed sequences, used competently.

Fused AdamW, mixed precision where the device has it, attention that stores no matrix, no padding:
what someone who knows the library writes. It is given this project's own sequences, in their order,
and the same weights, so that its losses can be compared step by step.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from training.data.feed import Feed
from training.fsdp.settings import FsdpConfig

BETAS: Final = (0.9, 0.95)


class _Packed(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
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


def train(
    model: nn.Module,
    feed: Feed,
    config: FsdpConfig,
    *,
    on_step_end: Callable[[int], object],
) -> list[float]:
    """Train a model of transformers, or one with peft's adapters, where it is.

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

    class Watch(TrainerCallback):
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
                torch_compile=config.compile,
                logging_steps=config.report_every,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=_Packed(feed),
            callbacks=[Watch()],
        )
        trainer.remove_callback(PrinterCallback)  # it prints on stdout, which is for the result
        trainer.train()
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]
