"""A model's tokenizer with what the model's own files say of it: the token that ends a text, the
tokens that have a name, and the chat template. Needs neither torch nor transformers."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from store import storage

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
GENERATION_FILE: Final = "generation_config.json"
#: What is published beside a tokenizer and belongs to it.
FILES: Final = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE)
#: What the end of a document is called by the tokenizers that are in use, where no file says it.
END_OF_TEXT: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>")
#: For a tokenizer that has no template. Needs no tokens of its own but the end of a text.
PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ message.role | capitalize + ':\\n' + message.content | trim }}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}"
    "{% endfor %}"
    "{{ 'Assistant:\\n' if add_generation_prompt else '' }}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer, and the tokens of it that mean something."""

    tokenizer: Any
    """``tokenizers.Tokenizer``, without padding and truncation."""
    size: int
    """Number of tokens, added ones included."""
    end_of_text: int
    """Id of the token that ends each document."""
    named: Mapping[str, str]
    """Tokens by the names that templates know: ``eos_token``, ``bos_token``, ..."""
    special: frozenset[int]
    """Ids of tokens that no text of a user becomes, such as the ends of turns."""
    template: str
    """Chat template, in Jinja: the model's own, or ``PLAIN_TEMPLATE`` after what begins a text."""
    has_template: bool
    """It is the model's own, or was given."""
    marks: tuple[str, ...]
    """Settings that change how a text is tokenized, besides ``tokenizer.json``; they are part of
    the key under which a prepared text is stored."""

    def digest_of_template(self) -> str:
        """Hash of all that decides how a conversation is written."""
        parts = [self.template, *(f"{name}={self.named[name]}" for name in sorted(self.named))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def read(place: Path, *, template: str = "") -> Vocabulary:
    """The tokenizer of a file or folder, and what the files beside it say.

    Args:
        place: a ``tokenizer.json``, or the folder that holds it.
        template: a file that holds another chat template.

    Raises:
        InputError: a file cannot be read, or no token ends a text.
    """
    from tokenizers import Tokenizer

    path = tokenizer_file(place)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer {path} cannot be read ({error})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = read_json(path.with_name(CONFIG_FILE))
    texts = {name: _content(each) for name, each in config.items() if name.endswith("_token")}
    named = {
        name: text
        for name, text in texts.items()
        if text and tokenizer.token_to_id(text) is not None
    }
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, each in added.items() if each.special}
    by_name = next((name for name in END_OF_TEXT if tokenizer.token_to_id(name) is not None), None)
    end = named.get("eos_token") or _by_id(tokenizer, path.parent, special) or by_name
    if end is None:
        raise InputError(
            f"tokenizer {path} has no end-of-text token: {CONFIG_FILE} names no eos_token, and "
            f"it has none of {', '.join(END_OF_TEXT)}"
        )
    number = tokenizer.token_to_id(end)
    assert number is not None, end
    own = _read_template(template) or _template(path, config)
    marks = [] if end == by_name else [f"end={end}"]
    if tokenizer.num_special_tokens_to_add(False):
        marks.append("special")
    return Vocabulary(
        tokenizer=tokenizer,
        size=tokenizer.get_vocab_size(with_added_tokens=True),
        end_of_text=number,
        named={**named, "eos_token": end},
        special=frozenset({*special, number}),
        template=own or _plain(tokenizer, named.get("bos_token"), end),
        has_template=bool(own),
        marks=tuple(marks),
    )


def _plain(tokenizer: Any, begin: str | None, end: str) -> str:
    """``PLAIN_TEMPLATE`` after the token that begins a text, which is not the one that ends it
    unless the tokenizer itself puts it there."""
    first = tokenizer.encode("").tokens[:1]
    return "{{ bos_token }}" * (first == [begin] or begin not in (None, end)) + PLAIN_TEMPLATE


def tokenizer_file(place: Path) -> Path:
    """The ``tokenizer.json`` of a file or folder."""
    return place / TOKENIZER_FILE if place.is_dir() else place


def _content(value: object) -> str:
    """A token as ``tokenizer_config.json`` has it: its text, or an object that holds it."""
    found = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(found, str) or re.search("[\ud800-\udfff]", found):
        return ""  # halves of characters, which no tokenizer takes
    return found


def _by_id(tokenizer: Any, folder: Path, special: set[int]) -> str | None:
    """The end of a text by its number in the model's configuration, if such a token exists."""
    for values in (read_json(folder / GENERATION_FILE), read_json(folder / "config.json")):
        for number in ids(values.get("eos_token_id")):
            if number in special:
                found: str = tokenizer.id_to_token(number)
                return found
    return None


def ids(value: object) -> list[int]:
    """Ids as a configuration has them: one, a list, or none."""
    found = value if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, int)]


def _read_template(template: str) -> str:
    if not template:
        return ""
    place = template if storage.is_s3(template) else str(Path(template).expanduser())
    try:
        content = storage.read_bytes(place)
        if content is not None:
            return content.decode()
        error: Exception | str = "there is no such file"
    except (OSError, UnicodeDecodeError) as failure:
        error = failure
    raise InputError(f"--chat-template {template} cannot be read: {error}")


def _template(path: Path, config: Mapping[str, object]) -> str:
    """The chat template that is published with a tokenizer; empty without one."""
    file = path.with_name(TEMPLATE_FILE)
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    for each in found if isinstance(found, list) else []:  # several, by name
        if isinstance(each, Mapping) and each.get("name") == "default":
            found = each.get("template")
    return found if isinstance(found, str) else ""


def read_json(path: Path) -> Mapping[str, object]:
    """A JSON object; empty where there is none.

    Raises:
        InputError: the file is no JSON.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return values if isinstance(values, Mapping) else {}
