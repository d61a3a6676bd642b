"""Writes docs/record.md: every file of a run's record, field by field, from the code.

python -m docs.record > docs/record.md
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from typing import Any, Final, get_type_hints

from training import recipes
from training.record import events, result
from training.record.fields import Known, Named, Rate

# What a field's type is called in JSON.
_KINDS: Final[dict[object, str]] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "list of text",
    tuple[tuple[float, ...], ...]: "list of lists of numbers",
    Named: "list of text",
    Known: "list of text",
    tuple[result.ImageSample, ...]: "list of objects, see below",
    Rate: "number",
}
# What is trained on is a part of the key, and so is each name of a list of names.
_RATE: Final = "`images_per_s`, `tokens_per_s`, …"
_NAMES: Final = "Each of these names{} is a key of its own beside this list, with a number{}: "

_TOP: Final = """\
# The record of a run

Written by `python -m docs.record > docs/record.md` from `training/record/`; a test compares the
two. [training.md](training.md) lists the files of a run; here are the fields of those that programs
read.

Versions differ, so a reader ignores fields and types that it does not know, and takes a value of
another kind for missing. A field with *optional* is left out where it does not apply. A line of
`metrics.jsonl` that cannot be read loses only itself. When a run resumes, lines of later steps than
its checkpoint's are forgotten, because those steps are trained again.

Python reads them with `training.record.reader`: `read_metrics`, `read_result`, `read_run`.
"""


def page() -> str:
    """The whole page."""
    parts = [_TOP, "## metrics.jsonl\n", "One JSON object per line; `type` is its event.\n"]
    in_file = {
        name: kind for name, kind in events.TYPES.items() if "``metrics.jsonl``" in _doc(kind)
    }
    parts += [_section(f'"type": "{name}"', kind) for name, kind in in_file.items()]
    parts += ["## Measures\n", _measures()]
    parts += ["## result.json\n", _words(result.Result), _table(result.Result, optional="or null")]
    parts += ["## evaluation.json\n", "Of a classifier:\n", _words(result.Classification)]
    parts += [_table(result.Classification), "A sample of it:\n", _table(result.ImageSample)]
    parts += ["Of a language model:\n", _words(result.HeldOutText), _table(result.HeldOutText)]
    parts += ["Of a recipe that is neither:\n", _words(result.Table), _table(result.Table)]
    return "\n".join(parts)


def _measures() -> str:
    """By what the runs of each recipe are judged."""
    words = (
        "By what the runs of each recipe are judged, beside their loss. A recipe declares them; "
    )
    words += "the record repeats them as lines of the type `measure`."
    rows = ["| recipe | measure | meaning | better |", "| --- | --- | --- | --- |"]
    for recipe in recipes.ALL:
        for each in recipe.measures:
            unit = f", in {each.unit}" if each.unit else ""
            better = "higher" if each.higher_is_better else "lower"
            meaning = _markdown(each.meaning)
            rows.append(f"| `{recipe.name}` | `{each.name}` | {meaning}{unit} | {better} |")
    return textwrap.fill(words, 100) + "\n\n" + "\n".join(rows) + "\n"


def _section(title: str, kind: type[Any]) -> str:
    return f"### `{title}`\n\n{_words(kind)}\n{_table(kind)}"


def _words(kind: type[Any]) -> str:
    text = re.sub(r"\s*A line of ``metrics.jsonl``[^.]*\.", "", " ".join(_doc(kind).split()))
    return textwrap.fill(_markdown(text), 100) + "\n"


def _table(kind: type[Any], *, optional: str = "optional") -> str:
    hints, described = get_type_hints(kind), descriptions(kind)
    rows = ["| field | kind | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        is_optional = isinstance(hint, type(int | None))
        if is_optional:
            (hint,) = (each for each in hint.__args__ if each is not type(None))
        name = _RATE if hint is Rate else f"`{field.name}`"
        words = f"{_KINDS[hint]}, {optional}" if is_optional else _KINDS[hint]
        meaning = described[field.name].replace("None", "null" if "null" in optional else "missing")
        if "suffix" in field.metadata:
            suffix = field.metadata["suffix"]
            meaning = (
                _NAMES.format(
                    f", followed by `{suffix}`," if suffix else "",
                    " or null" if hint == Known else "",
                )
                + meaning[0].lower()
                + meaning[1:]
            )
        rows.append(f"| {name} | {words} | {_markdown(meaning)} |")
    return "\n".join(rows) + "\n"


def descriptions(kind: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value.value if _is_text(below) else ""  # type: ignore[attr-defined]
            found[field.target.id] = " ".join(text.split())
    return found


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _doc(kind: type[Any]) -> str:
    return inspect.getdoc(kind) or ""


def _markdown(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
