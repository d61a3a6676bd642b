"""Hugging Face's Trainer: a tiny GPT-2 with random weights learns to count in steps.

    torchrun --nproc-per-node 2 train.py

It resumes from the newest checkpoint in ``out``. Every argument of ``TrainingArguments`` may be
given, such as ``--max_steps 200``.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

LENGTH = 32
WORDS = 64


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that begin anywhere and go on by the same difference, modulo ``WORDS``."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, difference = index % WORDS, 1 + index // WORDS % 7
        tokens = (first + difference * torch.arange(LENGTH)) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def newest_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that is whole: the trainer's state is the last that is written.

    ``get_last_checkpoint`` also returns one that a kill has left in part.
    """
    there = [
        str(state.parent)
        for state in folder.glob("checkpoint-*/trainer_state.json")
        if holds(state)
    ]
    return max(there, key=lambda name: int(name.rpartition("-")[2]), default=None)


def holds(state: Path) -> bool:
    """Whether a file of JSON is whole: a kill may come while it is written."""
    try:
        json.loads(state.read_text())
    except ValueError:
        return False
    return True


def main() -> None:
    given = {
        "output_dir": "out",
        "max_steps": 60,
        "save_steps": 20,
        "logging_steps": 20,
        "save_total_limit": 2,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 0,
        # Without a GPU each process would train by itself unless it is told.
        "use_cpu": not torch.cuda.is_available(),
    }
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(**given)
    (arguments,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    shape = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=LENGTH, vocab_size=WORDS)
    model = GPT2LMHeadModel(shape)
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())

    # The folders of the nodes may differ: rank 0 decides for all of them.
    newest = [newest_checkpoint(Path(arguments.output_dir))]
    if dist.is_initialized():
        dist.broadcast_object_list(newest)
    rank, world = arguments.process_index, arguments.world_size
    print(f"rank {rank} of {world} starts at {newest[0] or 'step 0'}", flush=True)
    trainer.train(resume_from_checkpoint=newest[0])
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        result = {"steps": trainer.state.global_step, "world_size": world, "loss": losses[-1]}
        Path("result.json").write_text(json.dumps(result))
        print(f"result {json.dumps(result)}", flush=True)
    if dist.is_initialized() and torch.cuda.is_available():
        # NCCL warns at the end of a program that leaves its process group. gloo does not, and could
        # wait forever there for a thread of DDP, which the trainer still holds.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
