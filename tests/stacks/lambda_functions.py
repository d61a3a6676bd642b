"""Lambda functions without Lambda: their modules, and what they ask of boto3 beside their calls."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def load(path: Path) -> ModuleType:
    """A new module of a function's file, as Lambda loads it."""
    specification = importlib.util.spec_from_file_location(f"{path.parent.name}_index", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def paginators(account: object) -> Callable[[str], Any]:
    """A client's ``get_paginator``: the pages of ``list_tasks`` are what the method ``_list_tasks``
    of ``account`` returns."""
    return lambda operation: SimpleNamespace(
        paginate=lambda **given: getattr(account, f"_{operation}")(**given)
    )


def context(remaining_s: Callable[[], float]) -> Any:
    """Lambda's context, which tells a function how much time it has left."""
    return SimpleNamespace(get_remaining_time_in_millis=lambda: round(1000 * remaining_s()))
