"""Models and tokenizers from a folder, S3, the Hugging Face Hub, or from random weights.

Everything ends up as a folder on this node. What comes from the Hub is put into the bucket of the
runs by the first who fetches it, so that eight workers take it from there, free of charge for
traffic, and need no token of the Hub.
"""

import contextlib
import hashlib
import re
import textwrap
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError, UnreachableError
from store import storage
from training.data import hub, sources, vocabulary
from training.data.vocabulary import TOKENIZER_FILE
from training.models import conversion, weight_files
from training.models.model_shapes import SHAPES, read_config

NEW: Final = "new:"
CONFIG_FILE: Final = "config.json"
BYTES: Final = "bytes"
END_OF_TEXT: Final = "<|endoftext|>"
#: Below the storage of the runs: hidden, so that nothing takes it for a run.
SHARED_CACHE: Final = ".cache"

_COMPLETE: Final = ".complete"
_MODEL_FILES: Final = ("*.json", "*.jinja", "*.safetensors")
_PINNED: Final = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)@(.+)")


def is_new(model: str) -> bool:
    """True if the model name asks for random weights."""
    return model.startswith(NEW)


def revision_of(model: str) -> tuple[str, str]:
    """A model without the revision that a Hugging Face id may name, and that revision, or nothing.

    The "@" of a folder or of an address is a part of its name.
    """
    found = None if Path(model).is_dir() else _PINNED.fullmatch(model)
    return (found[1], found[2]) if found else (model, "")


