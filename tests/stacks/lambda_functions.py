"""Lambda functions without Lambda: their modules, and what they ask of boto3 beside their calls."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def load(path: Path) -> ModuleType:
    """A new module of a function's file, as Lambda loads it."""
    specification = importlib.util.spec_from_file_location(f"{path.parent.name}_index", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def answering(path: Path, account: Any, patch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a custom resource, which meets an account and its clock.

    Args:
        account: with ``client`` for boto3's, ``answers`` for what CloudFormation is answered
            (status, reason, physical id), and the ``clock`` of the function.
    """

    def send(
        _event: Any, _context: Any, status: str, _data: Any, physical_id: str, *, reason: str | None
    ) -> None:
        account.answers.append((status, reason, physical_id))

    response = SimpleNamespace(SUCCESS="SUCCESS", FAILED="FAILED", send=send)
    patch.setitem(sys.modules, "boto3", SimpleNamespace(client=account.client))
    patch.setitem(sys.modules, "cfnresponse", response)
    module = load(path)
    patch.setattr(module, "time", account.clock)
    return module


def context(remaining_s: Callable[[], float]) -> Any:
    """Lambda's context, which tells a function how much time it has left."""
    return SimpleNamespace(get_remaining_time_in_millis=lambda: round(1000 * remaining_s()))
