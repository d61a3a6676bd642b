"""An independent plain loop of transformers, and the fsdp recipe on the same conversations.

The plain loop has no packing, padding, shards or passes: it computes each conversation by itself,
with its own tokens, masks, optimizer, schedule and clipping.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from contract.runs import RunPaths
from store.cache import CACHE_VARIABLE
from tests.published import models
from tests.training.test_conversations import tokenizer_folder
from training.data.feed import feed_of
from training.data.rows import open_store
from training.fsdp import train as fsdp
from training.fsdp.settings import FsdpConfig
from training.record.events import Event, Step
from training.runtime.torchrun import TorchrunWorker

#: Positions that a tiny model knows, of which a scaled rope was trained on half.
SEQ_LEN: Final = 64
LR: Final = 1e-3
STEPS: Final = 6
#: A template that writes thoughts, calls and tools.
TEMPLATE: Final = (
    "{% if tools %}<|im_start|>tools\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments.x }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row of the comparison."""

    folder: Path
    name: str
    """Of a published model."""
    form: str
    """Of the data: ``chats``, ``tools``, ``weights`` or ``columns``."""
    more: Mapping[str, Any]

    @property
    def config(self) -> FsdpConfig:
        columns = {"columns": "prompt=asked,answer=said"} if self.form == "columns" else {}
        return FsdpConfig(
            **{
                **{"recipe": "fsdp", "run": "r", "storage": str(self.folder / "runs")},
                **{"data": str(self.folder / "rows.jsonl"), "model": str(self.folder / "model")},
                **{"tokenizer": str(self.folder / "tokens"), "seq_len": SEQ_LEN, "lr": LR},
                **{"global_batch": 6, "microbatch": 2, "max_steps": STEPS, "report_every": 1},
                **{
                    "evaluate_every": 4,
                    "eval_sequences": 0,
                    "sample_tokens": 0,
                    "checkpoint_every": 100,
                },
                **{"checkpoint_minutes": 0.0, **columns, **self.more},
            }
        )


def words(number: int, most: int) -> str:
    """Some made-up words."""
    letters = [chr(97 + (number * 7 + i * (3 + number % 5)) % 26) for i in range(2 + number % most)]
    return "".join(letters)


def rows(form: str) -> Iterator[tuple[dict[str, Any], list[tuple[str, bool]]]]:
    """Rows of a file, each with its text in pieces, and whether each is learned."""
    end = "<|im_end|>"
    for number in range(160):
        asked, said = words(number, 20), words(number + 1, 23)
        head = [(f"<|im_start|>user\n{asked}{end}\n<|im_start|>assistant\n", False)]
        answer: dict[str, Any] = {"role": "assistant", "content": said}
        row: dict[str, Any] = {"messages": [{"role": "user", "content": asked}, answer]}
        pieces = [(said + end, True), ("\n", False)]
        if form == "columns":
            row = {"asked": asked, "said": said}
        elif form == "tools" and number % 2:
            call = {"name": "f", "arguments": json.dumps({"x": said})}
            answer |= {"content": None, "tool_calls": [{"type": "function", "function": call}]}
            answer["reasoning_content"] = asked
            row["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
            head = [(f"<|im_start|>tools\nf{end}\n", False), *head]
            pieces = [(f"<think>{asked}</think><call>f{said}</call>{end}", True), ("\n", False)]
        elif form == "weights" and number % 3 == 0:
            answer["weight"] = 0
            again = words(number + 2, 11)
            row["messages"] += [row["messages"][0], {"role": "assistant", "content": again}]
            pieces = [(said + end, False), ("\n", False), *head, (again + end, True), ("\n", False)]
        yield row, [*head, *pieces]


def write(job: Job) -> None:
    """Model, tokenizer and data."""
    tokenizer_folder(job.folder / "tokens", TEMPLATE)
    lines = [json.dumps(row) + "\n" for row, _ in rows(job.form)]
    (job.folder / "rows.jsonl").write_text("".join(lines))
    model = models.publish(job.name, job.folder / "model")
    # Both loops draw other numbers.
    drops = [key for key in model.config.to_dict() if key.endswith(("dropout", "pdrop", "noise"))]
    file = job.folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict.fromkeys(drops, 0.0)))