def model_config(
    model: str, *, runs: str, vocab_size: int = 0, notes: list[str] | None = None
) -> Any:
    """The transformers configuration of a model, as its weights are.

    Args:
        model: as in ``FsdpConfig.model``.
        runs: storage of the runs.
        vocab_size: of the tokenizer; a built-in shape takes it, rounded up to a multiple of 128.
        notes: takes what to tell the user.

    Raises:
        InputError: there is no such model, or transformers does not know its type.
    """
    shape = model.removeprefix(NEW)
    if is_new(model) and shape in SHAPES:
        values = dict(SHAPES[shape])
        if vocab_size:
            values["vocab_size"] = -(-vocab_size // 128) * 128
    else:
        values = read_config(model_folder(model, runs=runs) / CONFIG_FILE)
    config = config_of(values, model=model)
    if not is_new(model):
        from training.models import model_weights

        if note := model_weights.untie(config, weights_folder(model, runs=runs)):
            (notes if notes is not None else []).append(note)
    return config


def num_tokens(model: str, *, runs: str) -> int:
    """Tokens that a model with weights knows."""
    values = read_config(model_folder(model, runs=runs) / CONFIG_FILE)
    return int(config_of(values, model=model).vocab_size)


def config_of(values: Mapping[str, object], *, model: str = "") -> Any:
    """The transformers configuration that a ``config.json`` holds.

    Args:
        model: what a user calls the model.

    Raises:
        InputError: transformers does not know its type, or cannot use it, or it reads pictures or
            sound too.
    """
    from transformers import AutoConfig, PreTrainedConfig

    # JSON has no infinity; transformers writes it in a way of its own. It changes what it is given.
    decode: Any = PreTrainedConfig._decode_special_floats
    rest: dict[str, Any] = decode(deepcopy(dict(values)))
    kind = rest.pop("model_type", None)
    try:
        config: Any = AutoConfig.for_model(kind, **rest)
        is_text = config.get_text_config() is config
    except MemoryError:
        raise
    except Exception as error:  # whatever the checks of a kind come upon
        reason = textwrap.shorten(str(error), 200)  # it may list all types that there are
        raise InputError(
            f"model {model}: transformers cannot use its {CONFIG_FILE}: {reason}"
        ) from None
    if not is_text:
        raise InputError(
            f"model {model} is of type {kind!r}, which reads more than text: give a model of text"
        )
    # What transformers 5 has renamed or put into ``rope_parameters``, under the names that version
    # 4 and other programs read. They take other values without a word.
    known = config.to_dict()
    older = {old: known[new] for old, new in config.attribute_map.items() if new in known}
    rope = dict(known.get("rope_parameters") or {})
    if sliding := rope.get("sliding_attention"):
        older["rope_local_base_freq"] = sliding["rope_theta"]
        rope = dict(rope["full_attention"])
    older |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope and (scaled := rope.get("rope_type")) != "proportional":  # version 4 has none
        older["rope_scaling"] = rope if scaled not in (None, "default") else None
    for key, value in {**older, **values}.items():
        if key not in known and ("rope" in key or "rotary" in key or key in older):
            config.__dict__[key] = value  # only to be written: as attributes, some change others
    return config


def weights_folder(model: str, *, runs: str) -> Path:
    """Folder on this node with a model's ``config.json`` and its weights in safetensors.

    Raises:
        InputError: there is no such model, or it has no weights that can be used.
    """
    return conversion.with_weights(model_folder(model, runs=runs), model)


def check_weights(model: str, *, runs: str) -> None:
    """Look whether a model is there and has weights, before they and PyTorch are loaded.

    For runs in a bucket, whether it is there is left to ``weights_folder``.

    Raises:
        InputError: there is none, or it has none that can be used.
    """
    names: list[str] | None = None
    if (path := Path(model).expanduser()).is_dir():
        names = [each.name for each in path.iterdir()]
    elif "://" not in model and not is_new(model):
        copy = _shared_copy(model, _MODEL_FILES, runs=runs)
        if copy is None:
            _folder(model, (CONFIG_FILE,), runs=runs, what="model")
        if copy is None or not storage.exists(storage.join(copy, _COMPLETE)):
            with contextlib.suppress(UnreachableError):  # it may be in the cache
                names = hub.names(model)
    if names is not None and not is_new(model):
        weight_files.check_weights(names, model)


def model_folder(model: str, *, runs: str) -> Path:
    """Folder on this node with a model's ``config.json`` and, unless ``model`` is new, weights, as
    they are published."""
    place = model.removeprefix(NEW)
    if is_new(model) and place in SHAPES:
        raise InputError(f"{model} is a built-in shape and has no folder")
    patterns = (CONFIG_FILE,) if is_new(model) else _MODEL_FILES
    folder = _folder(place, patterns, runs=runs, what="model")
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(
            f"model {place} has no {CONFIG_FILE}: give a folder that save_pretrained has written"
        )
    return folder


def tokenizer_file(tokenizer: str, model: str, *, runs: str) -> Path:
    """The ``tokenizer.json`` to use, on this node, beside what is published with it.

    Args:
        tokenizer: a file, a folder, an ``s3://`` folder, a Hub id, ``bytes``, or empty: the
            model's own, and bytes for a new model.
    """
    what = "tokenizer" if tokenizer else "model"
    tokenizer = tokenizer or (BYTES if is_new(model) else model)
    if tokenizer == BYTES:
        return _byte_tokenizer()
    path = Path(tokenizer).expanduser()
    if path.is_file():
        return path
    folder = _folder(tokenizer, vocabulary.FILES, runs=runs, what=what)
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise InputError(
            f"tokenizer {tokenizer} has no {TOKENIZER_FILE}: give --tokenizer one in that format"
        )
    return file


def shared_cache(runs: str) -> str | None:
    """Where the nodes of a cluster share what one of them has made; None for runs on a disk."""
    return storage.join(runs, SHARED_CACHE) if storage.is_s3(runs) else None


def _folder(place: str, patterns: tuple[str, ...], *, runs: str, what: str) -> Path:
    path = Path(place).expanduser()
    if path.is_dir():
        return path
    if place.startswith(("/", ".", "~")):
        raise InputError(f"{what} folder {place} does not exist")
    if storage.is_s3(place):
        return _from_s3(place.rstrip("/"), patterns, what=what)
    if "://" in place:
        raise InputError(f"{what} {place}: give a folder, s3://BUCKET/PREFIX or a Hugging Face id")
    if (copy := _shared_copy(place, patterns, runs=runs)) is None:
        return _from_hub(place, patterns, what=what)
    if not storage.exists(storage.join(copy, _COMPLETE)):
        folder = _from_hub(place, patterns, what=what)
        if patterns == _MODEL_FILES:  # converted once for all nodes, and complete only with weights
            folder = conversion.with_weights(folder, place)
        storage.upload_folder(folder, copy)
        storage.write_bytes(storage.join(copy, _COMPLETE), b"")
    return _from_s3(copy, patterns, what=what)


def _shared_copy(place: str, patterns: tuple[str, ...], *, runs: str) -> str | None:
    """Address of the copy that the nodes share of what comes from the Hub; None if they do not."""
    if (shared := shared_cache(runs)) is None:
        return None
    kind = "tokenizers" if patterns == vocabulary.FILES else "models"
    digest = hashlib.sha256((place + "".join(patterns)).encode()).hexdigest()[:24]
    return storage.join(shared, kind, digest)


def _from_hub(place: str, patterns: tuple[str, ...], *, what: str) -> Path:
    folder = hub.fetch(place, patterns, what=what)
    if patterns == _MODEL_FILES:
        names = [path.name for path in folder.iterdir()]
        if not weight_files.has_safetensors(names):
            hub.fetch(place, (*patterns, *weight_files.PICKLED_FILES), what=what)
    return folder


def _from_s3(uri: str, patterns: tuple[str, ...], *, what: str) -> Path:
    """The files of a folder in S3 that match, in the node's cache; none that are gone there."""
    with storage.reading(f"{what} {uri}"):
        there = storage.sizes(uri)
    if not there:
        raise InputError(f"{what} {uri} does not exist, or may not be read")
    if patterns == _MODEL_FILES and not weight_files.has_safetensors(there):
        patterns = (*patterns, *weight_files.PICKLED_FILES)
    wanted = [name for name in there if any(Path(name).match(each) for each in patterns)]
    if not wanted:
        raise InputError(f"{what} {uri} holds none of {', '.join(patterns)}")
    folder = sources.local_files(uri, wanted)[0].parent
    for path in folder.glob("[!.]*"):
        if path.name not in there:  # an index of parts that one file has replaced, say
            path.unlink(missing_ok=True)
    return folder


def _byte_tokenizer() -> Path:
    """A tokenizer that has each byte for a token, and the end of text: made, not fetched."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def content() -> bytes:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {each: i for i, each in enumerate(letters)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer.to_str().encode()

    return storage.cached(f"tokenizers/bytes/{TOKENIZER_FILE}", content)
