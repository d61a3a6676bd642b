"""Saved files of a user's program: their keys and lists in the bucket.

``containers.program`` writes them, ``trainctl download`` reads them. All keys lie below
``contract.runs.output_prefix(run)``, and each is written once:

    starts/000007              start 7 of the program, on all of its nodes: a ``Claim``
    starts/000007.base         the lists that start 7 restores, by node
    rounds/000007/59824613/1   node 1 has saved that round of start 7: its list's key
    rounds/.../1.end           the same, and its program has ended: counts for later rounds too
    rounds/.../1.part          a node's last list, which lacks files: only ``download`` reads it
    objects/000007-1/12/SHA256 a piece of a file, or a list: the 12th of node 1 in start 7

Round R has each file as it was at Unix time R x ``times.FILES_EVERY_S``, so nodes that save the
same round have saved the same moment. Any job may write into the bucket, so names and keys are
checked here before one becomes a path.
"""

import fnmatch
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self, TypeVar

from contract.errors import InputError
from contract.runs import check_relative
from contract.typed_json import from_json, loads

T = TypeVar("T")

WORK: Final = "work"  # the folder in which the program runs
OUTPUT: Final = "output"  # the folder that $TRAIN_OUTPUT names
HOME: Final = "home"  # the folder that $HOME names

STARTS: Final = "starts/"
ROUNDS: Final = "rounds/"
OBJECTS: Final = "objects/"
#: Bytes of a piece. Large files need no multipart uploads, and resume where an upload broke off. Of
#: a file that grows, only the last piece is sent again.
PIECE: Final = 8 * 2**20

_VERSION: Final = 3
_WHAT: Final = "a node's list of saved files"
_OBJECT: Final = re.compile(r"objects/(\d{6,18})-\d{1,6}/\d{1,18}/([0-9a-f]{64})")
_MARK: Final = re.compile(r"rounds/(\d{6,18})/(\d{1,18})/(\d{1,6})(?:\.(end|part))?")


# --- keys
def start_key(number: int) -> str:
    """Key of the claim to a start."""
    return f"{STARTS}{number:06}"


def base_key(number: int) -> str:
    """Key of what a start restores."""
    return f"{STARTS}{number:06}.base"


def start_numbers(keys: Iterable[str]) -> list[int]:
    """Numbers of the starts that have been claimed, in ascending order."""
    found = (re.fullmatch(rf"{STARTS}(\d{{6,18}})", key) for key in keys)
    return sorted(int(match[1]) for match in found if match)


def object_key(start: int, node: int, count: int, sha256: str) -> str:
    """Key of a piece or list; ``count`` makes it one that was never used before."""
    return f"{OBJECTS}{start:06}-{node}/{count}/{sha256}"


def sha256_of(key: str) -> str:
    """SHA-256 of an object's content.

    Raises:
        InputError: ``key`` is not the key of an object.
    """
    if not (match := _OBJECT.fullmatch(key)):
        raise InputError(f"{_WHAT} names {key[:200]!r}, which is not the key of an object")
    return match[2]


