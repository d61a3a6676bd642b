"""Text as rows of token ids on disk, packed without padding.

A store is built once from plain text: documents are tokenized one after the other, each ends with
the end-of-text token, and one document in so many is held out. Training reads fixed windows of the
one long row (``training.data.sequences``), so every token is predicted exactly once an epoch and
none is padding. Use ``training.data.images`` for pictures.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from training import storage
from training.data import sources
from training.data.documents import Report, documents, text_files

FORMAT: Final = 1
STORE_FILE: Final = "store.json"
TRAIN_FILE: Final = "train.bin"
HELD_OUT_FILE: Final = "held-out.bin"
#: What the end of a document is called by the tokenizers that are in use.
END_OF_TEXT: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>")
_BATCH_DOCUMENTS: Final = 1024  # the tokenizer works on one batch with all processors

Tokens = npt.NDArray[np.int64]


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


class TokenStore:
    """Token ids of a text, memory-mapped: a set larger than the memory costs none of it."""

    def __init__(self, folder: Path, info: StoreInfo) -> None:
        self.folder, self.info = folder, info
        self.train = self._map(TRAIN_FILE, info.num_train_tokens)
        self.held_out = self._map(HELD_OUT_FILE, info.num_held_out_tokens)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a store that ``build`` has written.

        Raises:
            InputError: there is none, or its files do not have the sizes that it names.
        """
        try:
            values = json.loads((folder / STORE_FILE).read_text(encoding="utf-8"))
            info = StoreInfo(**values)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{folder} is no token store ({error}): build it again") from None
        if info.format != FORMAT:
            raise InputError(f"{folder} has format {info.format}, not {FORMAT}: remove it")
        return cls(folder, info)

    def _map(self, name: str, count: int) -> npt.NDArray[Any]:
        path, dtype = self.folder / name, np.dtype(self.info.dtype)
        size = path.stat().st_size if path.exists() else -1
        if size != count * dtype.itemsize:
            raise InputError(
                f"{path} has {size:,} bytes instead of {count * dtype.itemsize:,}: the store is "
                f"damaged; remove {self.folder}, the next run builds it again"
            )
        return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)

    def unigram_loss(self, num_tokens: int | None = None) -> float:
        """Held-out loss, in nats per token, of a model that knows only how frequent a token is.

        ``num_tokens`` are the first labels that count; without it, all do.

        The frequencies are those of the training part, plus one for each token of the vocabulary.
        A model that is not clearly better has learned nothing of the text's order.
        """
        size = self.info.vocab_size
        counts = np.bincount(self.train, minlength=size) + 1.0
        log_probability = np.log(counts / counts.sum())
        return float(-log_probability[self.held_out[1:][:num_tokens]].mean())

    def prompts(self, *, num: int, length: int) -> Tokens:
        """First tokens of the first held-out documents that have twice as many, ``[num, length]``
        or fewer rows."""
        ends = np.flatnonzero(self.held_out[: 10**6] == self.info.end_of_text)
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        chosen = starts[ends - starts >= 2 * length][:num]
        found: Tokens = self.held_out[chosen[:, None] + np.arange(length)].astype(np.int64)
        return found


# --- building -----------------------------------------------------------------------------------
def store_for(
    source: str,
    tokenizer_file: Path,
    *,
    held_out_every: int = 20,
    field: str = "text",
    shared: str | None = None,
    report: Report | None = None,
) -> TokenStore:
    """The store of a text, from the node's cache or built now; one process of a node builds it.

    Args:
        source: a file or folder of ``.txt`` (documents are separated by empty lines), ``.jsonl``
            (a document a line) or ``.parquet`` (a document a row), the first two also with
            ``.gz``; the address of one such file, ``http(s)://``, of a file or a folder,
            ``s3://``, or of a data set of the Hugging Face Hub (``training.data.hub_text``);
            or ``python-help``.
        tokenizer_file: a ``tokenizer.json``.
        held_out_every: one document in so many is held out.
        field: of a line or a row, the one that holds the document.
        shared: address of a folder in which the nodes of a cluster share stores.
        report: called with the bytes read and the bytes there are.

    Raises:
        InputError: there is no text, it is no text, or the tokenizer cannot be used.
    """
    files = text_files(source, report)
    key = _key(files, tokenizer_file, held_out_every, field)
    folder = _place(key)
    with sources.locked(folder.with_name(f"{key}.lock")):
        if not (folder / STORE_FILE).exists() and not _fetch_store(folder, shared):
            build(
                files,
                tokenizer_file,
                folder,
                key=key,
                held_out_every=held_out_every,
                field=field,
                report=report,
            )
            if shared:
                _share_store(folder, shared)
    return TokenStore.open(folder)


