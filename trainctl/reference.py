"""Write docs/cli.md and docs/settings.md from the code: ``python -m trainctl.reference``.

A test compares the pages with the code, so that neither falls behind the other.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

from stacks.settings import DEFAULTS_KEY, PRESETS_KEY, ROOT, Settings
from trainctl.__main__ import app
from trainctl.help import WIDTH
from training import command as recipe_command
from training import recipes
from training.recipe import Recipe

DOCS: Final = ROOT / "docs"
_HEAD = """\
# Commands

Written by `trainctl/reference.py` from the commands' own help; a test keeps it current. What they
are for is in [jobs.md](jobs.md) and [operations.md](operations.md). Every command that talks to AWS
also has `--profile NAME`, `--region REGION` and `--deployment NAME`; those that print data have
`--json`, those that ask `--yes`, and `plan` and `tune` have the options of `submit`. `JOB` is the
ID of a job or the name of a run, whose newest job it means; `RUN` is a name.
"""
_SETTINGS_HEAD = """\
# Settings

Written by `trainctl/reference.py` from the code; a test keeps it current.

## Of a deployment

Defaults are in `cdk.json`, and a preset beats them. What you write beside the two tables there
beats both, and `-c name=value` all. Machines are those of
%s, in this order.

"""
#: Options that the head of the page describes.
_COMMON: Final = ("profile", "region", "deployment", "as_json", "yes")
_KNOWN: Final = r"Arguments:\n  (JOB|RUN)  .*\[required\]\n\n"


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


def page() -> str:
    """The whole page: the help of each command."""
    root: Any = typer.main.get_command(app)
    parts = [_HEAD, wrapped(root.epilog)]
    of_job = {each.name for each in root.commands["submit"].params}
    for words, command in walk(root, ("trainctl",)):
        hidden = {*_COMMON, *(of_job if words in ("trainctl plan", "trainctl tune") else ())}
        command.params = [each for each in command.params if each.name not in hidden]
        command.add_help_option = False
        context = command.make_context(words, [], resilient_parsing=True, terminal_width=WIDTH)
        text = command.get_help(context).removeprefix("Usage: ")
        text = re.sub(_KNOWN, "", text)
        parts.append(f"## {words}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def settings_page() -> str:
    """Settings of a deployment and of the recipes."""
    context = json.loads((ROOT / "cdk.json").read_text("utf-8"))["context"]
    defaults, presets = context[DEFAULTS_KEY], context[PRESETS_KEY]
    lines = [_SETTINGS_HEAD % ", ".join(f"`{each}`" for each in presets)]
    for name, meaning in documented(Settings).items():
        usual = [values[name] for values in (context, defaults) if name in values]
        own = {preset: each[name] for preset, each in presets.items() if name in each}
        values = [str(value).lower() for value in usual or own.values()]
        shown = ", ".join(values + [f"`{each}`: {own[each]}" for each in own if usual])
        lines.append(wrapped(f"`{name}` ({shown or 'empty'}): {meaning}", "* "))
    return "".join([*lines, *map(_of_recipe, recipes.ALL)])


def _of_recipe(recipe: Recipe) -> str:
    """Settings of a recipe; those that are as for the first recipe are only named."""
    first, presets = recipes.ALL[0], [*recipe.presets]
    listed = recipe_command.listed(recipe, presets[0])
    known = [] if recipe is first else recipe_command.listed(first, next(iter(first.presets)))
    head = f"Presets: {', '.join(presets)}. The defaults are those of the first one."
    lines = [f"\n## Of recipe {recipe.name}\n\n{wrapped(head)}\n"]
    if same := ", ".join(f"`{each.option}`" for each in listed if each in known):
        lines.append(wrapped(f"As for `{first.name}`: {same}.") + "\n")
    lines += [
        wrapped(f"`{each.option}` ({str(each.default) or 'empty'}): {each.help}", "* ")
        for each in listed
        if each not in known
    ]
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
