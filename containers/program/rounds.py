"""Rounds of one node: what its folders held at one moment, copied into the bucket.

A round has each file as it was at Unix time T, which is the same for all nodes, so that a restore
finds what a power cut at T would have left on all of them. The node looks at its folders at T and
``times.FILES_QUIET_S`` later. A file whose ctime shows no change since T is read then. If it has
changed, its version at T is known only if that is saved already, or if the file is small and was
read at T (done for files that kept the last round from being complete). Without it there is no
round: files of two moments could be halves of a checkpoint. After ``_PATIENCE`` rounds in a row, a
file that never rests is the one exception: up to ``_LOG`` bytes, it is saved as it is when it is
read; a larger one stays as it was saved last.

The order of calls is all that keeps a node from harming its successors:

    a start:   claim it -> look for the newest round -> write it down as the base
    a round:   pieces -> list -> mark -> no newer start? -> it is saved
    removal:   which round do all nodes have? -> no newer start? -> remove what only older ones name

A newer start claims before it looks, so it sees each mark whose node was told that it is saved. No
key is used twice: a deletion that arrives late finds nothing.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from containers.host.machine import Clock
from containers.program.bucket import ERRORS, Bucket
from containers.program.disk import Content, Disk, Look, Seen
from contract import files, runs
from contract.errors import InputError
from contract.files import OUTPUT, Claim, FileList, Mark, SavedFile, common_round, sha256_of
from contract.text import listed

#: A file that has kept so many rounds in a row from being complete never rests.
_PATIENCE: Final = 3
_LOG: Final = files.PIECE
#: Read at T, if it kept the last round from being complete.
_SMALL: Final = 2**20
#: Uploads see at once that there is no time left, unless they hang.
_GRACE_S: Final = 0.5


class ReplacedError(Exception):
    """A newer start of the program has taken over its files."""


class SupersededError(ReplacedError):
    """The newer start is of the same head, which is about to tell this node."""


class Deadline:
    """When a copy must have ended; it may be set while the copy is being made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at: float | None = None
        """By the clock's ``monotonic()``; None: it may take as long as it needs."""

    def bring_forward(self, within_s: float) -> None:
        """Set it to so many seconds from now, unless it comes before that already."""
        new = self._clock.monotonic() + within_s
        self.at = new if self.at is None else min(self.at, new)

    def leaves(self, seconds: float) -> bool:
        """Whether more than so many seconds are left."""
        return self.at is None or self.at - self._clock.monotonic() > seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A start of a program on all of its nodes, as each node is told."""

    number: int
    nodes: tuple[int, ...]
    writer: str
    base: Mapping[int, str]
    """Node -> key of the list that is restored."""
    is_joined: bool = False
    """Another node restores the base while the program runs: nothing of it is removed."""


@dataclass(slots=True)
class Moment:
    """The folders at T."""

    number: int
    """Of the round."""
    at_ns: float
    """T in Unix nanoseconds; infinite once the program has ended."""
    look: Look
    contents: dict[str, bytes] = field(default_factory=dict)
    """Of small files that were read at T."""

    @property
    def is_final(self) -> bool:
        return self.at_ns == math.inf


@dataclass(slots=True)
class _Round:
    """What a round is made of, while it is being made."""

    entries: dict[str, SavedFile] = field(default_factory=dict)
    due: dict[str, Seen] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    """Files whose version at T is not available: without them there is no round."""
    restless: set[str] = field(default_factory=set)
    """Files of ``due`` that are saved as they are when they are read."""
    unreadable: set[str] = field(default_factory=set)


class Rounds:
    """Copies one node's folders, and restores them."""

    def __init__(
        self,
        disk: Disk,
        bucket: Bucket,
        *,
        node: int,
        clock: Clock,
        deadline: Deadline,
        limit_bytes: int,
        every_s: float,
        make_pool: Callable[[], Executor],
        say_once: Callable[[str, str], None],
    ) -> None:
        """Args:
        make_pool: threads for uploads and downloads.
        say_once: says a sentence about a subject, unless it has been said.
        """
        self._disk, self._bucket, self._node, self._clock = disk, bucket, node, clock
        self._deadline, self._limit_bytes, self._every_s = deadline, limit_bytes, every_s
        self._make_pool, self._say_once = make_pool, say_once
        self.start: Start | None = None
        self.stride = 1
        """Only each so many rounds, if the last one took longer. A power of two, so that slow and
        fast nodes meet."""
        self.unsaved: list[str] = []
        """Files that the last round has not saved as they are."""
        self.error: Exception | None = None
        """What kept the last round from uploading a file."""
        self._code: dict[str, str] | None = None  # name -> SHA-256, or target of a link
        self._saved: dict[str, SavedFile] = {}  # the last list
        self._known: dict[str, tuple[Seen, SavedFile]] = {}  # how a file lay here, and its entry
        self._given: dict[str, Seen] = {}  # files of the code or of other nodes, as they were given
        self._objects: dict[str, str] = {}  # SHA-256 -> key of what the bucket has
        self._written: set[str] = set()  # keys that this node may remove
        self._base: set[str] = set()  # of those, what this start has restored
        self._lists: dict[int, set[str]] = {}  # round -> keys that its list needs, its own included
        self._waits: dict[str, int] = {}  # file -> rounds in a row that it was late
        self._count = itertools.count(1)
        self._content = FileList()  # of the last round, whether it became one or not

    # --- rounds
    def moment(self, number: int, *, final: bool = False) -> Moment:
        """Look at the folders now, at T of round ``number``, or after the program has ended."""
        at_ns = math.inf if final else number * self._every_s * 1e9
        found = Moment(number=number, at_ns=at_ns, look=self._disk.look())
        # Unless a file may have been removed between T and the look.
        is_exact = all(changed_ns <= at_ns for changed_ns in found.look.folders.values())
        for name in self._waits if is_exact and not final else ():
            seen = found.look.files.get(name)
            if seen and not seen.link and seen.changed_ns <= at_ns and seen.size <= _SMALL:
                with contextlib.suppress(OSError):
                    content = self._disk.open(name)
                    data = content.read(0, seen.size)
                    if content.is_as(seen):
                        found.contents[name] = data
                    content.close()
        return found

    def copy(self, moment: Moment) -> bool:
        """Save a round; return whether it is one. ``unsaved`` names what it lacks.

        Raises:
            what the bucket raises, and ReplacedError.
        """
        assert self.start is not None
        began = self._clock.monotonic()
        look = moment.look if moment.is_final else self._disk.look()
        for sentence in look.refused:
            self._say_once(sentence, f"{sentence}; it is not saved")
        left_out = self._above_limits(look)
        # Until it is known to be saved.
        self.unsaved = sorted({name for name in look.files if name not in self._known} | left_out)
        found = self._sort(look, moment, left_out)
        self._upload(found, moment)
        by_name = sorted(found.entries.values(), key=lambda file: file.name)
        self._content = FileList(files=tuple(by_name), empty=tuple(sorted(look.empty)))
        if found.late:
            self.unsaved = sorted(found.late | left_out)
            self._check_is_current(self.start)
            return False
        self._publish(moment.number, "end" if moment.is_final else "")
        self._saved, self.unsaved = found.entries, sorted(left_out)
        self._known = {name: each for name, each in self._known.items() if name in look.files}
        took_s = max(self._every_s, self._clock.monotonic() - began)
        self.stride = 2 ** math.ceil(math.log2(took_s / self._every_s))
        if not moment.is_final:
            with contextlib.suppress(*ERRORS):
                self._remove_unused()
        return True

    def leave_part(self, number: int) -> None:
        """Write the list of a last round that lacks files, for ``trainctl download``."""
        if self._content != FileList():
            self._publish(number, "part")

    def _publish(self, number: int, kind: str) -> None:
        assert self.start is not None
        key = self._put(self._content.to_json())
        # Noted before the mark, which may arrive although no answer comes.
        needed = self._lists.setdefault(number, set())
        needed.update([key], *(file.pieces for file in self._content.files))
        mark = Mark(start=self.start.number, round=number, node=self._node, kind=kind)
        self._bucket.put(mark.key, key.encode())
        self._check_is_current(self.start)

    def _check_is_current(self, start: Start) -> None:
        """Raise ReplacedError if there is a newer start."""
        newest = max(files.start_numbers(self._bucket.list(files.STARTS)), default=0)
        if newest <= start.number:
            return
        claim = self._bucket.get(files.start_key(newest))
        if claim and Claim.from_json(claim).writer == start.writer:
            raise SupersededError
        raise ReplacedError

    def _sort(self, look: Look, moment: Moment, left_out: Collection[str]) -> _Round:
        """Find out for each file which version the round has."""
        found = _Round()
        waits: dict[str, int] = {}
        names = look.files.keys() | moment.look.files.keys()
        for name in names if moment.is_final else names | self._known.keys():
            now = look.files.get(name)
            then = self._at_the_moment(name, moment)
            known = self._known.get(name)
            if name in moment.contents:
                waits[name] = 0  # so that it is read at the next moment too
            if name in left_out or then is None or then == self._given.get(name):
                continue  # not kept, not there at T, or not this node's own
            if known and known[0] == then:
                found.entries[name] = known[1]
            elif name in moment.contents or (now == then and then.changed_ns <= moment.at_ns):
                found.due[name] = then
            else:
                # Files of changing names may come and go all the time.
                key = name if now else ""
                waits[key] = self._waits.get(key, 0) + 1
                self._miss(name, now, found, waits[key])
        self._waits = waits
        return found

    def _at_the_moment(self, name: str, moment: Moment) -> Seen | None:
        """A file as it was at T; None if it was not there."""
        if (then := moment.look.files.get(name)) is not None:
            return then
        # Removed, or replaced, between T and the moment at which the look had come to its folder?
        is_fresh = moment.look.changed_above_ns(name) > moment.at_ns
        return self._known[name][0] if is_fresh and name in self._known else None

    def _miss(self, name: str, now: Seen | None, found: _Round, num: int) -> None:
        """Take note of a file whose version at T is not available, for the ``num``-th time."""
        if num <= _PATIENCE:
            found.late.add(name)
        elif now is not None and now.size <= _LOG:
            found.due[name] = now
            found.restless.add(name)
        else:
            if name in self._saved:
                found.entries[name] = self._saved[name]
            if now is not None:
                self._say_once(
                    f"restless {name}",
                    f"{name} changes all the time and is too large to be copied meanwhile; it is "
                    "saved when it rests",
                )

    def _above_limits(self, look: Look) -> set[str]:
        """Names of files that are not kept: ``OUTPUT`` comes first, and then the newest folders.

        What the node was given does not count.
        """
        own = {name: seen for name, seen in look.files.items() if self._given.get(name) != seen}
        size, num = self._limit_bytes, runs.OUTPUT_LIMIT_FILES
        left_out: set[str] = set()
        for names in _by_importance(own):
            needed = sum(own[name].size for name in names)
            # Half a checkpoint is worse than none, unless no limit could hold the whole folder.
            is_possible = needed <= self._limit_bytes and len(names) <= runs.OUTPUT_LIMIT_FILES
            if is_possible and (needed > size or len(names) > num):
                left_out.update(names)
                continue
            for name in names:
                if own[name].size <= size and num:
                    size, num = size - own[name].size, num - 1
                else:
                    left_out.add(name)
        if left_out:
            total = sum(seen.size for seen in own.values())
            self._say_once(
                f"limit {len(left_out).bit_length()}",  # again when it is twice as many
                f"{len(left_out):,} files are not saved: {listed(sorted(left_out))}. The folders "
                f"hold {_gib(total)} in {len(own):,} files, and at most {_gib(self._limit_bytes)} "
                f"in {runs.OUTPUT_LIMIT_FILES:,} files are kept, those in $TRAIN_OUTPUT first, "
                "then the newest. Write data and caches to /tmp, or remove old checkpoints",
            )
        return left_out

    # --- uploads
    def _upload(self, found: _Round, moment: Moment) -> None:
        """Upload what is due: each file becomes an entry, or is late."""
        self.error = None
        large = [name for name, seen in found.due.items() if seen.size > files.PIECE]
        pool = self._make_pool()
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: pool.shutdown(self._deadline.leaves(0), cancel_futures=True))
            opened: dict[str, Content] = {}
            for name in large:
                with contextlib.suppress(OSError):
                    # By descriptor: a rename or removal during a long upload does no harm.
                    opened[name] = stack.enter_context(contextlib.closing(self._disk.open(name)))

            def put(name: str, offset: int) -> str | None:
                return self._put_piece(name, offset, found, moment, opened.get(name))

            # Small files first: others may take their names while the large ones are sent.
            parts = {
                name: [pool.submit(put, name, offset) for offset in _offsets(found.due[name])]
                for name in sorted(found.due, key=lambda name: found.due[name].size)
            }
            self._wait_for({each for futures in parts.values() for each in futures}, moment)
            for name, futures in parts.items():
                is_done = all(each.done() and not each.exception() for each in futures)
                self._enter(name, [each.result() for each in futures] if is_done else [None], found)

    def _wait_for(self, pending: set[Future[str | None]], moment: Moment) -> None:
        # An upload that hangs, or that botocore tries again, must not keep the list waiting.
        while pending and self._deadline.leaves(-_GRACE_S):
            done, pending = wait(pending, timeout=_GRACE_S, return_when=FIRST_EXCEPTION)
            for error in (each.exception() for each in done):
                if isinstance(error, Exception):
                    self.error = error
                    if not moment.is_final:
                        raise error  # what is there already is not sent again

    def _put_piece(
        self, name: str, offset: int, found: _Round, moment: Moment, opened: Content | None
    ) -> str | None:
        """Upload a piece of a file; None if it cannot be read, or has changed."""
        if not self._deadline.leaves(0):
            raise TimeoutError("no time is left")
        if (data := moment.contents.get(name)) is None:
            with contextlib.ExitStack() as stack:
                try:
                    content = opened or stack.enter_context(
                        contextlib.closing(self._disk.open(name))
                    )
                except PermissionError:
                    found.unreadable.add(name)
                    return None
                except OSError:
                    return None  # removed, or replaced by something else
                data = content.read(offset, files.PIECE)
                if name not in found.restless and not content.is_as(found.due[name]):
                    return None
        return self._put(data)

    def _put(self, data: bytes) -> str:
        """Key of an object with this content, which is uploaded unless it is there already."""
        assert self.start is not None
        name = sha256(data).hexdigest()
        if name not in self._objects:
            key = files.object_key(self.start.number, self._node, next(self._count), name)
            self._written.add(key)
            self._bucket.put(key, data)
            self._objects[name] = key
        return self._objects[name]

    def _enter(self, name: str, pieces: Sequence[str | None], found: _Round) -> None:
        """Make an entry of a file whose pieces have been uploaded."""
        seen = found.due[name]
        if name in found.unreadable:
            self._say_once(f"open {name}", f"{name} cannot be read; it is not saved")
            return
        if None in pieces:
            found.late.add(name)
            if name in self._saved:
                found.entries[name] = self._saved[name]
            return
        found.entries[name] = SavedFile(
            name=name,
            size=seen.size,
            pieces=tuple(filter(None, pieces)),
            mode=seen.mode,
            modified_ns=seen.modified_ns,
            link=seen.link,
            code=(self._code or {}).get(name, ""),
        )
        if name not in found.restless:
            self._known[name] = (seen, found.entries[name])

    def _remove_unused(self) -> None:
        """Remove own objects that no round needs which a start could still restore."""
        assert self.start is not None
        marks = Mark.of(self._bucket.list(files.rounds_prefix(self.start.number)))
        own = common_round(marks, self.start.nodes).get(self._node)
        if own is None:
            return
        self._check_is_current(self.start)
        gone = [number for number in self._lists if number < own.round]
        for number in gone:
            del self._lists[number]
        used = {key for _, file in self._known.values() for key in file.pieces}
        used |= {key for file in self._saved.values() for key in file.pieces}
        used = used.union(*self._lists.values(), self._base if self.start.is_joined else ())
        dead = self._written - used
        # First: a request that fails may have removed them.
        self._objects = {name: key for name, key in self._objects.items() if key not in dead}
        old = [Mark(start=self.start.number, round=each, node=self._node).key for each in gone]
        self._bucket.delete([*old, *sorted(dead)])
        self._written -= dead

    # --- restore
    def restore(self, start: Start, *, check: Callable[[], None]) -> int:
        """Bring the base of a start into folders that hold the code; return the number of files.

        Own files come first, then those of other nodes by number, which are not saved as this
        node's own. The first node takes over the files of nodes that no longer take part.

        Args:
            check: what it raises breaks off.

        Raises:
            InputError: a list holds what it should not.
            ReplacedError: a newer start has removed what this one restores.
        """
        lists = self._lists_of(start)
        look = self._disk.look()
        if self._code is None:
            # Once: later, files of a restore that failed lie beside it.
            self._code = {
                name: seen.link or self._disk.digest(name) for name, seen in look.files.items()
            }
        mine = {self._node}
        if self._node == min(start.nodes):
            mine |= lists.keys() - set(start.nodes)
        wanted: dict[str, SavedFile] = {}
        own: dict[str, SavedFile] = {}
        for node in sorted(lists, key=lambda node: (node != self._node, node)):
            for file in lists[node].files:
                if file.name not in wanted and not self._is_older_than_its_code(file):
                    wanted[file.name] = file
                    if node in mine:
                        own[file.name] = file
        for name in {name for each in lists.values() for name in each.empty}:
            self._disk.make_folder(name)
        self._known = self._fetch(start, [*wanted.values()], check)
        self._begin(start, {name: own[name] for name in own.keys() & self._known.keys()}, mine)
        self._given = {name: look.files[name] for name in self._code if name not in wanted}
        self._given |= {name: seen for name, (seen, _) in self._known.items() if name not in own}
        return len(self._known)

    def renumber(self, start: Start) -> None:
        """Go on in a new start with the files as they lie here: the program has not ended."""
        lists = self._lists_of(start)
        base = {file.name: file for file in lists.get(self._node, FileList()).files}
        self._begin(start, base, {self._node})
        # Other objects of the start before are being removed.
        self._known = {
            name: known
            for name, known in self._known.items()
            if self._written.issuperset(known[1].pieces)
        }

    def _begin(self, start: Start, own: dict[str, SavedFile], mine: Collection[int]) -> None:
        self.start, self.stride, self._saved, self._lists = start, 1, own, {}
        pieces = {key for file in own.values() for key in file.pieces}
        self._objects = {sha256_of(key): key for key in pieces}
        self._base = pieces | {key for node, key in start.base.items() if node in mine}
        self._written = set(self._base)

    def _lists_of(self, start: Start) -> dict[int, FileList]:
        found = {}
        for node, key in start.base.items():
            content = self._bucket.get(key)
            if content is None or sha256(content).hexdigest() != sha256_of(key):
                self._check_is_current(start)
                raise InputError(f"the list of node {node} is damaged: {key}")
            found[node] = FileList.from_json(content)
        return found

    def _is_older_than_its_code(self, file: SavedFile) -> bool:
        """Whether a file came with the code, was changed by the program, and has since been changed
        in the code: what the user has now counts."""
        has = (self._code or {}).get(file.name, "")
        if not has or file.code == has:
            return False
        self._say_once(
            f"code {file.name}",
            f"{file.name} is not restored: it comes from the code, which has changed since",
        )
        return True

    def _fetch(
        self, start: Start, wanted: Sequence[SavedFile], check: Callable[[], None]
    ) -> dict[str, tuple[Seen, SavedFile]]:
        """Fetch files; return how they lie here, without those that are damaged."""
        found: dict[str, tuple[Seen, SavedFile]] = {}

        def fetch(file: SavedFile, index: int) -> bool:
            check()
            key = file.pieces[index]
            data = self._bucket.get(key)
            if data is None:
                self._check_is_current(start)
            if data is None or sha256(data).hexdigest() != sha256_of(key):
                return False
            self._disk.write_part(file.name, index * files.PIECE, data)
            return True

        pool = self._make_pool()
        try:
            parts = [
                (file, [pool.submit(fetch, file, index) for index in range(len(file.pieces))])
                for file in wanted
            ]
            for file, futures in parts:
                is_whole = [each.result() for each in futures].count(False) == 0
                check()
                seen = self._disk.finish(file) if is_whole else None
                if seen is not None:
                    found[file.name] = (seen, file)
                    continue
                self._say_once(
                    f"damaged {file.name}",
                    f"{file.name} is damaged in {self._bucket.address}: it is not restored",
                )
        finally:
            pool.shutdown(cancel_futures=True)
            self._disk.discard_parts()
        return found


def _offsets(seen: Seen) -> range:
    """Where the pieces of a file begin; a link has none."""
    return range(0, 0 if seen.link else seen.size, files.PIECE)


def _by_importance(found: Mapping[str, Seen]) -> list[list[str]]:
    """Folders with the names of their files: those of ``OUTPUT`` first, then the newest.

    Files that lie in no folder of the program's own are one each.
    """
    folders: dict[str, list[str]] = {}
    for name in found:
        folder = name.rpartition("/")[0]
        folders.setdefault(folder if "/" in folder else name, []).append(name)

    def age(name: str) -> int:
        return -found[name].modified_ns

    groups = [sorted(names, key=age) for names in folders.values()]
    return sorted(
        groups, key=lambda names: (not names[0].startswith(f"{OUTPUT}/"), age(names[0]), names[0])
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
