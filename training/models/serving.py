"""Files that a model is served with: tokenizer, chat template and stop tokens, as transformers
reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from training.data import vocabulary
from training.data.vocabulary import (
    CONFIG_FILE,
    FILES,
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    ids,
)

__all__ = ["FILES", "TOKENIZER_CLASS", "files", "stops_of"]

#: Known to every version of transformers, and to what is built on one.
TOKENIZER_CLASS: Final = "PreTrainedTokenizerFast"
#: Earlier versions of transformers do not know the name that version 5 gives the same class.
_NEW_CLASSES: Final = ("TokenizersBackend", "")


def files(tokenizer: Path, *, template: str, stops: Sequence[int]) -> dict[str, bytes]:
    """The files, by name.

    Args:
        tokenizer: ``tokenizer.json``, with what was published beside it.
        template: a file with another chat template; empty: the tokenizer's.
        stops: ids of the tokens that end the answers that were trained on; none for a run on text.

    Raises:
        InputError: one of those that are there cannot be read.
    """
    words = vocabulary.read(tokenizer, template=template)
    path = vocabulary.tokenizer_file(tokenizer)
    config: dict[str, Any] = dict(vocabulary.read_json(path.with_name(CONFIG_FILE)))
    config |= words.named  # as plain text, which every version reads
    if str(config.get("tokenizer_class", "")) in _NEW_CLASSES:
        config["tokenizer_class"] = TOKENIZER_CLASS
    found = {TOKENIZER_FILE: path.read_bytes()}
    if stops or words.has_template:
        found[TEMPLATE_FILE] = words.template.encode()
        config["chat_template"] = words.template  # where llama.cpp and older versions look
    generation = dict(vocabulary.read_json(path.with_name(GENERATION_FILE)))
    generation.pop("_from_model_config", None)  # transformers would make it anew
    learned = stops or [words.end_of_text]
    ends = [*dict.fromkeys([*learned, *ids(generation.get("eos_token_id"))])]
    generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    for name in ("bos_token", "pad_token"):
        if name in words.named:
            generation[f"{name}_id"] = words.tokenizer.token_to_id(words.named[name])
    generation.setdefault("pad_token_id", words.end_of_text)
    found[CONFIG_FILE] = _bytes(config)
    found[GENERATION_FILE] = _bytes(generation)
    return found


def stops_of(generation: bytes | None) -> list[int]:
    """Ids of the tokens that end an answer, from a ``generation_config.json``.

    Raises:
        InputError: it is no JSON.
    """
    try:
        values = json.loads(generation or b"{}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{GENERATION_FILE} cannot be read: {error}") from None
    return ids(values.get("eos_token_id")) if isinstance(values, dict) else []


def _bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()
