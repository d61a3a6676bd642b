"""Text as rows of token ids on disk, packed without padding, and the sequences of each step.

A store is built once from plain text: documents are tokenized one after the other, each ends with
the end-of-text token, and one document in so many is held out. Training reads fixed windows of the
one long row, so every token is predicted exactly once an epoch and none is padding. Use
``training.data.images`` for pictures.
"""

import gzip
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Self, cast

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from contract.errors import InputError
from training import storage
from training.data import PYTHON_HELP, sources
from training.models.pretrained import fetch_hub, shared_cache, tokenizer_file
from training.recipes.fsdp.settings import FsdpConfig

FORMAT: Final = 1
STORE_FILE: Final = "store.json"
TRAIN_FILE: Final = "train.bin"
HELD_OUT_FILE: Final = "held-out.bin"
#: What the end of a document is called by the tokenizers that are in use.
END_OF_TEXT: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>")
#: Endings of the files that are text.
KINDS: Final = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".parquet")
BUILT_IN: Final = PYTHON_HELP
HUB: Final = "hf://"
_BATCH_DOCUMENTS: Final = 1024  # the tokenizer works on one batch with all processors

Tokens = npt.NDArray[np.int64]
Report = Callable[[int, int], None]


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
            ``s3://``, or of a data set of the Hugging Face Hub, ``hf://owner/name[@revision]``;
            or ``python-help``.
        tokenizer_file: a ``tokenizer.json``.
        held_out_every: one document in so many is held out.
        field: of a line or a row, the one that holds the document.
        shared: address of a folder in which the nodes of a cluster share stores.
        report: called with the bytes read and the bytes there are.

    Raises:
        InputError: there is no text, it is no text, or the tokenizer cannot be used.
    """
    files = text_files(source)
    key = _key(files, tokenizer_file, held_out_every, field)
    folder = _place(key)
    with FileLock(f"{folder}.lock"):
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
    with FileLock(f"{folder}.lock"):
        if not (folder / STORE_FILE).exists() and not _fetch_store(folder, shared):
            return None
    return TokenStore.open(folder)


def _place(key: str) -> Path:
    folder = sources.cache_dir() / "tokens" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cache folder {folder.parent} cannot be made ({error.strerror}): set "
            f"{sources.CACHE_VARIABLE} to a folder that can be written"
        ) from None
    return folder


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
    for name in (TRAIN_FILE, HELD_OUT_FILE, STORE_FILE):  # the last one says that all is there
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
            for batch in _batches(_documents(files, field, report), _BATCH_DOCUMENTS):
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


def text_files(source: str) -> list[Path]:
    """The files of a text on this node, sorted by name.

    Raises:
        InputError: there is nothing at ``source``, or nothing of a kind that can be read.
    """
    if source == BUILT_IN:
        return [_python_help()]
    if source.startswith(HUB):
        patterns = tuple(f"*{kind}" for kind in KINDS)
        path = fetch_hub(source.removeprefix(HUB), patterns, kind="dataset", what="data set")
    elif sources.is_remote(source):
        if source.endswith(KINDS) or not storage.is_s3(source):
            place, _, name = source.rpartition("/")
            return sources.local_files(place, [name])
        return _s3_files(source.rstrip("/"))
    else:
        path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"text {source} does not exist: give a file, a folder or an address")
    files = sorted(each for each in path.rglob("*") if each.name.endswith(KINDS))
    if not files:
        raise InputError(f"{source} holds no text: files must end in {', '.join(KINDS)}")
    return files


def _s3_files(source: str) -> list[Path]:
    try:
        found = storage.filesystem(source).find(source)
    except Exception as error:  # s3fs lets botocore's many exceptions through
        raise InputError(f"text {source} cannot be read: {error}") from None
    bucket = source.removeprefix("s3://").partition("/")[0]
    names = sorted(each.removeprefix(f"{bucket}/") for each in found if each.endswith(KINDS))
    if not names:
        raise InputError(f"{source} holds no text: files must end in {', '.join(KINDS)}")
    return [
        sources.local_files(f"s3://{bucket}/{Path(each).parent}", [Path(each).name])[0]
        for each in names
    ]


def _python_help() -> Path:
    """The help texts that come with Python, some 80 documents: real text without a download."""
    from pydoc_data.topics import topics

    lines = [json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)]
    content = "".join(lines).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]  # each version of Python has its own
    file = sources.cache_dir() / "text" / f"python-help-{digest}.jsonl"
    if not file.exists():
        storage.write_bytes(str(file), content)
    return file


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


def _documents(files: Sequence[Path], field: str, report: Report | None) -> Iterator[str]:
    """The documents of all files, in order; only one document is in memory."""
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        if file.name.endswith(".parquet"):
            yield from _parquet_rows(file, field)
            done += file.stat().st_size
            if report:
                report(done, total)
            continue
        with ExitStack() as stack:
            raw = stack.enter_context(file.open("rb"))
            is_packed = file.name.endswith(".gz")
            content = stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_packed else raw
            lines = stack.enter_context(io.TextIOWrapper(cast("IO[bytes]", content), "utf-8"))
            try:
                is_json = file.name.removesuffix(".gz").endswith(".jsonl")
                for document in _json_lines(lines, file, field) if is_json else _paragraphs(lines):
                    yield document
                    if report:
                        report(done + raw.tell(), total)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{file} is not UTF-8 text ({error.reason} at byte {error.start:,} of a block)"
                ) from None
            except (OSError, EOFError) as error:
                raise InputError(f"{file} cannot be read: {error}") from None
        done += file.stat().st_size


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Blocks of lines between empty lines, without the line feed at their end."""
    block: list[str] = []
    for line in lines:
        if "\0" in line:
            raise InputError("the text holds zero bytes: it is binary, or not UTF-8")
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block).rstrip("\n")
            block = []
    if block:
        yield "".join(block).rstrip("\n")


