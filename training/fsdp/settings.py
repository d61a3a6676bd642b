"""Settings and presets of the FSDP recipe. Standard library only."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from contract.errors import InputError
from contract.text import counted
from training.models.estimates import MOMENTS, RECOMPUTE, REDUCE_DTYPES
from training.settings import PRECISIONS, TrainingConfig, Value, best_option, option

#: Evaluations in a run that is not told how often: a curve to look at, for a percent of the time.
_EVALUATIONS: Final = 20
#: Steps between them at least, so that a short run does not spend its time on them.
_LEAST_STEPS: Final = 50
#: Tokens of a sample of a model that is not sharded.
_SAMPLED: Final = 40
#: Bits of frozen weights that are packed.
PACKED_BITS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig(TrainingConfig):
    """Fully sharded training of a causal language model (``training.fsdp.train``)."""

    model: str = option(
        help="Hugging Face id (id@revision), folder or s3:// address of a model, in safetensors or "
        "as pytorch_model.bin; or new:SHAPE, a folder's config.json or one of tiny, 160m, 400m, "
        "2.8b, 6.9b, with random weights",
        default="new:tiny",
    )
    tokenizer: str = option(
        "",
        help="tokenizer.json, its folder, s3:// address or Hugging Face id (default: the model's; "
        "bytes for new:SHAPE)",
        same_on_resume=False,
    )  # its content is what must match, and the store's key carries it
    text_key: str = option(
        "", help="hash of text, tokenizer and split; decided when the text is read", cli=False
    )
    text_field: str = option(
        "text",
        help="field of a .jsonl line or column of a table that holds a document or "
        "messages (default: text; else messages, conversations, or pairs such as prompt and "
        "completion)",
    )
    columns: str = option(
        "",
        help="columns of a table by what they hold, such as prompt=instruction,answer=output",
    )
    skip_bad_rows: bool = option(
        False, help="leave out rows that cannot be used (default: they are shown and refused)"
    )
    validation: str = option(
        "",
        help="file, folder or address of a text to evaluate on (default: a share of --data is "
        "held out)",
        same_on_resume=False,
    )  # its content is what must match, and the store's key carries it
    chat_template: str = option(
        "",
        help="file or s3:// address of a chat template in Jinja (default: the tokenizer's; a plain "
        "one where it has none)",
        same_on_resume=False,
    )  # its content is what must match, and the store's key carries it
    held_out_every: int = option(20, low=2, help="one document in so many is held out")
    isolate_documents: bool = option(
        False, help="attention stays within a document (default: the whole sequence)"
    )
    packing: bool = option(
        True,
        help="several conversations share a sequence; without it each has one to itself, for "
        "models that do not keep packed ones apart",
    )
    seq_len: int = option(1024, low=8, high=2**20, help="tokens per sequence")
    global_batch: int = option(
        64, low=1, help="sequences per step over all workers; the same on any number of them"
    )
    microbatch: int = option(
        4,
        low=1,
        help="most sequences that a worker computes at once, in one pass; fewer workers take more "
        "passes",
        same_on_resume=False,
    )
    reduce_dtype: str = option(
        "fp32",
        choices=tuple(REDUCE_DTYPES),
        help="type in which gradients are exchanged; bf16 sends half, and rounds each sum",
        same_on_resume=False,
    )
    lr: float = option(2e-5, above=0, help="peak learning rate", same_on_resume=False)
    weight_decay: float = option(0.1, low=0, high=1, help="decoupled decay of the weight matrices")
    max_grad_norm: float = option(1.0, low=0, help="gradients are clipped to this norm (0: never)")
    max_skipped_steps: int = option(
        10,
        low=0,
        help="steps in a row that are skipped because their loss or gradient is not a number; one "
        "more ends the run",
        same_on_resume=False,
    )
    optimizer: str = option(
        "adamw",
        choices=tuple(MOMENTS),
        help="adamw-8bit keeps its moments in a quarter of the memory (GPU, needs torchao)",
    )
    lora_rank: int = option(
        0,
        low=0,
        high=1024,
        help="train low-rank adapters of this rank beside the frozen weights, which are kept in "
        "the model's arithmetic (0: all weights)",
    )
    lora_alpha: int = option(
        0, low=0, help="adapters count alpha / rank beside their matrix (0: twice the rank)"
    )
    lora_targets: str = option(
        "all",
        help="matrices that get adapters, by name and separated by commas, such as q_proj,v_proj "
        "(default: all of the blocks)",
    )
    lora_dropout: float = option(
        0.0, low=0, high=0.9, help="part of an adapter's inputs that is dropped in training"
    )
    lora_bits: int = option(
        16,
        low=PACKED_BITS,
        high=16,
        help="bits of a frozen weight: 16, or 4 (NF4, as in QLoRA) in the linear layers of the "
        "blocks; on a CPU what is not in 4 bits is in fp32",
    )
    precision: str = option(
        "auto",
        choices=PRECISIONS,
        help="arithmetic of the model (auto: bf16 on a GPU that has it, else fp32); trained "
        "weights are kept and gradients reduced in fp32 either way",
    )
    recompute: str = option(
        "none",
        choices=RECOMPUTE,
        help="activations computed again in backward instead of kept: selective recomputes all "
        "but matrix products and attention, full whole blocks",
        same_on_resume=False,
    )
    compile: bool = option(
        True, help="compile each block with torch.compile, on GPUs", same_on_resume=False
    )
    evaluate_every: int = option(
        0,
        low=0,
        help="steps between two evaluations (0: 20 times in a run, in short runs every 50 steps, "
        "and at least once an epoch)",
        same_on_resume=False,
    )
    eval_sequences: int = option(
        64, low=0, help="held-out sequences evaluated, the first ones (0: all)"
    )
    checkpoint_every: int = option(
        0,
        low=0,
        help="steps between two checkpoints (0: as evaluate-every is given, else once an epoch)",
        same_on_resume=False,
    )
    keep_best: str = best_option("loss", "perplexity", use="for export --best")
    sample_tokens: int = option(
        -1,
        low=-1,
        high=4096,
        help="tokens of the samples written before and after training, each a pass over all "
        "weights (-1: 40 on one worker, else none)",
        same_on_resume=False,
    )

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if not self.lora_rank and (
            self.lora_alpha or self.lora_dropout or self.lora_targets != "all"
        ):
            raise InputError(
                "--lora-alpha, --lora-targets and --lora-dropout are of low-rank adapters: give "
                "--lora-rank too, such as 16, or leave them out"
            )
        if self.lora_bits not in (PACKED_BITS, 16):
            raise InputError(f"--lora-bits is {self.lora_bits}: choose {PACKED_BITS} or 16")
        if self.lora_bits != 16 and not self.lora_rank:
            raise InputError(
                f"--lora-bits is {self.lora_bits}, and weights in so few bits cannot be trained: "
                "give --lora-rank too, such as 16, to train adapters beside them"
            )
        if self.global_batch < self.num_workers:
            raise InputError(
                f"--global-batch is {self.global_batch}, fewer sequences than "
                f"{counted(self.num_workers, 'worker')}: each needs at least one"
            )

    def begun(self, recorded: Mapping[str, object]) -> Self:
        key: Any = recorded.get("text_key") or self.text_key
        lr: Any = recorded.get("lr") or self.lr
        return dataclasses.replace(self, text_key=key, lr=lr)

    def steps_between_evaluations(self, total_steps: int, steps_per_epoch: int) -> int:
        """Steps from one evaluation to the next.

        Args:
            total_steps: of the run.
            steps_per_epoch: in which all of the data is seen once.
        """
        if self.evaluate_every:
            return self.evaluate_every
        in_run = max(_LEAST_STEPS, -(-total_steps // _EVALUATIONS))
        return min(steps_per_epoch, in_run)

    def extra_passes(self, total_steps: int, steps_per_epoch: int) -> tuple[int, int]:
        """Passes of evaluations, at the start included, and of samples, in a whole run.

        Args:
            total_steps: of the run.
            steps_per_epoch: in which all of the data is seen once.
        """
        every = self.steps_between_evaluations(total_steps, steps_per_epoch)
        # All that is held out: as large a part of the sequences as of the documents.
        sequences = self.eval_sequences or (
            steps_per_epoch * self.global_batch // (self.held_out_every - 1)
        )
        each = -(-sequences // (self.num_workers * self.sequences_per_pass))
        return each * (1 - -total_steps // every), 2 * self.num_sampled

    @property
    def num_sampled(self) -> int:
        """Tokens of each sample."""
        if self.sample_tokens >= 0:
            return self.sample_tokens
        return _SAMPLED if self.num_workers == 1 else 0

    @property
    def num_microbatches(self) -> int:
        """Passes of each worker per step: the fewest that keep each within ``microbatch``."""
        return -(-self.global_batch // (self.num_workers * self.microbatch))

    @property
    def sequences_per_pass(self) -> int:
        """Sequences of a worker in a pass, at most; some passes have one fewer."""
        return -(-self.global_batch // (self.num_workers * self.num_microbatches))


PRESETS: Final[Mapping[str, Mapping[str, Value]]] = {
    # Full fine-tuning of a model of some billion parameters: 65,536 tokens a step.
    "finetune": {"epochs": 1},
    # Reference solution 2, dolly-v2-7b on two g5.12xlarge, with every token trained on once:
    # docs/fsdp.md has the arithmetic for 8 x 24 GB.
    "dolly": {
        "model": "databricks/dolly-v2-7b",
        "epochs": 1,
        "seq_len": 512,
        "global_batch": 64,
        # One pass per step: on machines without NVLink each pass costs two gathers.
        "microbatch": 8,
        "recompute": "full",
    },
    # One small GPU: the weights stay as they are, adapters of rank 16 are trained.
    "lora": {"epochs": 1, "lora_rank": 16, "lr": 2e-4, "recompute": "full"},
    # A GPT-NeoX of 0.8 million parameters beside its embeddings, from nothing, on a CPU.
    "tiny": {
        "model": "new:tiny",
        "epochs": 1,
        "seq_len": 128,
        "global_batch": 16,
        "microbatch": 8,
        "lr": 3e-3,
        "evaluate_every": 25,
        "report_every": 5,
        "sample_tokens": 40,
    },
}
