"""Contents of a data set, found with the recipes' own readers before it is uploaded.

Standard library only: a laptop looks. Parquet, tokens and templates are left to a job's head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from contract.text import counted
from training.data import catalog, sources
from training.data.catalog import IMAGES, TEXT
from training.data.conversations import columns_of, parse_columns
from training.data.documents import Rows, documents, kind_of, text_files
from training.data.download import Report
from training.data.pictures import layout
from training.data.pictures.index import INDEX_FILE, Index

PICTURES: Final = "pictures"
_CONVERSATIONS: Final = "conversations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Kind, size and columns of a data set."""

    kind: str = ""
    """``images``, ``pictures``, ``text`` or ``conversations``; empty: none that a recipe reads."""
    rows: int = 0
    """Documents, conversations or pictures; 0: not counted."""
    num_bad: int = 0
    """Rows that cannot be used."""
    columns: tuple[str, ...] = ()
    """Column names of a text's rows."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why recipes cannot read it, by the kind of data that they read (``Recipe.data_kind``)."""

    def reason_against(self, kind: str, settings: Mapping[str, Any]) -> str:
        """Why a recipe cannot train on it; empty where it can, or where only a node can tell.

        Args:
            kind: that the recipe reads.
            settings: of the run.
        """
        found = self.refused.get(kind, "")
        if kind != TEXT or not self.columns:
            return found
        name, columns = str(settings["text_field"]), str(settings["columns"])
        if name != "text" or columns:
            has_them = columns_of(self.columns, name, parse_columns(columns))
            wanted = f"--columns {columns}" if columns else f"--text-field {name}"
            return "" if has_them else f"{wanted}: its columns are {', '.join(self.columns)}"
        can_skip = settings["skip_bad_rows"] and self.num_bad < self.rows
        return "" if can_skip else found

    def words(self) -> str:
        """For people: ``120 rows of conversations``."""
        rows = f"{counted(self.rows, 'row')} of " if self.rows else ""
        return f"{rows}{self.kind}" if self.kind else ""


def look(place: Path, report: Report | None = None) -> Contents:
    """Look at a folder or a file; nothing but text is read.

    Args:
        report: called with the bytes read and the bytes there are.
    """
    refused: dict[str, str] = {}
    kind, number = "", 0
    try:
        number = _num_pictures(place)
        kind = PICTURES
    except (InputError, OSError) as error:
        refused[PICTURES] = str(error)
    try:
        sources.local_files(str(place), catalog.IDX_FILES)
        kind = IMAGES
    except InputError as error:
        refused[IMAGES] = str(error)
    rows = Rows()
    try:
        files = text_files(str(place), unread=rows.files)
        readable = [each for each in files if kind_of(each.name) != "parquet"]
        for _ in documents(readable, rows, report):
            pass
        rows.check()
        if readable == files and not rows.kinds:
            raise InputError("its files hold no text")
        if not kind:
            kind, number = _CONVERSATIONS if False in rows.kinds else TEXT, rows.num
    except InputError as error:
        refused[TEXT] = str(error)
    return Contents(
        kind=kind or (TEXT if rows.names else ""),
        rows=number or rows.num,
        num_bad=rows.num_bad,
        columns=tuple(sorted(rows.names)),
        refused=refused,
    )


def _num_pictures(place: Path) -> int:
    if not place.is_dir():
        raise InputError(f"{place} is no folder of pictures")
    index = place / INDEX_FILE
    if index.is_file():
        return Index.from_json(index.read_bytes(), where=str(place)).num_pictures
    found = layout.arrange(
        layout.files(place),
        str(place),
        content=lambda item: place.joinpath(*item.parts).read_bytes(),
    )
    return sum(map(len, found.pictures.values()))
