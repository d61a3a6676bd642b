"""Whether a prepared set is still what was prepared: each file against its checksum.

Standard library only, but for boto3 where the set is in S3: laptops verify too.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError
from training.data.pictures.destination import Destination
from training.data.pictures.index import INDEX_FILE, SPLITS, TREE, Entry, Index, table

#: As many files are in memory at a time; a shard has 128 MiB.
_THREADS: Final = 6
_BATCH: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a set is, and what is wrong with it."""

    index: Index
    wrong: tuple[str, ...]
    """A sentence for each picture or file that is not as it was prepared; empty: all is well."""


def verify(at: Destination, *, report: Callable[[int, int], None] | None = None) -> Verdict:
    """Read all of a set, and compare.

    Args:
        report: called with the files read so far and all of them.

    Raises:
        InputError: there is no prepared set.
    """
    content = at.read(INDEX_FILE)
    if content is None:
        raise InputError(
            f"{at.uri} has no {INDEX_FILE}: it is no prepared set, or its preparation was "
            "interrupted; trainctl data prepare makes one, or continues"
        )
    index = Index.from_json(content, where=at.uri)
    wrong: list[str] = []
    by_file: dict[str, list[Entry]] = {}
    for split in SPLITS:
        lines = at.read(table(split)) or b""
        known = index.files.get(table(split))
        if known is None or hashlib.sha256(lines).hexdigest() != known.sha256:
            wrong.append(f"{table(split)} is not what was prepared: prepare the set again")
            continue
        entries = [Entry.from_line(line) for line in lines.decode().splitlines()]
        if len(entries) != index.counts.get(split):
            wrong.append(f"{table(split)} has {len(entries):,} pictures")
        for each in entries:
            by_file.setdefault(each.file, []).append(each)
    jobs = list(by_file.items())
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(jobs), _BATCH):
            some = jobs[start : start + _BATCH]
            for found in threads.map(lambda job: list(_wrong(at, index, *job)), some):
                wrong += found
            if report:
                report(start + len(some), len(jobs))
    return Verdict(index=index, wrong=tuple(wrong))


def _wrong(at: Destination, index: Index, file: str, entries: list[Entry]) -> Iterator[str]:
    """A sentence for each picture of a file that is not as it was prepared."""
    content = at.read(file)
    if content is None:
        yield f"{file} is missing, and {len(entries):,} pictures with it"
        return
    known = index.files.get(file)
    if known is not None and hashlib.sha256(content).hexdigest() == known.sha256:
        return
    damaged = 0
    for each in entries:
        picture = content[each.offset : each.offset + each.size]
        if hashlib.sha256(picture).hexdigest() != each.sha256:
            damaged += 1
            yield (
                f"{each.name} in {file} is damaged" if index.form != TREE else f"{file} is damaged"
            )
    if not damaged and index.form != TREE:
        yield f"{file} is damaged beside its pictures, which are whole"
