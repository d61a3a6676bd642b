"""Write docs/cli.md from the help of ``trainctl``: ``python -m trainctl.reference > docs/cli.md``.

A test compares the two, so that neither falls behind the other.
"""

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from trainctl.__main__ import app
from trainctl.help import record

_HEAD = """\
# Commands

Written by `trainctl/reference.py` from the commands' own help; a test keeps it current. What they
are for is in [jobs.md](jobs.md) and [operations.md](operations.md).
"""


# Typer's commands are click's, of a copy that it brings along.
def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from walk(each, (*words, name))
    else:
        yield " ".join(words), command


def wrapped(paragraph: str) -> str:
    """As prose in the other pages is wrapped."""
    words = " ".join(paragraph.split())
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def described(words: str, command: Any) -> str:
    """One command in Markdown."""
    context = command.make_context(words, [], resilient_parsing=True)
    lines = [f"## {words}", "", f"`{' '.join(command.get_usage(context).split()[1:])}`", ""]
    lines += [wrapped(part) for part in (command.help or "").split("\n\n")]
    options = [each for each in command.params if not getattr(each, "hidden", False)]
    rows = []
    for each in options:
        row = record(each, context)
        if row and "Show this message" not in row[1]:
            name, text = (part.replace("|", "\\|") for part in row)
            rows.append(f"| `{' '.join(name.split())}` | {' '.join(text.split())} |")
    if rows:
        lines += ["| | |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    commands = [described(words, each) for words, each in walk(root, ("trainctl",))]
    return "\n".join([_HEAD, wrapped(root.epilog or ""), *commands])


if __name__ == "__main__":
    sys.stdout.write(page())
