"""Write docs/published.md: each published model, chat format and picture layout that is tried, and
what becomes of it. ``python -m tests.published.table``

The tests of each hold what the page says: ``test_models``, ``test_conversations``,
``test_class_folders``.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from tests.conftest import ROOT
from tests.published.chats import FORMATS, Format
from tests.published.layouts import LAYOUTS, Layout
from tests.published.models import KINDS, ROWS
from training.data.conversations import content_of
from training.data.pictures import layout

PAGE: Final = ROOT / "docs" / "published.md"
_HEAD: Final = """\
# Published models and data that are tried

Written by `python -m tests.published.table`. A model is a tiny one with random weights in exactly
the shape of the published one: keys of its configuration, types and names of its tensors. It is
loaded, trained, resumed, exported and loaded again, with the losses of transformers: "passes". Rows
of data and layouts of pictures are made after their publishers' pages; of a layout, the classes
are shown with their pictures for training + evaluation.
"""
_YES: Final = "passes"


def documented() -> dict[str, tuple[str, str]]:
    """``model_type`` -> how the table in docs/fsdp.md says that it is trained, and packed."""
    _, _, rest = (ROOT / "docs/fsdp.md").read_text().partition("<!-- families:")
    table, _, _ = rest.partition("<!-- end of families -->")
    found: dict[str, tuple[str, str]] = {}
    for line in table.splitlines()[3:]:
        _, kinds, trained, packed, _ = (cell.strip() for cell in line.split("|"))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", kinds), (trained, packed))
    return found


def page() -> str:
    """Content of the page."""
    return "\n".join(
        [
            _HEAD,
            *_table("Models", ("model", "`model_type`", "result", "packed", "source"), _models()),
            *_table("Rows of conversations", ("format", "result", "not used", "source"), _chats()),
            *_table("Layouts of pictures", ("layout", "result", "source"), _layouts()),
        ]
    )


def _models() -> Iterable[Sequence[str]]:
    families = documented()
    for name, row in ROWS.items():
        trained, packed = families.get(KINDS[name], ("", ""))
        refused = row.get("refused") or row.get("refused_late")
        result = f"refused: {refused}" if refused else _YES
        if refused == KINDS[name]:
            result = "refused: no model of transformers is of this type"
        if row.get("named"):
            result += "; tensors that are not used are named"
        assert refused or trained == "yes", name
        yield name, f"`{KINDS[name]}`", result, "" if refused else packed, row["source"]


def _chats() -> Iterable[Sequence[str]]:
    for name, each in FORMATS.items():
        lines = each.read.splitlines()
        learned = sum(line.startswith("assistant:") for line in lines)
        if re.match(r"(system|user|assistant)!?: ", each.read):
            result = f"{learned} of {len(lines)} messages and tools learned"
        elif each.read == "None":
            result = "left out: empty"
        else:
            result = "a text" if each.read.startswith("'") else _refusal(partial(_read, each))
        yield name, result, each.unused, each.source


def _layouts() -> Iterable[Sequence[str]]:
    for name, each in LAYOUTS.items():
        is_found = re.fullmatch(r"[^ ]+ \d+\+\d+(, .*)?", each.found) is not None
        yield name, each.found if is_found else _refusal(partial(arranged, each)), each.source


def _read(row: Format) -> None:
    content_of(json.loads(row.row), "text", row.columns)


def arranged(of: Layout, *more: str) -> layout.Arranged:
    """A published layout, with more files.

    Raises:
        InputError: it is refused.
    """
    items = [layout.Item(tuple(path.split("/")), path) for path in (*of.paths(), *more)]
    return layout.arrange(
        items, "it", content=lambda item: of.content.get(item.parts[-1], "").encode()
    )


def _refusal(read: Callable[[], object]) -> str:
    """The message of a refusal."""
    try:
        read()
    except ValueError as error:
        return f"refused: {error}"
    raise AssertionError("it is read")


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(each.replace('|', '/') for each in cells)} |"

    return [f"\n## {title}\n", line(heads), line(["---"] * len(heads)), *map(line, rows)]


if __name__ == "__main__":
    PAGE.write_text(page() + "\n", encoding="utf-8")
    sys.exit()
