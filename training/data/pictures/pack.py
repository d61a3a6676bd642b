"""One shard of a set: read, checked, shrunk where asked, written. Needs Pillow and nothing else.

``prepare`` runs ``run`` in several processes. The same pictures give the same bytes each time.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final, Self

from training.data.pictures import layout
from training.data.pictures.destination import Destination
from training.data.pictures.index import PACKED, RAW, TREE, Entry, StoredFile
from training.data.pictures.layout import Found
from training.data.pictures.picture import DamagedError, fitted

#: Of packed JPEGs: at this quality the loss is far below that of shrinking.
_QUALITY: Final = 92


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one process does at a time."""

    name: str
    """Of the shard without its suffix, such as ``train-00003``."""
    split: str
    form: str
    size: int
    encoding: str
    pictures: tuple[tuple[int, Found], ...]
    """Label and place of each."""
    to: Destination
    state: str
    """Folder of what was done, at the destination."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What came of a ``Work``: its lines of the split's table."""

    lines: tuple[str, ...]
    file: str
    """The shard; empty in a tree."""
    size: int
    sha256: str
    damaged: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        values = json.loads(text)
        values["lines"], values["damaged"] = tuple(values["lines"]), tuple(values["damaged"])
        return cls(**values)

    @property
    def stored(self) -> StoredFile:
        return StoredFile(size=self.size, sha256=self.sha256)


def done_before(work: Work) -> Part | None:
    """What an interrupted preparation left of this; None where it has to be done."""
    content = work.to.read(f"{work.state}/{work.name}.json")
    if content is None:
        return None
    part = Part.from_json(content)
    return None if part.file and work.to.size(part.file) != part.size else part


def run(work: Work) -> Part:
    """Do it, unless it was done before.

    Raises:
        OSError: the source or the destination fails.
    """
    if (before := done_before(work)) is not None:
        return before
    damaged: list[str] = []
    lines: list[str] = []
    shard = io.BytesIO()
    for entry, content in _pictures(work, damaged):
        if work.form == TREE:
            work.to.write(entry.file, content)
            lines.append(entry.to_line())
            continue
        shard.write(_header(entry.name, len(content)))
        lines.append(replace(entry, file=f"{work.name}.tar", offset=shard.tell()).to_line())
        shard.write(content)
        shard.write(bytes(-len(content) % tarfile.BLOCKSIZE))
    content = b""
    if work.form != TREE:
        shard.write(bytes(2 * tarfile.BLOCKSIZE))
        content = shard.getvalue()
        work.to.write(f"{work.name}.tar", content)
    part = Part(
        lines=tuple(lines),
        file="" if work.form == TREE else f"{work.name}.tar",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        damaged=tuple(damaged),
    )
    work.to.write(f"{work.state}/{work.name}.json", part.to_json().encode())
    return part


def _pictures(work: Work, damaged: list[str]) -> Iterator[tuple[Entry, bytes]]:
    """The bytes to store of each picture that is whole; the others are added to ``damaged``."""
    for label, found in work.pictures:
        name = f"{found.class_name}/{found.name}"
        try:
            content = layout.read(found)
            # Decoded as a whole in each form: what is damaged is found here, not while training.
            image = fitted(content, size=work.size)
        except DamagedError as error:
            damaged.append(f"{work.split}/{name}: {error}")
            continue
        if work.form == PACKED:
            if work.encoding == RAW:
                content = image.tobytes()
            else:
                file = io.BytesIO()
                image.save(file, "JPEG", quality=_QUALITY)
                content = file.getvalue()
        entry = Entry(
            label=label,
            name=name,
            file=f"{work.split}/{name}",
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            height=image.height,
            width=image.width,
        )
        yield entry, content


def _header(name: str, size: int) -> bytes:
    """Of a member of a tar archive, without owner and time, so that it is always the same."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
