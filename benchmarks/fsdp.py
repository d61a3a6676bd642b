"""A packed language model step against the loop one writes first, on one process.

    python -m benchmarks.fsdp [--data FILE --tokenizer DIR] [--json]

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
from contract.errors import InputError
from training.data import text
from training.data.sequences import SequenceOrder
from training.models import language_models, model_weights, pretrained
from training.models.language_models import WithLoss

_SHARED: Final = Path(__file__).parents[2] / "shared" / "data"
SEQ_LEN: Final = 256
BATCH: Final = 14  # 3,584 positions a step in both loops
ROUNDS: Final = 5
LR: Final = 3e-3
HELD_OUT_SEQUENCES: Final = 8
#: The plain loop is given up after so many times what the packed one took.
PATIENCE: Final = 22.0


def configuration(vocab_size: int, *, width: int = 256, layers: int = 4) -> Any:
    """A GPT-NeoX small enough for a CPU, with the vocabulary of the real ones."""
    from transformers import GPTNeoXConfig

    make: Any = GPTNeoXConfig
    return make(
        vocab_size=math.ceil(vocab_size / 128) * 128,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
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
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        encoded = tokenizer.encode_batch(kept, add_special_tokens=False)
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
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=0)
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


def seconds_to(
    step: Callable[[int], int], loss: Callable[[], float], target: float, limit_s: float
) -> tuple[float, int, float]:
    """Train until the held-out loss is at ``target``, or for ``limit_s``: seconds of CPU time that
    training took, steps, and the loss reached.

    CPU time, because whatever else the machine does in these minutes would favour one loop.
    """
    spent, number, reached = 0.0, 0, math.inf
    while spent < limit_s and reached > target:
        began = time.process_time()
        step(number)
        spent += time.process_time() - began
        number += 1
        reached = loss()
        if number % 10 == 0:
            say(f"  step {number}, {spent:.0f} s: held-out loss {reached:.2f}")
    return spent, number, reached


def time_to_loss(store: text.TokenStore, data: Path, tokenizer_file: Path) -> dict[str, object]:
    """How long each loop takes to the held-out loss that the frequencies of the tokens give.

    With a smaller model, since it is the plain loop that sets the time of this.
    """
    config = configuration(store.info.vocab_size, width=64, layers=2)
    target = store.unigram_loss(HELD_OUT_SEQUENCES * SEQ_LEN)
    packed = PackedLoop(same_model(config), store)
    plain = PlainLoop(same_model(config), data, tokenizer_file)
    say(f"training both to a held-out loss of {target:.2f}")
    packed_s, packed_steps, packed_loss = seconds_to(
        packed.step, lambda: held_out_loss(packed.trained.model, store), target, math.inf
    )
    plain_s, plain_steps, plain_loss = seconds_to(
        plain.step, lambda: held_out_loss(plain.model, store), target, PATIENCE * packed_s
    )
    return {
        "parameters": language_models.num_parameters(plain.model),
        "target": target,
        "packed": {"cpu_seconds": packed_s, "steps": packed_steps, "loss": packed_loss},
        "plain": {"cpu_seconds": plain_s, "steps": plain_steps, "loss": plain_loss},
        "plain_has_arrived": plain_loss <= target,
        # Where it has not, the true ratio is larger than this.
        "ratio_at_least": plain_s / packed_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp", description=__doc__)
    parser.add_argument("--data", help="a text file (default: tiny-shakespeare, if it is here)")
    parser.add_argument("--tokenizer", help="tokenizer.json, or its folder (default: GPT-NeoX's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if not options.data:
        options.data = str(_SHARED / "tiny-shakespeare" / "input.txt")
        options.tokenizer = options.tokenizer or str(_SHARED / "gpt-neox-tokenizer")
        if not Path(options.data).exists():
            print("error: no text is here: give --data FILE --tokenizer DIR", file=sys.stderr)
            return 2
    try:
        tokenizer_file = pretrained.tokenizer_file(options.tokenizer or "", "new:tiny", runs="")
        store = text.store_for(options.data, tokenizer_file)
        config = configuration(store.info.vocab_size)
        plain = PlainLoop(same_model(config), Path(options.data), tokenizer_file)
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

    to_target = time_to_loss(store, Path(options.data), tokenizer_file)
    result = {
        "benchmark": "fsdp",
        "ratio": rates["packed"] / rates["plain"],
        "useful_tokens_per_s": rates,
        "seconds_per_step": medians,
        "useful_share_of_positions": {
            name: statistics.mean(found) / (BATCH * SEQ_LEN) for name, found in useful.items()
        },
        "parameters": language_models.num_parameters(packed.trained.model),
        "to_equal_held_out_loss": to_target,
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
