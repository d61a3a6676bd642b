"""A packed language model step against the loop one writes first, on one process.

    python -m benchmarks.fsdp --data FILE --tokenizer DIR [--json]

The plain loop has the reference's semantics: every line of the text padded on the left to 256
tokens, the padding among the labels, logits stored, every block recomputed, AdamW as it comes, all
in fp32. The packed one is made of this project's parts: full sequences, the loss without logits.
Both start from the same weights and take turns; a token counts once, and padding does not.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.output import report, say
from training import language_models
from training.contract import InputError
from training.data import text
from training.data.text import SequenceOrder
from training.language_models import WithLoss

SEQ_LEN: Final = 256
BATCH: Final = 14  # 3,584 positions a step in both loops
ROUNDS: Final = 5
LR: Final = 3e-4
HELD_OUT_SEQUENCES: Final = 8
#: The plain loop is given up after so many times what the packed one took.
PATIENCE: Final = 22.0


def configuration(vocab_size: int) -> Any:
    """A GPT-NeoX small enough for a CPU, with the vocabulary of the real ones."""
    from transformers import GPTNeoXConfig

    make: Any = GPTNeoXConfig
    return make(
        vocab_size=math.ceil(vocab_size / 128) * 128,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=2048,
        rotary_pct=0.25,
        use_parallel_residual=True,
        tie_word_embeddings=False,
    )


class PlainLoop:
    """What the reference does with the same model, text and machine."""

    def __init__(self, model: Any, data: Path, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        self.model = model.train()
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        lines = [line.strip() for line in data.read_text(encoding="utf-8").split("\n")]
        kept = [line for line in lines if line and not line.endswith(":")]
        path = tokenizer_file / "tokenizer.json" if tokenizer_file.is_dir() else tokenizer_file
        encoded = Tokenizer.from_file(str(path)).encode_batch(kept, add_special_tokens=False)
        self.rows = [each.ids[:SEQ_LEN] for each in encoded]
        self.order = np.random.default_rng(0).permutation(len(self.rows))

    def step(self, number: int) -> int:
        """Train one step; return how many of its tokens are not padding."""
        inputs = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
        mask = torch.zeros_like(inputs)
        useful = 0
        for place in range(BATCH):
            row = self.rows[self.order[(number * BATCH + place) % len(self.rows)]]
            inputs[place, SEQ_LEN - len(row) :] = torch.tensor(row)
            mask[place, SEQ_LEN - len(row) :] = 1
            useful += len(row)
        loss = self.model(input_ids=inputs, attention_mask=mask, labels=inputs.clone()).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return useful


class PackedLoop:
    """This project's parts."""

    def __init__(self, model: nn.Module, store: text.TokenStore) -> None:
        self.trained = WithLoss(model.train())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        self.tokens = store.train
        self.order = SequenceOrder(
            num_tokens=len(store.train), seq_len=SEQ_LEN, global_batch=BATCH, seed=0
        )

    def step(self, number: int) -> int:
        """Train one step; return how many tokens it predicts."""
        batch = self.order.batch(self.tokens, number, rank=0, world_size=1)
        loss = self.trained(torch.from_numpy(batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return BATCH * SEQ_LEN


def same_model(config: Any) -> nn.Module:
    model = language_models.build_on_meta(config)
    language_models.allocate(model, torch.device("cpu"))
    language_models.initialise(model, seed=0)
    return model


def held_out_loss(model: nn.Module, store: text.TokenStore) -> float:
    """Mean loss per token over the first held-out sequences, packed."""
    window = np.arange(HELD_OUT_SEQUENCES)[:, None] * SEQ_LEN + np.arange(SEQ_LEN + 1)
    batch: Tensor = torch.from_numpy(store.held_out[window].astype(np.int64))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        loss = float(WithLoss(model)(batch))
    model.train(was_training)
    return loss


def steps_to(
    step: Callable[[int], int], loss: Callable[[], float], target: float, limit: int
) -> tuple[int, float]:
    """Train until the held-out loss is at ``target``, or for ``limit`` steps: steps, and the loss
    reached."""
    number, reached = 0, math.inf
    while number < limit and reached > target:
        step(number)
        number += 1
        reached = loss()
        if number % 10 == 0:
            say(f"  step {number}: held-out loss {reached:.2f}")
    return number, reached


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp", description=__doc__)
    parser.add_argument("--data", required=True, help="a text file")
    parser.add_argument(
        "--tokenizer", required=True, type=Path, help="tokenizer.json, or its folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    torch.set_num_threads(2)
    try:
        store = text.store_for(options.data, options.tokenizer)
        config = configuration(store.info.vocab_size)
        plain = PlainLoop(same_model(config), Path(options.data), options.tokenizer)
        packed = PackedLoop(same_model(config), store)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    seconds: dict[str, list[float]] = {"plain": [], "packed": []}
    useful: dict[str, list[int]] = {"plain": [], "packed": []}
    for number in range(ROUNDS + 1):
        for name, loop in (("plain", plain), ("packed", packed)):
            began = time.perf_counter()
            tokens = loop.step(number)
            spent = time.perf_counter() - began
            say(f"round {number} of {ROUNDS}: {name} {tokens / spent:.0f} tokens/s")
            if number:  # the first step of each is not like the others
                seconds[name].append(spent)
                useful[name].append(tokens)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    rates = {name: statistics.mean(useful[name]) / medians[name] for name in medians}

    # Half the way from knowing nothing to knowing how frequent each token is: the plain loop takes
    # half a minute per hundred useful tokens, and shall arrive, or be shown to be far away.
    nothing = math.log(config.vocab_size)
    target = (nothing + store.unigram_loss(HELD_OUT_SEQUENCES * SEQ_LEN)) / 2
    say(f"training both from a held-out loss of {nothing:.2f} to {target:.2f}")
    fresh = PackedLoop(same_model(config), store)
    packed_steps, packed_loss = steps_to(
        fresh.step, lambda: held_out_loss(fresh.trained.model, store), target, 1000
    )
    slow = PlainLoop(same_model(config), Path(options.data), options.tokenizer)
    limit = math.ceil(PATIENCE * packed_steps * medians["packed"] / medians["plain"])
    plain_steps, plain_loss = steps_to(
        slow.step, lambda: held_out_loss(slow.model, store), target, limit
    )
    # Steps, times the median time of a step of the interleaved rounds: what else the machine did
    # during the long way of the plain loop does not count.
    to_target = {
        "packed": packed_steps * medians["packed"],
        "plain": plain_steps * medians["plain"],
    }
    result = {
        "benchmark": "fsdp",
        "ratio": rates["packed"] / rates["plain"],
        "useful_tokens_per_s": rates,
        "seconds_per_step": medians,
        "useful_share_of_positions": {
            name: statistics.mean(found) / (BATCH * SEQ_LEN) for name, found in useful.items()
        },
        "parameters": language_models.num_parameters(packed.trained.model),
        "to_equal_held_out_loss": {
            "target": target,
            "packed": {"seconds": to_target["packed"], "steps": packed_steps, "loss": packed_loss},
            "plain": {"seconds": to_target["plain"], "steps": plain_steps, "loss": plain_loss},
            "plain_has_arrived": plain_loss <= target,
            # Where it has not, the true ratio is larger than this.
            "ratio_at_least": to_target["plain"] / to_target["packed"],
        },
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
