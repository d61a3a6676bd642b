"""The recipes by name: their settings and their loop.

The loop is imported only when asked for, so that the command line can check a user's input
before torch is loaded.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from training.recipes.config import CONFIGS, FsdpConfig, RunConfig

LOOPS: Final[Mapping[str, str]] = {
    "ddp": "training.recipes.ddp.loop",
    "fsdp": "training.recipes.fsdp.loop",
}


#: What the workers of a recipe import besides it, sooner or later, and all by themselves: torch's
#: optimizers and DDP import torch._dynamo.
_LATER: Final[Mapping[str, tuple[str, ...]]] = {
    "ddp": ("torch._dynamo",),
    "fsdp": (
        "torch._dynamo",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt_neox.modeling_gpt_neox",
    ),
}


def preload(recipe: str) -> str:
    """Modules for ``training.runtime.forkserver`` to import before it forks a recipe's workers."""
    return ",".join((LOOPS[recipe], *_LATER[recipe]))


def loop(recipe: str) -> Callable[..., None]:
    """Return ``train(worker, config)`` of a recipe."""
    function: Callable[..., None] = import_module(LOOPS[recipe]).train
    return function


def prepare(config: RunConfig, report: Callable[[int, int], None] | None = None) -> RunConfig:
    """Look at a run's data before any worker does, and make of it what they share.

    Args:
        report: called with the bytes read and the bytes there are, where that takes time.

    Returns:
        The settings, with what was decided.

    Raises:
        InputError: the data cannot be used; here it is said once and not by every worker.
    """
    if isinstance(config, FsdpConfig):
        from training.data import text

        return text.prepare(config, report)
    from training.data import images

    images.load(config.data)
    return config


def config_from_json(values: Mapping[str, Any]) -> RunConfig:
    return CONFIGS[values["recipe"]].from_json(values)
