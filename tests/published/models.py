"""Tiny random models with the exact shape of published ones: the facts are in ``models.json``.

Each of its rows has the keys of a published ``config.json`` (without sizes of no effect), its
source, and, where a public repository has the index of the files, the names of the tensors. ``N``
in a name stands for any number. Other keys of a row:

* ``tiny``: sizes that the rules below do not know, or all of them beside the defaults of a class;
* ``tensors_extra``: tensors that the files have beside those of transformers' model;
* ``prefix``: beginning of names that the files have another one for, and that one;
* ``copied``: tensor of the files -> another one that it repeats;
* ``named``: a warning names the extra ones;
* ``refused``: a part of the sentence that refuses the model before any weight is read, and
  ``refused_late`` before it is trained.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from training.models import pretrained

VOCAB: Final = 263
ROWS: Final[Mapping[str, Mapping[str, Any]]] = {
    row["model"]: row for row in json.loads(Path(__file__).with_name("models.json").read_text())
}
KINDS: Final = {name: row["config"]["model_type"] for name, row in ROWS.items()}

#: What the sizes become, of all models and of those that have them.
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
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
_OTHERS: Final[Mapping[str, Any]] = {
    "n_embed": 32,
    "n_layer": 2,
    "n_head": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "max_window_layers": 2,
    "full_attention_interval": 2,
    "original_max_position_embeddings": 32,
    "initial_context_length": 32,
    "rotary_dim": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def config_of(name: str) -> dict[str, Any]:
    """A published ``config.json`` with small sizes, under the names that it has for them."""
    row = ROWS[name]
    published: dict[str, Any] = dict(row["config"])
    # Defaults of a class have no sizes of their own.
    sizes = _SIZES if len(published) == 1 else {**_SIZES, **_OTHERS}
    found = {
        key: sizes[key] if key in sizes and _is_size(value) else value
        for key, value in published.items()
    }
    if len(published) == 1:
        found |= _SIZES
    heads, shared = (published.get(f"num_{each}_heads") for each in ("attention", "key_value"))
    if heads and shared:
        found["num_key_value_heads"] = 1 if shared == 1 else 4 if shared == heads else 2
    if kinds := published.get("layer_types"):
        found["layer_types"] = [*dict.fromkeys(kinds)]
    if isinstance(scaling := published.get("rope_scaling"), dict):
        found["rope_scaling"] = {**scaling, "original_max_position_embeddings": 32}
    found |= row.get("tiny", {})
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int | list) and not isinstance(value, bool)


def publish(name: str, folder: Path) -> Any:
    """Write a tiny model as it is published, and return it as transformers loads it, in fp32."""
    from transformers import AutoModelForCausalLM

    row, config = ROWS[name], config_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    model = make.from_config(pretrained.config_of(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases that are not 0 and norms that are not 1: a lost one shows.
            parameter.add_(torch.randn_like(parameter) * 0.02)
    kind = config.get("torch_dtype") or config.get("dtype") or "float32"
    model.to(getattr(torch, kind)).save_pretrained(folder)
    file = folder / "model.safetensors"
    before, after = row.get("prefix", ("", ""))
    tensors = {re.sub(f"^{before}", after, each): own for each, own in load_file(file).items()}
    known = {_pattern(each) for each in tensors}
    assert known == {*row.get("tensors", known)}, known ^ {*row["tensors"]}
    for extra in row.get("tensors_extra", ()):
        of = row.get("copied", {}).get(extra)
        tensors[extra.replace(".N.", ".0.")] = tensors[of].clone() if of else torch.ones(2)
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if "generation" in row:
        (folder / "generation_config.json").write_text(json.dumps(row["generation"]))
    return from_pretrained(folder, has_more=bool(row.get("tensors_extra")))


def from_pretrained(folder: Path | str, *, has_more: bool = False) -> Any:
    """A model as transformers loads it, in fp32: it finds all of the weights, and no others unless
    the files have more."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], report
    assert has_more or not report["unexpected_keys"], report
    return model


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
