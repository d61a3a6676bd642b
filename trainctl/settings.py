"""``trainctl settings``: what a recipe can be given."""

import dataclasses
import difflib
from typing import Annotated

import typer

from trainctl import show
from trainctl.errors import UsageError
from trainctl.options import AsJson
from training.recipes import config


def settings(
    *,
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(config.CONFIGS)}.")],
    as_json: AsJson = False,
) -> None:
    """List the settings of a recipe, for submit: name, default, meaning."""
    if recipe not in config.CONFIGS:
        raise unknown_recipe(recipe)
    found = {
        "--" + field.name.replace("_", "-"): {"default": field.default, "help": text}
        for field in dataclasses.fields(config.CONFIGS[recipe])
        if field.metadata["cli"] and (text := field.metadata["help"].partition(" (default:")[0])
    }
    if as_json:
        show.print_json(found)
        return
    presets = ", ".join(config.PRESETS[recipe])
    show.print_text(f"--data SOURCE, --preset {presets}; the rest, where no preset says otherwise:")
    rows = [[name, str(each["default"]), str(each["help"])] for name, each in found.items()]
    show.print_table(["setting", "default", "meaning"], rows)


def unknown_recipe(recipe: str) -> UsageError:
    """The error for a recipe that there is not."""
    close = difflib.get_close_matches(recipe, config.CONFIGS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose {', '.join(config.CONFIGS)}"
    return UsageError(f"there is no recipe {recipe!r}: {hint}")
