"""The old way to the settings of recipes; goes once nobody imports it."""

from collections.abc import Mapping
from typing import Any, Final

from training import recipes
from training.recipes.ddp.settings import DdpConfig
from training.recipes.fsdp.settings import OPTIMIZERS, RECOMPUTE, FsdpConfig
from training.recipes.settings import RunConfig, check_value, differences

__all__ = [
    "BUILT_IN_DATA",
    "BUILT_IN_PRESET",
    "CONFIGS",
    "OPTIMIZERS",
    "PRESETS",
    "RECOMPUTE",
    "DdpConfig",
    "FsdpConfig",
    "RunConfig",
    "check_value",
    "differences",
]

CONFIGS: Final[Mapping[str, type[RunConfig]]] = {each.name: each.config for each in recipes.ALL}
BUILT_IN_DATA: Final = {each.name: each.built_in_data for each in recipes.ALL}
BUILT_IN_PRESET: Final = {each.name: each.built_in_preset for each in recipes.ALL}
PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    each.name: each.presets for each in recipes.ALL
}