def open_store(key: str, *, shared: str | None) -> TokenStore | None:
    """The store of a key, from the node's cache or from where the nodes share them; or None."""
    folder = _place(key)
    with sources.locked(folder.with_name(f"{key}.lock")):
        if not (folder / STORE_FILE).exists() and not _fetch_store(folder, shared):
            return None
    return TokenStore.open(folder)


def _place(key: str) -> Path:
    return sources.cache_dir() / "tokens" / key


def _fetch_store(folder: Path, shared: str | None) -> bool:
    if shared is None:
        return False
    uri = storage.join(shared, "tokens", folder.name)
    if not storage.exists(storage.join(uri, STORE_FILE)):
        return False
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        storage.fetch_folder(uri, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def _share_store(folder: Path, shared: str) -> None:
    uri = storage.join(shared, "tokens", folder.name)
    fs = storage.filesystem(uri)
    for name in (TRAIN_FILE, HELD_OUT_FILE, STORE_FILE):  # the last one marks the rest as complete
        fs.put_file(str(folder / name), storage.join(uri, name))


def build(
    files: Sequence[Path],
    tokenizer_file: Path,
    folder: Path,
    *,
    key: str,
    held_out_every: int,
    field: str = "text",
    report: Report | None = None,
) -> None:
    """Write a store to ``folder``, which appears whole or not at all."""
    if held_out_every < 2:
        raise InputError(f"one document in {held_out_every} cannot be held out: use 2 or more")
    tokenizer, end_of_text = _tokenizer(tokenizer_file)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    counts = {TRAIN_FILE: 0, HELD_OUT_FILE: 0}
    number = 0
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with (part / TRAIN_FILE).open("wb") as train, (part / HELD_OUT_FILE).open("wb") as held:
            for batch in _batches(documents(files, field, report), _BATCH_DOCUMENTS):
                for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                    is_held_out = number % held_out_every == held_out_every - 1
                    output = held if is_held_out else train
                    row = np.array([*encoding.ids, end_of_text], dtype)
                    output.write(row.tobytes())
                    counts[HELD_OUT_FILE if is_held_out else TRAIN_FILE] += len(row)
                    number += 1
        if number < held_out_every:
            raise InputError(
                f"the text has {number} documents, and one in {held_out_every} is to be held out: "
                "give more text. In .txt files an empty line ends a document"
            )
        info = StoreInfo(
            format=FORMAT,
            key=key,
            tokenizer=_sha256(tokenizer_file),
            vocab_size=size,
            end_of_text=end_of_text,
            dtype=dtype.name,
            num_documents=number,
            num_train_tokens=counts[TRAIN_FILE],
            num_held_out_tokens=counts[HELD_OUT_FILE],
        )
        (part / STORE_FILE).write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _tokenizer(file: Path) -> tuple[Any, int]:
    """A tokenizer and the id of its end-of-text token."""
    from tokenizers import Tokenizer

    path = file / "tokenizer.json" if file.is_dir() else file
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer {path} cannot be read ({error})") from None
    for name in END_OF_TEXT:
        if (found := tokenizer.token_to_id(name)) is not None:
            return tokenizer, int(found)
    raise InputError(f"tokenizer {path} has no end-of-text token ({', '.join(END_OF_TEXT)})")


def _batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for document in documents:
        batch.append(document)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _key(files: Sequence[Path], tokenizer_file: Path, held_out_every: int, field: str) -> str:
    parts = [f"{FORMAT}", f"{held_out_every}", field, _sha256(tokenizer_file)]
    parts += [f"{file.name}:{_sha256(file)}" for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _sha256(file: Path) -> str:
    path = file / "tokenizer.json" if file.is_dir() else file
    try:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