def _parquet_rows(file: Path, field: str) -> Iterator[str]:
    """One column of a table, a thousand rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise InputError(
                f"{file} has no column {field!r} but {', '.join(table.schema_arrow.names)}: give "
                "--text-field one of them"
            )
        for batch in table.iter_batches(batch_size=_BATCH_DOCUMENTS, columns=[field]):
            for value in batch.column(0).to_pylist():
                if isinstance(value, str) and value.strip():
                    yield value
    except pa.ArrowInvalid as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _json_lines(lines: Iterable[str], file: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise InputError(f'{file}, line {number}: no JSON object with a text under "{field}"')
        if text.strip():
            yield text


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


# --- reading ------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOrder:
    """Which sequences each step trains on: a function of the step and the seed alone.

    Sequence ``i`` is tokens ``[i * seq_len, (i + 1) * seq_len]``, both ends included: the last
    token of one is the first of the next, as label there and as input here. What does not fill a
    sequence or a step is left out, another part in each epoch.
    """

    num_tokens: int
    seq_len: int
    global_batch: int
    """Sequences per optimizer update, over all workers."""
    seed: int

    def __post_init__(self) -> None:
        if self.num_sequences < self.global_batch:
            raise InputError(
                f"{self.num_tokens:,} tokens are {self.num_sequences} sequences of {self.seq_len}, "
                f"fewer than the {self.global_batch} of one step: give more text, or a smaller "
                "batch or sequence"
            )

    @property
    def num_sequences(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_len)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_sequences // self.global_batch

    def sequences(self, step: int) -> Tokens:
        """Indices of the sequences of ``step`` (0 is the first), ``[global_batch]``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences)
        return order[within * self.global_batch :][: self.global_batch]

    def batch(self, tokens: npt.NDArray[Any], step: int, *, rank: int, world_size: int) -> Tokens:
        """A worker's part of a step, ``[global_batch / world_size, seq_len + 1]``.

        Inputs are ``[:, :-1]``, labels ``[:, 1:]``.
        """
        if self.global_batch % world_size:
            raise InputError(
                f"a global batch of {self.global_batch} sequences cannot be shared by {world_size} "
                "workers: choose a multiple"
            )
        mine = self.sequences(step)[rank::world_size]
        window = np.arange(self.seq_len + 1)
        picked: Tokens = tokens[mine[:, None] * self.seq_len + window].astype(np.int64)
        return picked


def positions_in_documents(inputs: Tokens, end_of_text: int) -> Tokens:
    """Position of each token within its document, ``inputs``'s shape; a sequence's first is 0.

    Models that are given these instead of a running count attend within a document alone.
    """
    place = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == end_of_text, place[:, 1:], 0)
    inside: Tokens = place - np.maximum.accumulate(begins, axis=1)
    return inside


# --- for the command ----------------------------------------------------------------------------
def prepare(config: FsdpConfig, report: Report | None = None) -> FsdpConfig:
    """Make the store of a run's text; return the settings with its key.

    Raises:
        InputError: text or tokenizer cannot be used, or the run has been trained on others.
    """
    store = _store(config, report)
    if config.text_key and config.text_key != store.info.key:
        raise InputError(
            f"run {config.run!r} was trained on another text, tokenizer or split than "
            f"{config.data}: give the same --data, --tokenizer and --held-out-every, or another "
            "--run"
        )
    return replace(config, text_key=store.info.key)


def store_of(config: FsdpConfig) -> TokenStore:
    """The store of a prepared run, on any of its nodes."""
    store = open_store(config.text_key, shared=shared_cache(config.storage))
    return store or _store(config, None)


def _store(config: FsdpConfig, report: Report | None) -> TokenStore:
    return store_for(
        config.data,
        tokenizer_file(config.tokenizer, config.model, runs=config.storage),
        held_out_every=config.held_out_every,
        field=config.text_field,
        shared=shared_cache(config.storage),
        report=report,
    )
