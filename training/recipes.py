"""The recipes by name: their settings and their loop.

The loop is imported only when asked for, so that the command line can check a user's input
before torch is loaded.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from training.config import CONFIGS, RunConfig

LOOPS: Final[Mapping[str, str]] = {"ddp": "training.ddp"}


def loop(recipe: str) -> Callable[..., None]:
    """Return ``train(worker, config)`` of a recipe."""
    function: Callable[..., None] = import_module(LOOPS[recipe]).train
    return function


def config_from_json(values: Mapping[str, Any]) -> RunConfig:
    return CONFIGS[values["recipe"]].from_json(values)
