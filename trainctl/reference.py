"""Write docs/cli.md and docs/settings.md from the code: ``python -m trainctl.reference``.

A test compares the pages with the code, so that neither falls behind the other.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

from stacks.settings import PRESETS_KEY, ROOT, Settings
from trainctl.__main__ import app
from trainctl.help import record
from training import recipes
from training.recipes import command as recipe_command

DOCS: Final = ROOT / "docs"
_HEAD = """\
# Commands

Written by `trainctl/reference.py` from the commands' own help; a test keeps it current. What they
are for is in [jobs.md](jobs.md) and [operations.md](operations.md). Every command that talks to AWS
also has `--profile NAME` and `--region REGION`.
"""
_SETTINGS_HEAD = """\
# Settings

Written by `trainctl/reference.py` from the code; a test keeps it current.

## Of a deployment

Defaults are in `cdk.json`; `-c name=value` overrides one for one command. Where presets differ, the
defaults are those of %s, in this order. A wrong value ends the command
with one sentence.

"""
#: Options that the head of the page describes.
_COMMON = ("--profile NAME", "--region REGION")


# Typer's commands are click's, of a copy that it brings along.
def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from walk(each, (*words, name))
    else:
        yield " ".join(words), command


def wrapped(text: str, bullet: str = "") -> str:
    """Wrap a paragraph like the prose of the other pages, or with ``bullet`` an item of a list."""
    filled = textwrap.fill(
        " ".join(text.split()),
        100,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled + "\n"


def described(words: str, command: Any, shared: dict[str, str]) -> str:
    """One command in Markdown.

    Args:
        shared: options of ``submit``, the first command, which ``plan`` has too.
    """
    context = command.make_context(words, [], resilient_parsing=True)
    lines = [f"## {words}", "", f"`{' '.join(command.get_usage(context).split()[1:])}`", ""]
    lines += [wrapped(part) for part in (command.help or "").split("\n\n")]
    options = [each for each in command.params if not getattr(each, "hidden", False)]
    rows = []
    for each in options:
        row = record(each, context)
        if not row or "Show this message" in row[1] or row[0] in _COMMON:
            continue
        name, text = (" ".join(part.split()) for part in row)
        if words != "trainctl plan" or shared.get(name) != text:
            rows.append(wrapped(f"`{name}`: {text}", "* "))
        shared.setdefault(name, text)
    if words == "trainctl plan":
        lines += [wrapped("The options of the job are those of `trainctl submit`.")]
    if rows:
        lines += ["".join(rows)]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    shared: dict[str, str] = {}
    commands = [described(words, each, shared) for words, each in walk(root, ("trainctl",))]
    return "\n".join([_HEAD, wrapped(root.epilog or ""), *commands])


def settings_page() -> str:
    """Settings of a deployment and of the recipes."""
    context = json.loads((ROOT / "cdk.json").read_text("utf-8"))["context"]
    presets: dict[str, dict[str, object]] = context[PRESETS_KEY]
    lines = [_SETTINGS_HEAD % ", ".join(f"`{each}`" for each in presets)]
    for name, meaning in documented(Settings).items():
        values = [context[name]] if name in context else [each[name] for each in presets.values()]
        shown = ", ".join(str(value).lower() for value in values)
        lines.append(wrapped(f"`{name}` ({shown or 'empty'}): {meaning}", "* "))
    known: dict[str, tuple[object, str]] = {}
    for recipe in recipes.ALL:
        names = [*recipe.presets]
        presets_text = f"Presets: {', '.join(names)}. The defaults are those of the first one."
        lines.append(f"\n## Of recipe {recipe.name}\n\n{wrapped(presets_text)}\n")
        listed = recipe_command.listed(recipe, names[0])
        rows: dict[str, tuple[object, str]] = {
            each.option: (each.default, each.help) for each in listed
        }
        same = [option for option, row in rows.items() if known.get(option) == row]
        if same:
            options = ", ".join(f"`{option}`" for option in same)
            lines.append(wrapped(f"As for `{recipes.ALL[0].name}`: {options}.") + "\n")
        lines += [
            wrapped(f"`{option}` ({str(default) or 'empty'}): {text}", "* ")
            for option, (default, text) in rows.items()
            if option not in same
        ]
        known = known or rows
    return "".join(lines)


def documented(kind: type) -> dict[str, str]:
    """Field of a dataclass -> the docstring under it."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    name = ""
    for each in definition.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                found[name] = text.replace("``", "`")
    return found


PAGES: Final = {"cli.md": page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, text in PAGES.items():
        Path(DOCS, name).write_text(text(), "utf-8")
