"""A tiny model of each family of language models, trained beside transformers.

A pair of processes loads each as transformers saved it, trains it beside transformers and plain
AdamW, saves it, resumes it whole in each process, exports it, and lets transformers load that. A
kind is right if all losses on the way are those of transformers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import processes
from contract.errors import InputError
from contract.runs import RunPaths
from training import export
from training.checkpoint import checkpoints, sharded_checkpoints
from training.models import agreement, language_models, model_weights, pretrained
from training.models.language_models import WithLoss
from training.system import storage

#: Largest difference between a loss here and that of transformers, in nats.
TOLERANCE: Final = 1e-4
_VOCAB: Final = 257
_STEPS: Final = 3
_CPU: Final = torch.device("cpu")
_LR: Final = 3e-3

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT: Final = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_SHORT_WINDOW: Final = {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8}
_LATENT: Final = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

#: Type of a model -> what its configuration has beside, or instead of, the sizes of all.
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bert": {},
    "cohere": {"logit_scale": 0.25},
    "deepseek_v3": _LATENT,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {"head_dim": 8},
    "gemma2": _SHORT_WINDOW,
    "gemma3_text": _SHORT_WINDOW,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt2": _GPT,
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "jamba": {"num_experts": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "llama": {},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8},
    "mamba2": {"head_dim": 16, "num_heads": 4, "state_size": 8, "n_groups": 2},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "smollm3": {},
}


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of one kind of model."""

    kind: str
    difference: float = 0.0
    """Largest difference between a loss here and that of transformers, in nats."""
    refused: str = ""
    """Reason why it is not trained; empty if it is."""
    packs: bool = False
    """Packed documents are kept apart."""

    @property
    def is_right(self) -> bool:
        return not self.refused and self.difference <= TOLERANCE

    def note(self, found: float, expected: float) -> None:
        """Compare two losses."""
        gap = abs(found - expected)
        self.difference = max(self.difference, gap if gap == gap else float("inf"))


def measure(kinds: Iterable[str], folder: Path) -> list[Outcome]:
    """Try kinds of ``FAMILIES`` one after the other, in a pair of processes.

    Args:
        folder: for models, checkpoints and exports; it stays as small as one of them.
    """
    first, _ = processes.run(2, _pair, tuple(kinds), str(folder))
    return [Outcome(**values) for values in json.loads(first)]


def _pair(kinds: tuple[str, ...], folder: str) -> str:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    found = []
    for kind in kinds:
        outcome = Outcome(kind=kind)
        try:
            _try(outcome, Path(folder) / kind, group)
        except InputError as error:
            outcome.refused = str(error)
        found.append(asdict(outcome))
        dist.barrier()
        if dist.get_rank() == 0:
            storage.remove_folder(str(Path(folder) / kind))
    return json.dumps(found)


def _try(outcome: Outcome, folder: Path, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    # The same steps in transformers; only the first process needs it.
    reference = _reference(outcome.kind, folder / "base") if rank == 0 else None
    dist.barrier()
    values = json.loads((folder / "base" / "config.json").read_text("utf-8"))

    def build(shape: tuple[int, ...]) -> tuple[WithLoss, torch.optim.Optimizer]:
        trained = WithLoss(language_models.build_on_meta(pretrained.config_of(values)))
        if shape:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard",))
            language_models.shard(trained, mesh, bf16=False)
        model_weights.allocate(trained.model, _CPU)
        return trained, torch.optim.AdamW(trained.model.parameters(), lr=_LR)

    trained, optimizer = build((2,))
    model_weights.load(trained.model, folder / "base")
    agreement.check(trained, device=_CPU, isolates=False, is_exact=True)
    outcome.packs = _packs(trained)
    outcome.note(_loss(trained), _loss_of(reference))
    for step in range(_STEPS):
        _step(trained, optimizer, _tokens(step)[rank::2])
        if reference is not None:
            reference.step(step)
    after = _loss(trained)
    outcome.note(after, _loss_of(reference, after))

    state = {"position": asdict(checkpoints.Position(step=_STEPS)), "config": {"recipe": "fsdp"}}
    uri = sharded_checkpoints.write_checkpoint(
        str(folder),
        _STEPS,
        sharded_checkpoints.state_of(trained.model, optimizer),
        files={
            "state.json": json.dumps(state).encode(),
            "config.json": json.dumps(values).encode(),
        },
        group=group,
    )
    dist.barrier()
    found = sharded_checkpoints.Found(uri)
    whole, its_optimizer = build(())
    found.load(whole.model, its_optimizer)
    outcome.note(_loss(whole), after)
    _step(trained, optimizer, _tokens(_STEPS)[rank::2])
    _step(whole, its_optimizer, _tokens(_STEPS))
    outcome.note(_loss(whole), _loss(trained))
    if rank == 0:
        place = export.export(found, str(folder / "exported"))
        outcome.note(_Reference(from_pretrained(place)).loss(), after)
    assert RunPaths(str(folder)).checkpoint(_STEPS) == uri


class _Reference:
    """A model of transformers, and plain training of it."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)

    def step(self, number: int) -> None:
        self._cross_entropy(_tokens(number)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self) -> float:
        with torch.no_grad():
            return self._cross_entropy(_tokens(0)).item()

    def _cross_entropy(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1]).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _reference(kind: str, folder: Path) -> _Reference | None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SIZES, **FAMILIES[kind]})
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases that are not 0 and norms that are not 1: a lost one shows.
            parameter.add_(torch.randn_like(parameter) * 0.02)
    of: Any = model
    of.save_pretrained(folder)
    return _Reference(model)


def from_pretrained(place: str) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(place, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    return model


def _loss_of(reference: _Reference | None, otherwise: float | None = None) -> float:
    """The reference's loss; the other process takes its own, since it has none to compare with."""
    box = [reference.loss() if reference is not None else otherwise]
    dist.broadcast_object_list(box, src=0)
    (loss,) = box
    assert loss is not None
    return loss


def _packs(trained: WithLoss) -> bool:
    try:
        agreement.check(trained, device=_CPU, isolates=True, is_exact=True)
    except InputError:
        return False
    return True


def _loss(trained: WithLoss) -> float:
    trained.eval()
    with torch.no_grad():
        loss = float(trained(_tokens(0)))
    reshard = getattr(trained, "reshard", None)
    if reshard is not None:  # what the root keeps whole is stale after the next step
        reshard()
    return loss


def _step(trained: WithLoss, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    trained.eval()  # no dropout: the steps are to be the same
    trained(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, _VOCAB, (4, 25), generator=generator)
