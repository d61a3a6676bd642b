"""What a store of tokens says of itself: ``store.json``, written when all else is there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from contract.errors import InputError

FORMAT: Final = 1
STORE_FILE: Final = "store.json"
DTYPES: Final = ("uint16", "uint32")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """What a store holds; ``store.json`` beside the tokens."""

    format: int
    key: str
    """Hash of the text's files, the tokenizer and the split: the same key, the same tokens."""
    tokenizer: str
    """SHA-256 of the tokenizer's file."""
    vocab_size: int
    end_of_text: int
    """Id of the token that ends each document."""
    dtype: str
    num_documents: int
    num_train_tokens: int
    num_held_out_tokens: int
    num_train_conversations: int = 0
    """0: the store is of text."""
    num_held_out_conversations: int = 0
    num_left_out: int = 0
    """Conversations without an answer to learn."""
    stops: tuple[int, ...] = ()
    """Ids of the tokens that end answers."""
    train_shards: tuple[int, ...] = ()
    """Of a store that is streamed (``training.data.streams``), the tokens in each of its files."""
    held_out_shards: tuple[int, ...] = ()
    """The same of the held-out part."""

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """
        Raises:
            ValueError: it is no JSON.
            TypeError: it is of something else.
        """
        values = dict(json.loads(content))
        lists = {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
        return cls(**values | lists)

    @property
    def is_chat(self) -> bool:
        return self.num_train_conversations > 0


def read_info(folder: Path) -> StoreInfo:
    """Of the store in a folder.

    Raises:
        InputError: it is no store, or one of another version.
    """
    try:
        content = (folder / STORE_FILE).read_bytes()
    except OSError as error:
        raise InputError(f"{folder} is no token store ({error}): build it again") from None
    return info_of(content, str(folder))


def info_of(content: bytes, folder: str) -> StoreInfo:
    """Of what ``store.json`` of a folder holds.

    Raises:
        InputError: it is no store, or one of another version.
    """
    try:
        info = StoreInfo.from_json(content)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder} is no token store ({error}): build it again") from None
    if info.format != FORMAT:
        raise InputError(f"{folder} has format {info.format}, not {FORMAT}: remove it")
    # Of other types numpy would make other things of the file, such as addresses in memory.
    numbers = [info.vocab_size, info.end_of_text, info.num_train_tokens, info.num_held_out_tokens]
    numbers += [info.num_train_conversations, info.num_held_out_conversations]
    lists = (info.stops, info.train_shards, info.held_out_shards)
    is_whole = all(isinstance(each, tuple) for each in lists)
    numbers += [number for each in lists if is_whole for number in each]
    if (
        info.dtype not in DTYPES
        or not is_whole
        or not all(type(each) is int and each >= 0 for each in numbers)
    ):
        raise InputError(f"{folder} is no token store ({STORE_FILE}): build it again")
    return info
