"""Starts of a program in the bucket: which round of files each of them restores.

The order of calls fences earlier starts: a start is claimed before the newest round is looked up,
and a node says that a round is saved only if it sees no newer claim after its mark.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from containers.program.files.s3_files import ERRORS
from contract import files
from contract.errors import InputError
from contract.files import Claim, FileList, Mark, common_round
from store.bucket import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStart:
    """A start of a program on all of its nodes, as each node receives it."""

    number: int
    nodes: tuple[int, ...]
    writer: str
    base: Mapping[int, str]
    """Node -> key of the list that is restored."""
    round: int = 0
    """Number of the round that it is of; 0: what the start before restored."""


def begin(bucket: Bucket, nodes: Sequence[int], *, writer: str = "") -> ProgramStart:
    """Begin a start of a program on some nodes; earlier starts save nothing from then on.

    Args:
        writer: unique name of the process that begins it, the same for all starts of a job.

    Raises:
        what the bucket raises, and InputError.
    """
    writer = writer or uuid.uuid4().hex
    number = newest_start(bucket) + 1
    content = Claim(writer=writer, nodes=tuple(nodes)).to_json()
    while not bucket.create(files.start_key(number), content):
        number += 1
    try:
        # Only now: what counts as saved is seen here, or its node sees the claim.
        base, of_round = _newest(bucket, number)
        bucket.create(files.base_key(number), files.base_to_json(base))
        if newest_start(bucket) == number:
            with contextlib.suppress(*ERRORS):
                _sweep(bucket, number, base)
    except InputError:
        # A newer start may have removed it meanwhile.
        if newest_start(bucket) == number:
            raise
        raise InputError("another job has just taken them over") from None
    return ProgramStart(number=number, nodes=tuple(nodes), writer=writer, base=base, round=of_round)


def newest_start(bucket: Bucket) -> int:
    """Number of the newest start that has been claimed; 0: there is none."""
    return max(files.start_numbers(bucket.keys(files.STARTS)), default=0)


def _newest(bucket: Bucket, before: int) -> tuple[dict[int, str], int]:
    """Node -> list, of the newest round that all nodes of a start have, and its number; or else
    what the start restored, and 0.

    Starts that ended before they had restored anything are passed over.
    """
    starts = files.start_numbers(bucket.keys(files.STARTS))
    for number in reversed([each for each in starts if each < before]):
        nodes = Claim.from_json(bucket.get(files.start_key(number)) or b"").nodes
        marks = Mark.of(bucket.keys(files.rounds_prefix(number)))
        if common := common_round(marks, nodes):
            base = {node: (bucket.get(mark.key) or b"").decode() for node, mark in common.items()}
            if not all(base.values()):
                raise InputError(f"start {number} has lost the lists of its round")
            return base, max(mark.round for mark in common.values())
        if (content := bucket.get(files.base_key(number))) is not None:
            return files.base_from_json(content), 0
    return {}, 0


def _sweep(bucket: Bucket, number: int, base: Mapping[int, str]) -> None:
    """Remove what earlier starts have left, apart from the base."""
    used = {*base.values()}
    for key in base.values():
        used |= FileList.from_json(bucket.get(key) or b"").keys
    keys = [*bucket.keys(files.OBJECTS), *bucket.keys(files.ROUNDS)]
    old = [key for key in keys if (files.start_of(key) or number) < number]
    bucket.delete([key for key in old if key not in used])
