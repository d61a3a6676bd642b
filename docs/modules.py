"""Writes the list of modules in docs/architecture.md from the first line of each one's docstring.

python -m docs.modules
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "architecture.md"
FOLDERS: Final = ("contract", "training", "containers", "stacks", "trainctl", "rehearsal")
_BEGIN: Final = "<!-- modules: written by python -m docs.modules -->\n"
_END: Final = "<!-- end of modules -->\n"


def modules(folder: Path) -> Iterator[Path]:
    """Python files of a folder, those in it before those in its folders."""
    inside = [path for path in folder.iterdir() if path.suffix == ".py" and path.stat().st_size]
    yield from sorted(inside, key=lambda path: (path.name != "__init__.py", path.name))
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from modules(below)


def line_of(path: Path) -> str:
    """What a module is for: the first line of its docstring.

    Raises:
        ValueError: it has none.
    """
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not said:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring")
    return said.splitlines()[0].rstrip(".").replace("``", "`")


def listing() -> str:
    """The list as Markdown: a table per folder."""
    parts = []
    for name in FOLDERS:
        rows = [
            f"| `{path.relative_to(ROOT / name).as_posix()}` | {line_of(path)} |"
            for path in modules(ROOT / name)
        ]
        parts.append(f"### {name}/\n\n| module | |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def page(text: str) -> str:
    """``text`` of docs/architecture.md with the list brought up to date."""
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{PAGE.name} does not have the two lines between which the list stands")
    return before + _BEGIN + listing() + _END + after


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
