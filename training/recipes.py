"""All recipes. Standard library only: a loop is imported when it is asked for."""

from collections.abc import Mapping
from typing import Final

from contract.errors import InputError
from contract.text import did_you_mean
from training.bandwidth import RECIPE as BANDWIDTH
from training.ddp import RECIPE as DDP
from training.fsdp import RECIPE as FSDP
from training.imagenet import RECIPE as IMAGENET
from training.recipe import ModelForm, Recipe
from training.settings import RunConfig

ALL: Final = (DDP, FSDP, IMAGENET, BANDWIDTH)
NAMES: Final = tuple(recipe.name for recipe in ALL)
#: Recipes whose runs ``training.export`` and ``training.generate`` read, for help texts.
SHARDED: Final = ", ".join(recipe.name for recipe in ALL if recipe.model is ModelForm.SHARDED)


def by_name(name: str) -> Recipe:
    """
    Raises:
        InputError: there is no such recipe.
    """
    for recipe in ALL:
        if recipe.name == name:
            return recipe
    hint = did_you_mean(name, NAMES, otherwise=f"choose {', '.join(NAMES)}")
    raise InputError(f"unknown recipe {name!r}: {hint}")


def config_from_json(values: Mapping[str, object]) -> RunConfig:
    """The settings of any recipe, from ``RunConfig.to_json``'s result."""
    return by_name(str(values["recipe"])).config.from_json(values)
