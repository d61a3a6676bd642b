"""Proves that a MiniStack without a name that the rehearsal wraps is refused at import, by name,
and that the list of those names is complete and has no others."""

import ast
import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "rehearsal" / "ministack"
INTERNALS = "rehearsal.ministack.internals"


def declared() -> dict[str, tuple[str, set[str]]]:
    """Variable of ``internals`` -> MiniStack's module and the names that are listed of it."""
    found = {}
    for node in ast.parse((PACKAGE / "internals.py").read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "_module"
        ):
            module, *names = [ast.literal_eval(each) for each in node.value.args]
            (target,) = node.targets
            assert isinstance(target, ast.Name)
            found[target.id] = (module, {*names})
    return found


def used() -> dict[str, set[str]]:
    """Variable of ``internals`` -> the names that the other modules use of it."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == INTERNALS
            for name in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id in imported:
                found.setdefault(owner.id, set()).add(node.attr)
            elif isinstance(owner, ast.Attribute) and ast.unparse(owner.value) == "internals":
                found.setdefault(owner.attr, set()).add(node.attr)
    return found


def test_the_list_names_what_is_used_and_nothing_else() -> None:
    listed = {variable: names for variable, (_module, names) in declared().items()}
    assert len(listed) > 15
    assert used() == listed


def test_nothing_else_imports_the_emulator() -> None:
    for path in (ROOT / "rehearsal").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = [
            name
            for node in ast.walk(tree)
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        ]
        assert [name for name in imported if name.split(".")[0] == "ministack"] == [], path


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Imports ``internals`` beside a stub of MiniStack that has the listed names but one."""

    def load(*, without: str = "", version: str | None = None) -> ModuleType:
        for module, names in declared().values():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    stub = ModuleType(name)
                    stub.__path__ = []
                    monkeypatch.setitem(sys.modules, name, stub)
            for name in names:
                if f"{module}.{name}" != without:
                    setattr(sys.modules[module], name, object())
        if without in sys.modules:
            monkeypatch.delitem(sys.modules, without)
        stock = metadata.version
        monkeypatch.setattr(
            metadata,
            "version",
            lambda name: (version or "1.5.33") if name == "ministack" else stock(name),
        )
        monkeypatch.delitem(sys.modules, INTERNALS, raising=False)
        try:
            return importlib.import_module(INTERNALS)
        finally:
            monkeypatch.delitem(sys.modules, INTERNALS, raising=False)

    return load


def test_an_emulator_with_all_names_is_accepted(load: Callable[..., ModuleType]) -> None:
    assert load().MINISTACK_VERSION == "1.5.33"


def test_a_name_that_is_gone_is_told_at_import(load: Callable[..., ModuleType]) -> None:
    with pytest.raises(ImportError) as caught:
        load(without="ministack.services.ecs._mark_task_running")
    message = str(caught.value)
    assert "was written for MiniStack 1.5.33" in message
    assert "no ministack.services.ecs._mark_task_running:" in message


def test_a_module_that_is_gone_is_told_at_import(load: Callable[..., ModuleType]) -> None:
    with pytest.raises(ImportError, match=r"has no ministack\.core\.router:"):
        load(without="ministack.core.router")


def test_another_version_is_refused_before_its_names_are_looked_at(
    load: Callable[..., ModuleType],
) -> None:
    with pytest.raises(ImportError, match=r"MiniStack 1\.5\.33, and this Python has 9\.9\.9"):
        load(version="9.9.9", without="ministack.app.main")