def encoded(job: Job) -> tuple[list[Any], list[Any]]:
    """Conversations to train on and those held out: ids, and labels of the ids that follow."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(job.folder / "tokens" / "tokenizer.json"))
    train: list[Any] = []
    held_out: list[Any] = []
    for number, (_, pieces) in enumerate(rows(job.form)):
        ids: list[int] = []
        labels: list[int] = []
        for text, is_learned in pieces:
            found = tokenizer.encode(text, add_special_tokens=False).ids
            ids += found
            labels += found if is_learned else [-100] * len(found)
        own = (ids[:-1][:SEQ_LEN], labels[1:][:SEQ_LEN])  # a longer one loses its end
        (held_out if number % 20 == 19 else train).append(own)
    return train, held_out


def recipe(config: FsdpConfig, cache: str, stop_at: int) -> list[Event]:
    """Train with the recipe's loop, as one of its ranks, until a step."""
    os.environ[CACHE_VARIABLE] = cache
    torch.set_num_threads(1)
    worker = TorchrunWorker(run_uri=RunPaths.of(config.storage, config.run).uri)
    events: list[Event] = []

    def note(*new: Event) -> None:
        events.extend(new)
        if any(isinstance(each, Step) and each.step >= stop_at for each in new):
            worker._stop = True

    worker.on_events = note
    fsdp.train(worker, config)
    worker.close()
    return events


def with_adapters(model: Any, rank: int) -> Any:
    """peft's adapters, with the recipe's first values of A."""
    import hashlib

    from peft import LoraConfig, get_peft_model

    names = {
        name.rpartition(".")[2]
        for name, module in model.model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(names - {"gate"}))
    adapted = get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            digest = hashlib.sha256(f"0/{name}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big") >> 1
            limit = parameter.shape[1] ** -0.5
            drawn = torch.Generator().manual_seed(seed)
            parameter.data = parameter.data.uniform_(-limit, limit, generator=drawn)
        parameter.requires_grad_("lora_" in name)
    return adapted


def plain(job: Job, key: str) -> tuple[dict[int, Any], dict[int, float], dict[str, torch.Tensor]]:
    """Loss, gradient norm and rate of each step; held-out losses; the weights at the end."""
    config, store = job.config, open_store(key, shared=None)
    assert store is not None
    # Of the product: only which conversations a step has.
    feed = feed_of(store, seq_len=SEQ_LEN, global_batch=6, seed=config.seed, packs=config.packing)
    model = models.from_pretrained(job.folder / "model", has_more=True).train()
    adapted = with_adapters(model, config.lora_rank) if config.lora_rank else None
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each], "weight_decay": 0.1 * (each.ndim > 1 and "bias" not in name)}
        for name, each in model.named_parameters()
        if each.requires_grad
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    train, held_out = encoded(job)

    def summed(ids: list[int], labels: list[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([ids])).logits[0].float()
        return F.cross_entropy(logits, torch.tensor(labels), ignore_index=-100, reduction="sum")

    def num_of(found: list[Any]) -> int:
        return sum(label != -100 for _, labels in found for label in labels)

    def evaluated() -> float:
        with torch.no_grad():
            return sum(summed(*each).item() for each in held_out) / num_of(held_out)

    steps: dict[int, Any] = {}
    evaluations = {0: evaluated()}
    for step in range(STEPS):
        done = (step + 0.5) / STEPS
        rate = LR * done / 0.05
        if done >= 0.05:
            rate = LR * (0.1 + 0.45 * (1 + math.cos(math.pi * (done - 0.05) / 0.95)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = [
            train[each]
            for sequence in feed.sequences(step).tolist()
            if sequence >= 0
            for each in feed.train.members(sequence).tolist()  # type: ignore[union-attr]
        ]
        total = 0.0
        for each in batch:
            loss = summed(*each) / num_of(batch)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(trained, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        steps[step + 1] = (total, norm, rate)
        if step + 1 in (4, STEPS):
            evaluations[step + 1] = evaluated()
    whole = adapted.merge_and_unload() if adapted is not None else model
    return steps, evaluations, whole.state_dict()
