"""Write docs/cli.md from the help of ``trainctl``: ``python -m trainctl.reference > docs/cli.md``.

A test compares the two, so that neither falls behind the other.
"""

import re
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
are for is in [jobs.md](jobs.md) and [operations.md](operations.md). Every command that talks to AWS
also has `--profile NAME` and `--region REGION`.
"""
#: Options that the head of the page describes.
_COMMON = ("--profile NAME", "--region REGION")
#: Commands with options of submit, which they name only.
_LIKE_SUBMIT = ("trainctl plan",)


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


def described(words: str, command: Any, shared: dict[str, str]) -> str:
    """One command in Markdown.

    Args:
        shared: options of ``submit``, which it fills in.
    """
    context = command.make_context(words, [], resilient_parsing=True)
    lines = [f"## {words}", "", f"`{' '.join(command.get_usage(context).split()[1:])}`", ""]
    lines += [wrapped(part) for part in (command.help or "").split("\n\n")]
    options = [each for each in command.params if not getattr(each, "hidden", False)]
    rows, same = [], []
    for each in options:
        row = record(each, context)
        if not row or "Show this message" in row[1] or row[0] in _COMMON:
            continue
        name, text = (" ".join(part.replace("|", "\\|").split()) for part in row)
        if words == "trainctl submit":
            shared[name] = text
        elif words in _LIKE_SUBMIT and shared.get(name) == text:
            long_name = re.search(r"--[\w-]+", name)
            same.append(f"`{long_name[0] if long_name else name}`")
            continue
        rows.append(f"| `{name}` | {text} |")
    if same:
        lines += [wrapped(f"As for `trainctl submit`: {', '.join(same)}.")]
    if rows:
        lines += ["| | |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    shared: dict[str, str] = {}
    commands = [described(words, each, shared) for words, each in walk(root, ("trainctl",))]
    return "\n".join([_HEAD, wrapped(root.epilog or ""), *commands])


if __name__ == "__main__":
    sys.stdout.write(page())
