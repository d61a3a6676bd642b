"""The FSDP recipe's model: built, filled with its first weights, and described in checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from contract.errors import InputError
from training.data import vocabulary
from training.data.rows import TokenStore
from training.fsdp import estimate
from training.fsdp.settings import PACKED_BITS, FsdpConfig
from training.models import (
    language_models,
    lora,
    model_weights,
    nf4,
    pretrained,
    serving,
)


def build(config: FsdpConfig, store: TokenStore) -> tuple[nn.Module, Any, list[str]]:
    """The model on the meta device, its transformers configuration, and what to tell the user.

    Tokens of the text that the model does not know get rows of their own in its embeddings. Those
    that only the tokenizer has, such as Gemma 3's for pictures, get none.

    Raises:
        InputError: there is no such model, or it is not for this text, length of sequence, adapters
            or bits.
    """
    notes: list[str] = []
    num_tokens = store.info.vocab_size
    model_config = pretrained.model_config(
        config.model, runs=config.storage, vocab_size=num_tokens, notes=notes
    )
    known = model_config.vocab_size
    if num_tokens > known and store.largest_id >= known:
        sizes = f"the tokenizer has {num_tokens:,} tokens, model {config.model} knows {known:,}"
        if not _is_extended(config, known):
            raise InputError(
                f"{sizes}, and others under the same ids: give the model's own --tokenizer, or one "
                "to which tokens were added"
            )
        model_config.vocab_size = num_tokens
        how = ", trained whole beside the adapters" if config.lora_rank else ""
        notes.append(f"{sizes}: its embeddings get {num_tokens - known:,} more rows{how}")
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest and config.seq_len > longest:
        raise InputError(
            f"--seq-len is {config.seq_len}, model {config.model} has {longest} positions: use at "
            f"most {longest}"
        )
    short = language_models.short_length(model_config)
    if 0 < short < config.seq_len and (store.info.is_chat or config.isolate_documents):
        kind = model_config.rope_parameters.get("rope_type")
        raise InputError(
            f"--seq-len is {config.seq_len}, and model {config.model} ({kind} rope) computes all "
            f"documents of a pass in another way once one is longer than {short}: use at most "
            f"{short}, or text without --isolate-documents"
        )
    model, note = _built(config, model_config)
    notes += language_models.of_the_loss(model)
    return model, model_config, [*notes, *filter(None, [note])]


def _is_extended(config: FsdpConfig, known: int) -> bool:
    """True if a run's tokenizer starts with the tokens that its model knows, under the same ids."""
    if not config.tokenizer or pretrained.is_new(config.model):
        return True
    own, extended = (
        vocabulary.read(
            pretrained.tokenizer_file(each, config.model, runs=config.storage)
        ).tokenizer.get_vocab()
        for each in ("", config.tokenizer)
    )
    return all(extended.get(token) == id_ for token, id_ in own.items() if id_ < known)


def _rows(config: FsdpConfig, model_config: Any) -> int:
    """Rows of the embeddings in the files of a run's model, where training adds some; else 0."""
    if pretrained.is_new(config.model):
        return 0
    known = pretrained.num_tokens(config.model, runs=config.storage)
    return known if known < model_config.vocab_size else 0


def _built(config: FsdpConfig, model_config: Any) -> tuple[nn.Module, str]:
    """The model on the meta device, with its adapters, and what to tell the user."""
    model = language_models.build_on_meta(model_config)
    note = ""
    if config.lora_bits == PACKED_BITS and language_models.state_space_layers(model):
        raise InputError(
            "--lora-bits is 4, and this model has state-space layers, which read their weights "
            "themselves, where four bits cannot stand for them: leave --lora-bits out"
        )
    if config.lora_rank:
        note = lora.add(
            model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            dropout=config.lora_dropout,
        )
        if _rows(config, model_config):
            for each in model_weights.embeddings(model):
                each.requires_grad_()
    if config.lora_bits == PACKED_BITS:
        nf4.replace(language_models.blocks(model))
    return model, note


def fill(model: nn.Module, config: FsdpConfig) -> list[str]:
    """Give a model its first weights; each process fills its own shards. Return what to tell the
    user."""
    if pretrained.is_new(config.model):
        model_weights.initialise(model, seed=config.seed)
        return []
    note = model_weights.load(
        model,
        pretrained.weights_folder(config.model, runs=config.storage),
        seed=config.seed,
        num_tokens=_rows(config, model.config),
    )
    return [note] if note else []


def rebuild(
    settings: Mapping[str, object], model_config: Mapping[str, object], device: torch.device
) -> nn.Module:
    """A run's model before training, for one process, wherever and however it was trained. On a GPU
    its weights are in bf16, which takes half the memory.

    Args:
        model_config: from the ``config.json`` of a checkpoint. The training text, whose tokenizer
            set the size of the vocabulary, may no longer exist.

    Raises:
        InputError: the model that the run starts from is no longer available, or is too large for
            the GPU.
    """
    config = FsdpConfig.from_json({**settings, "num_workers": 1})
    model, _ = _built(config, pretrained.config_of(model_config, model=config.model))
    if device.type == "cuda":
        language_models.keep_in_bf16(model, only_frozen=False)
        free, _ = torch.cuda.mem_get_info(device)
        estimate.check_fits(model, free, torch.cuda.get_device_name(device))
    model_weights.allocate(model, device)
    fill(model, config)
    return model


def describe(config: FsdpConfig, model_config: Any, store: TokenStore) -> dict[str, bytes]:
    """The small files of a checkpoint that make a model of its weights."""
    tokenizer = pretrained.tokenizer_file(config.tokenizer, config.model, runs=config.storage)
    return {
        pretrained.CONFIG_FILE: model_config.to_json_string(use_diff=False).encode(),
        **serving.files(tokenizer, template=config.chat_template, stops=store.info.stops),
    }
