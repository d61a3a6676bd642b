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

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from contract.errors import InputError
from contract.runs import check_relative

WORK: Final = "work"  # the folder in which the program runs
OUTPUT: Final = "output"  # the folder that $TRAIN_OUTPUT names

STARTS: Final = "starts/"
ROUNDS: Final = "rounds/"
OBJECTS: Final = "objects/"
#: Bytes of a piece. Large files need no multipart uploads, and go on where an upload broke off.
PIECE: Final = 64 * 2**20

_VERSION: Final = 2
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
    """A node's word that it has saved a round."""

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


def common_round(marks: Iterable[Mark], nodes: Collection[int]) -> dict[int, Mark]:
    """The newest round that all nodes have, by node; empty if there is none.

    Of a node whose program had ended before a round, its end counts.
    """
    exact: dict[tuple[int, int], Mark] = {}
    ends: dict[int, list[Mark]] = {node: [] for node in nodes}
    for mark in marks:
        if mark.kind == "":
            exact[mark.node, mark.round] = mark
        elif mark.kind == "end" and mark.node in ends:
            ends[mark.node].append(mark)
    numbers = {mark.round for each in ends.values() for mark in each}
    for number in sorted(numbers | {number for _, number in exact}, reverse=True):
        found: dict[int, Mark] = {}
        for node in nodes:
            ended = [mark for mark in ends[node] if mark.round <= number]
            last = max(ended, key=lambda mark: mark.round, default=None)
            if newest := exact.get((node, number), last):
                found[node] = newest
        if len(found) == len(nodes):
            return found
    return {}


def newest_by_node(marks: Iterable[Mark]) -> dict[int, Mark]:
    """The newest mark of each node, also of a round that others do not have or that lacks files."""
    order = ("", "end", "part")
    ascending = sorted(marks, key=lambda mark: (mark.round, order.index(mark.kind)))
    return {mark.node: mark for mark in ascending}


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
        values = _loads(text, "the claim to a start")
        try:
            return cls(
                writer=str(values["writer"]), nodes=tuple(int(each) for each in values["nodes"])
            )
        except (ValueError, TypeError, KeyError, OverflowError):
            raise InputError(f"the claim to a start cannot be read: {text[:100]!r}") from None


def base_to_json(base: Mapping[int, str]) -> bytes:
    """Keys of lists by node, as ``base_from_json`` reads them."""
    return json.dumps({str(node): key for node, key in base.items()}).encode()


def base_from_json(text: bytes) -> dict[int, str]:
    """Raises InputError if it is not what ``base_to_json`` writes."""
    values = _loads(text, "what a start restores")
    try:
        found = {int(node): str(key) for node, key in values.items()}
    except ValueError:
        raise InputError(f"what a start restores cannot be read: {text[:100]!r}") from None
    for key in found.values():
        sha256_of(key)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """One file of a node, or one symbolic link."""

    name: str
    """Relative path with slashes, whose first part is ``WORK`` or ``OUTPUT``."""
    size: int = 0
    """Bytes."""
    pieces: tuple[str, ...] = ()
    """Keys of the objects that make up its content, in order; empty for an empty file or a link."""
    mode: int = 0o644
    """Permission bits."""
    modified_ns: int = 0
    """Unix time in nanoseconds."""
    link: str = ""
    """Target of a symbolic link, relative to the link's own folder; empty for a file."""
    code: str = ""
    """SHA-256 that a file of this name had in the code; empty: the code has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileList:
    """All saved files of a node."""

    files: tuple[SavedFile, ...] = ()
    empty: tuple[str, ...] = ()
    """Folders that have nothing in them."""

    def to_json(self) -> bytes:
        """The list as ``from_json`` reads it, without fields that have their defaults."""
        default = asdict(SavedFile(name=""))
        files = [
            {name: value for name in default if (value := getattr(file, name)) != default[name]}
            for file in self.files
        ]
        values = {"version": _VERSION, "files": files, "empty": [*self.empty]}
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read a list.

        Raises:
            InputError: it is not a list, or names something that is not a relative path of a file.
        """
        values = _loads(text, _WHAT)
        if values.get("version") != _VERSION:
            raise InputError(
                f"{_WHAT} has version {values.get('version')!r}, and this version reads "
                f"{_VERSION}: use the version of trainctl and of the images that wrote it"
            )
        try:
            files = [
                SavedFile(**{**each, "pieces": tuple(each.get("pieces", ()))})
                for each in values["files"]
            ]
            empty = [str(each) for each in values["empty"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{_WHAT} cannot be read: {text[:100]!r}") from None
        for file in files:
            _check(file)
        for name in empty:
            check_relative(name, what=f"folder in {_WHAT}:")
        return cls(files=tuple(files), empty=tuple(empty))


def _loads(text: bytes, what: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InputError(f"{what} cannot be read: {text[:100]!r}")
    return values


def _check(file: SavedFile) -> None:
    """Raise InputError if an entry has a wrong type or names a place elsewhere."""
    numbers = (file.size, file.mode, file.modified_ns)
    texts = (file.name, file.link, file.code, *file.pieces)
    if not all(type(each) is int for each in numbers) or not all(
        isinstance(each, str) for each in texts
    ):
        raise InputError(f"{_WHAT} has an entry of wrong types: {str(file)[:200]}")
    check_relative(file.name, what=f"file in {_WHAT}:")
    if "/" not in file.name:
        raise InputError(f"{_WHAT} names {file.name!r}, which lies in none of a node's folders")
    for key in file.pieces:
        sha256_of(key)
    if file.link:
        check_link(file.name, file.link)


def check_link(name: str, target: str) -> str:
    """Return ``target`` if a symbolic link ``name`` with it stays below the link's first folder.

    Raises:
        InputError: it is absolute, or leads out.
    """
    depth = name.count("/") - 1  # folders between the link and its first folder
    for part in target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            break
    if target.startswith("/") or depth < 0 or re.search(r"[\\\x00-\x1f\x7f]", target):
        raise InputError(f"link {name!r} to {target!r} is refused: it leads out of its folder")
    return target
