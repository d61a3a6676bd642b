"""A language model step of this project beside the competent way and the published reference.

    python -m benchmarks.fsdp [--data FILE --tokenizer DIR] [--json]

One process, in fp32 on the CPU. The competent way is transformers' Trainer on packed sequences with
fused AdamW (``benchmarks.trainer_loop``); it sees the same sequences in the same order from the
same weights, so its losses must be the same. The published reference pads every line of the text on
the left to 256 tokens, has the padding among the labels, stores its logits, recomputes every block
and takes AdamW as it comes. All three take turns, step by step; a token counts once, and padding
does not.
"""

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from benchmarks import trainer_loop
from benchmarks.output import command_line, report, say
from contract.errors import InputError
from training.data import text
from training.data.feed import SequenceOrder, windows
from training.loop import optimizers
from training.models import language_models, model_weights, pretrained
from training.models.language_models import WithLoss
from training.recipes.fsdp.loop import clip

_SHARED: Final = Path(__file__).parents[2] / "shared" / "data"
SEQ_LEN: Final = 256
BATCH: Final = 14  # 3,584 positions a step in all loops
ROUNDS: Final = 5
#: Of the reference, which is slow.
REFERENCE_ROUNDS: Final = 2
LR: Final = 3e-3
WEIGHT_DECAY: Final = 0.1
MAX_GRAD_NORM: Final = 1.0
THREADS: Final = 2


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
        use_cache=False,
    )


class ReferenceLoop:
    """What the published reference does with the same model, text and machine."""

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


class OwnLoop:
    """This project's parts, put together as the recipe does it."""

    def __init__(self, model: nn.Module, store: text.TokenStore, order: SequenceOrder) -> None:
        self.trained = WithLoss(model.train())
        self.optimizer = optimizers.build(
            model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, device=torch.device("cpu")
        )
        self.tokens, self.order = store.train, order
        self.losses: list[float] = []

    def step(self, number: int) -> int:
        """Train one step; return how many tokens it predicts."""
        batch = windows(self.tokens, self.order.sequences(number), self.order.seq_len)
        loss = self.trained(torch.from_numpy(batch))
        loss.backward()
        clip(self.trained.model, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        return BATCH * SEQ_LEN


def same_model(config: Any) -> nn.Module:
    model = language_models.build_on_meta(config)
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=0)
    return model


def settings(steps: int) -> trainer_loop.Settings:
    """The Trainer's."""
    return trainer_loop.Settings(
        steps=steps,
        seq_len=SEQ_LEN,
        microbatch=BATCH,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )


class Turns:
    """The other loops take a step whenever the Trainer has taken one.

    Of the Trainer all is timed that it does from one step's end to the next.
    """

    def __init__(self, own: OwnLoop, reference: ReferenceLoop) -> None:
        self._steps = {"own": own.step, "reference": reference.step}
        self.seconds: dict[str, list[float]] = {"own": [], "trainer": [], "reference": []}
        self.useful: dict[str, list[int]] = {"own": [], "trainer": [], "reference": []}
        self._resumed_at = time.perf_counter()

    def on_step_end(self, number: int) -> None:
        """After step ``number`` of the Trainer, counted from 1."""
        spent = {"trainer": time.perf_counter() - self._resumed_at}
        tokens = {"trainer": BATCH * SEQ_LEN}
        for name, step in self._steps.items():
            if name == "reference" and number > 1 + REFERENCE_ROUNDS:
                continue
            began = time.perf_counter()
            tokens[name] = step(number - 1)
            spent[name] = time.perf_counter() - began
        rates = ", ".join(f"{name} {tokens[name] / spent[name]:.0f}" for name in spent)
        say(f"round {number - 1} of {ROUNDS}: {rates} tokens/s")
        if number > 1:  # the first step of each is not like the others
            for name in spent:
                self.seconds[name].append(spent[name])
                self.useful[name].append(tokens[name])
        self._resumed_at = time.perf_counter()


def order_of(store: text.TokenStore) -> SequenceOrder:
    return SequenceOrder(num_tokens=len(store.train), seq_len=SEQ_LEN, global_batch=BATCH, seed=0)


def main() -> int:
    parser = command_line("fsdp", __doc__)
    parser.add_argument("--data", help="a text file (default: tiny-shakespeare, if it is here)")
    parser.add_argument("--tokenizer", help="tokenizer.json, or its folder (default: GPT-NeoX's)")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if not options.data:
        options.data = str(_SHARED / "tiny-shakespeare" / "input.txt")
        options.tokenizer = options.tokenizer or str(_SHARED / "gpt-neox-tokenizer")
        if not Path(options.data).exists():
            print("error: no text is here: give --data FILE --tokenizer DIR", file=sys.stderr)
            return 2
    try:
        tokenizer_file = pretrained.tokenizer_file(options.tokenizer or "", "new:tiny", runs="")
        store = text.store_for(options.data, tokenizer_file)
        order = order_of(store)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = configuration(store.info.vocab_size)
    own = OwnLoop(same_model(config), store, order)
    turns = Turns(own, ReferenceLoop(same_model(config), Path(options.data), tokenizer_file))
    trainer_losses = trainer_loop.train(
        same_model(config),
        store.train,
        order,
        settings(ROUNDS + 1),
        on_step_end=turns.on_step_end,
    )
    medians = {name: statistics.median(found) for name, found in turns.seconds.items()}
    rates = {name: statistics.mean(turns.useful[name]) / medians[name] for name in medians}
    result = {
        "benchmark": "fsdp",
        "ratio": rates["own"] / rates["trainer"],
        "reference_ratio": rates["own"] / rates["reference"],
        "ratio_is_of": "tokens/s to transformers' Trainer, packed, fused AdamW",
        "reference_ratio_is_of": "useful tokens/s to the published reference, which pads each line",
        "useful_tokens_per_s": rates,
        "seconds_per_step": medians,
        "useful_share_of_positions": {
            name: statistics.mean(found) / (BATCH * SEQ_LEN) for name, found in turns.useful.items()
        },
        "parameters": language_models.num_parameters(own.trained.model),
        "losses": {"own": own.losses, "trainer": trainer_losses},
        "largest_difference_of_losses": max(
            abs(a - b) for a, b in zip(own.losses, trainer_losses, strict=True)
        ),
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
