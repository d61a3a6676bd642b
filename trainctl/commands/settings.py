"""``trainctl settings``: the settings of a recipe."""

from typing import Annotated

import typer

from contract.errors import InputError
from trainctl import output
from trainctl.options import AsJson
from training import command, recipes


def settings(
    *,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help=f"One of {', '.join(recipes.NAMES)}.",
        ),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="Show the defaults of this preset.",
            show_default="the first one",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the settings of a recipe, for submit: name, default, meaning."""
    found = recipes.by_name(recipe)
    chosen = found.preset_for(None) if preset is None else preset
    if chosen not in found.presets:
        raise InputError(f"unknown preset {chosen!r}; {found.name} has {', '.join(found.presets)}")
    listed = command.listed(found, chosen)
    if as_json:
        output.print_json(
            {each.option: {"default": each.default, "help": each.help} for each in listed}
        )
        return
    output.print_text(
        f"--data SOURCE, --preset {', '.join(found.presets)}; the rest, as preset {chosen} has it:"
    )
    if preset is None:
        output.say(
            f"Without --preset, a job uses {found.preset_for(None)} for the built-in data and "
            f"{found.preset_for('')} for your own (--data)."
        )
    rows = [[each.option, str(each.default), each.help] for each in listed]
    output.print_table(["setting", "default", "meaning"], rows, prose=["meaning"])