def start_of(key: str) -> int | None:
    """Number of the start that wrote an object or a mark; None for other keys."""
    match = _OBJECT.fullmatch(key) or _MARK.fullmatch(key)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Marker: this node has saved the round."""

    start: int
    round: int
    node: int
    kind: str = ""
    """Empty, ``end`` or ``part``."""

    @property
    def key(self) -> str:
        end = f".{self.kind}" if self.kind else ""
        return f"{ROUNDS}{self.start:06}/{self.round:08}/{self.node}{end}"

    @classmethod
    def of(cls, keys: Iterable[str]) -> list[Self]:
        """The marks among keys."""
        found = (_MARK.fullmatch(key) for key in keys)
        return [
            cls(start=int(each[1]), round=int(each[2]), node=int(each[3]), kind=each[4] or "")
            for each in found
            if each
        ]


def rounds_prefix(start: int) -> str:
    """Prefix of the marks of a start."""
    return f"{ROUNDS}{start:06}/"


def common_round(marks: Collection[Mark], nodes: Collection[int]) -> dict[int, Mark]:
    """The newest round that all nodes have, by node; empty if there is none.

    A node that finished before the round is represented by its end marker.
    """
    ends = sorted((mark for mark in marks if mark.kind == "end"), key=lambda mark: mark.round)
    by_round = defaultdict[int, list[Mark]](list)
    for mark in marks:
        if mark.kind != "part":
            by_round[mark.round].append(mark)
    for number in sorted(by_round, reverse=True):
        ended = [mark for mark in ends if mark.round <= number]
        found = {mark.node: mark for mark in [*ended, *by_round[number]] if mark.node in nodes}
        if len(found) == len(nodes):
            return found
    return {}


def newest_by_node(marks: Iterable[Mark]) -> dict[int, Mark]:
    """The newest mark of each node, also of a round that others do not have or that lacks files."""
    order = ("", "part", "end")
    ascending = sorted(marks, key=lambda mark: (mark.round, order.index(mark.kind)))
    return {mark.node: mark for mark in ascending}


# --- names
def check_pattern(pattern: str, *, option: str) -> str:
    """Return ``pattern`` if it can match names of files.

    Args:
        option: that it was given to, for the error.

    Raises:
        InputError: it cannot.
    """
    try:
        check_relative(pattern.rstrip("/"))
    except InputError:
        is_usable = False
    else:
        is_usable = pattern.count("[") == pattern.count("]")
    if not is_usable:
        raise InputError(
            f"{option} is {pattern!r}: give a pattern of the shell, relative to the working "
            "folder, such as '*.pt', 'data' or 'logs/*.csv'"
        )
    return pattern


def matches(name: str, patterns: Collection[str]) -> bool:
    """True if a pattern matches a file, or a folder that it is in: by the last part of its path, by
    its path, or by its path in ``WORK``, ``OUTPUT`` or ``HOME``."""
    if not patterns:
        return False
    parts = name.split("/")
    ends = range(1, len(parts) + 1)
    texts = {"/".join(parts[start:end]) for start in (0, 1) for end in ends if start < end}
    texts.update(parts)
    return any(fnmatch.fnmatchcase(text, each.rstrip("/")) for each in patterns for text in texts)


# --- contents
@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A start of a program."""

    writer: str
    """Unique to the process that starts the program on its nodes."""
    nodes: tuple[int, ...]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises InputError if it is not what ``to_json`` writes."""
        what = "the claim to a start"
        return from_json(cls, loads(text, what=what), what=what)


def base_to_json(base: Mapping[int, str]) -> bytes:
    """Keys of lists by node, as ``base_from_json`` reads them."""
    return json.dumps(base).encode()


def base_from_json(text: bytes) -> dict[int, str]:
    """Raises InputError if it is not what ``base_to_json`` writes."""

    def read(values: Any) -> dict[int, str]:
        return {int(node): _object(key) for node, key in values.items()}

    return _read(text, "the list of what a start restores", read)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """One file of a node, or one symbolic link."""

    name: str
    """Relative path with slashes, whose first part is ``WORK``, ``OUTPUT`` or ``HOME``."""
    size: int = 0
    """Bytes."""
    pieces: tuple[str, ...] = ()
    """Keys of the objects that make up its content, in order; empty for an empty file or a link."""
    mode: int = 0
    """Permission bits."""
    modified_ns: int = 0
    """Unix time in nanoseconds."""
    link: str = ""
    """Target of a symbolic link, relative to the link's own folder; empty for a file."""
    code: str = ""
    """SHA-256 that a file of this name had in the code; empty: the code has none."""
    start: int = 0
    """Number of the start in which it was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileList:
    """All saved files of a node."""

    files: tuple[SavedFile, ...] = ()

    @property
    def keys(self) -> set[str]:
        """Keys of all pieces."""
        return {key for file in self.files for key in file.pieces}

    def to_json(self) -> bytes:
        """The list as ``from_json`` reads it, without fields that are empty."""
        names = [each.name for each in fields(SavedFile)]
        files = [
            {name: value for name in names if (value := getattr(file, name))} for file in self.files
        ]
        return json.dumps({"version": _VERSION, "files": files}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read a list.

        Raises:
            InputError: it is not a list, or names something that is not a relative path of a file.
        """

        def read(values: Any) -> tuple[SavedFile, ...]:
            if values.get("version") != _VERSION:
                raise InputError(
                    f"{_WHAT} has version {values.get('version')!r}, and this version reads "
                    f"{_VERSION}: use the version of trainctl and of the images that wrote it"
                )
            return tuple(_checked(**each) for each in values["files"])

        return cls(files=_read(text, _WHAT, read))


def _read(text: bytes, what: str, read: Callable[[Any], T]) -> T:
    """Make something of a JSON text that another job may have written."""
    try:
        return read(json.loads(text))
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise InputError(f"{what} cannot be read: {text[:100]!r}") from None


def _object(key: str) -> str:
    """``key``, if it is the key of an object. Raises InputError."""
    sha256_of(key)
    return key


def _checked(*, pieces: Iterable[str] = (), **values: Any) -> SavedFile:
    """An entry of a list. Raises InputError if it names a place elsewhere."""
    file = SavedFile(pieces=tuple(map(_object, pieces)), **values)
    for number in (file.size, file.mode, file.modified_ns, file.start):
        if type(number) is not int:
            raise TypeError
    check_relative(file.name, what=f"file in {_WHAT}:")
    if file.name.partition("/")[0] not in (WORK, OUTPUT, HOME):
        raise InputError(f"{_WHAT} names {file.name!r}, which lies in none of a node's folders")
    if not (file.link + file.code).isprintable():
        raise InputError(f"{_WHAT} has a link to {file.link!r}, which is refused")
    return file
