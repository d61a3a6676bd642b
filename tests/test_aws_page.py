"""docs/aws.md names a module and a test, or a page, for each behavior of AWS; all of them exist."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT

PAGE: Final = ROOT / "docs" / "aws.md"
#: The facts that the design began with; a part of one may have a letter behind its number.
FIRST: Final = {f"A{number}" for number in range(1, 41)}
NOT_A_MODULE: Final = ("not used", "stated")


def rows() -> list[list[str]]:
    """The cells of every row: name, behavior, source, handled in, shown by."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| A"):
            assert len(cells) == 5, line
            found.append(cells)
    return found


def has_test(file: Path, name: str) -> bool:
    """Whether a file defines a test of this name."""
    if not file.is_file():
        return False
    names = (node for node in ast.walk(ast.parse(file.read_text())))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in names)


def has_section(page: Path, anchor: str) -> bool:
    """Whether a page has a heading that GitHub gives this anchor."""
    if not page.is_file():
        return False
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    return not anchor or anchor in anchors


def missing(cells: list[str]) -> list[str]:
    """What a row names and the project does not have."""
    _, _, source, module, shown = cells
    found = []
    if not source:
        found.append("no source")
    if module not in NOT_A_MODULE and not (ROOT / module.strip("`")).is_file():
        found.append(f"no module {module}")
    if test := re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown):
        if not has_test(ROOT / test[1], test[2]):
            found.append(f"no test {shown}")
    elif page := re.fullmatch(r"\[\w+\.md\]\((\w+\.md)#?([\w-]*)\)", shown):
        if not has_section(ROOT / "docs" / page[1], page[2]):
            found.append(f"no page {shown}")
    else:
        found.append(f"{shown!r} is neither a test nor a page")
    return found


def test_every_module_test_and_page_that_is_named_exists() -> None:
    found = {row[0]: lacks for row in rows() if (lacks := missing(row))}
    assert found == {}


def test_every_behavior_has_one_row_and_none_that_the_design_began_with_is_left_out() -> None:
    names = [row[0] for row in rows()]
    assert len(names) == len({*names})
    assert {name.rstrip("abcd") for name in names} >= FIRST


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("`stacks/no_such_file.py`", "[limits.md](limits.md)"),
        ("`stacks/teardown.py`", "`tests/stacks/test_teardown.py::test_that_is_not_there`"),
        ("`stacks/teardown.py`", "[limits.md](limits.md#no-such-section)"),
        ("`stacks/teardown.py`", "by hand"),
    ],
)
def test_a_row_that_names_what_is_not_there_is_found(module: str, shown: str) -> None:
    assert len(missing(["A0", "behavior", "source", module, shown])) == 1
