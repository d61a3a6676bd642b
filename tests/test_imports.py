"""Imports point one way, so that a laptop needs no torch and a recipe can be read from below.

    contract, instance_types <- config <- the parts (data, models, checkpoints ...) <- the recipes

Sources are parsed, never imported: imports inside functions count like all others, because they
fail all the same on a machine that lacks the package.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.test_packaging import canonical, pins

# Not ours to declare: Lambda puts it beside code that a template carries inline.
PROVIDED = {"stacks.teardown_handler.index": {"cfnresponse"}}

PACKAGES = (
    *("training", "trainctl", "stacks", "containers", "benchmarks", "rehearsal", "docs", "tests"),
)

# What needs the standard library alone, and what laptops and node processes may therefore import.
SHARED = {"contract", "contract.instance_types", "training.recipes.config"}
LAPTOP_AND_NODE = {"stacks", "trainctl", "containers"}
# Of what only a node has.
NODE = {"containers": {"training.runtime.forkserver", "training.recipes"}}

# Each layer may import those before it, and itself. Whatever has no place here is a part.
LAYERS: Mapping[str, int] = {
    "contract": 0,
    "contract.instance_types": 0,
    "training.recipes.config": 1,
    "training.recipes.ddp.loop": 3,
    "training.recipes.fsdp.loop": 3,
    "training.imagenet": 3,
    "training.bandwidth": 3,
    "training.export": 4,
    "training.generate": 4,
    "training.runtime.trainer": 4,
    "training.runtime.driver": 4,
    "training.runtime.torchrun": 4,
    "training.launch": 4,
}
COMPILE = "containers/requirements-compile.txt"  # pinned for those who ask for it
PART, RECIPE = 2, 3


class Import(NamedTuple):
    """One import: which module says so, in which line, what it names, and when it happens."""

    importer: str
    line: int
    target: str
    at_load: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def project_sources() -> dict[str, str]:
    """Module name -> source, of everything in the project."""
    files = [*ROOT.glob("*.py")]
    for package in PACKAGES:
        files += (ROOT / package).rglob("*.py")
    return {module_name(file.relative_to(ROOT)): file.read_text() for file in files}


def imports(sources: Mapping[str, str]) -> Iterator[Import]:
    """Every import in ``sources``; ``from package import name`` names the module, if it is one."""
    for importer, source in sources.items():
        tree = ast.parse(source)
        # Only what is not inside a function or ``if TYPE_CHECKING`` runs when the module loads.
        later: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            ):
                later.update(ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{importer}:{node.lineno}: relative import"
                assert node.module is not None
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [name if name in sources else node.module for name in full]
            else:
                continue
            for target in dict.fromkeys(targets):
                yield Import(importer, node.lineno, target, node not in later)


def top(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int:
    """Layer of a module of ``training``; submodules have their package's."""
    for name in (module, ".".join(module.split(".")[:2])):
        if name in LAYERS:
            return LAYERS[name]
    return PART


def violations(sources: Mapping[str, str]) -> list[str]:
    """Each import that points the wrong way, and the rule it breaks."""
    found: list[str] = []
    for each in imports(sources):
        importer, target = each.importer, each.target
        own = top(importer)
        ours = target in sources or top(target) in PACKAGES

        if importer in SHARED and not ours and top(target) not in sys.stdlib_module_names:
            found.append(f"{each}: {importer} is for the standard library alone")
        may = SHARED | NODE.get(own, set())
        if own in LAPTOP_AND_NODE and top(target) == "training" and target not in may:
            found.append(f"{each}: {own} may import only {', '.join(sorted(may))}")
        if top(target) in {"stacks", "trainctl"} and own not in {top(target), "app", "tests"}:
            found.append(f"{each}: nobody imports {top(target)}")
        if own == "training" and ours:
            if top(target) != "training":
                found.append(f"{each}: training imports nothing else of the project")
            # The package's own __init__ loads before everything and is checked on its own below.
            elif target != "training":
                here, there = layer(importer), layer(target)
                if there > here:
                    found.append(f"{each}: imports point down, from recipes to contract")
                elif here == there == RECIPE and target.split(".")[1] != importer.split(".")[1]:
                    found.append(f"{each}: recipes do not import each other")
        if importer == "training":
            found.append(
                f"{each}: training/__init__.py loads before everything, and imports nothing"
            )
    return found


def load_order(sources: Mapping[str, str]) -> list[str]:
    """Modules in an order in which they can load. Raises graphlib.CycleError if there is none."""
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for each in imports(sources):
        if each.at_load and each.target in sources and each.target != each.importer:
            graph[each.importer].add(each.target)
    return [*graphlib.TopologicalSorter(graph).static_order()]


def undeclared(sources: Mapping[str, str], declared: set[str]) -> list[str]:
    """Third-party imports whose distribution is not in ``declared``. What only type checkers
    import, boto3's stubs, is in requirements-dev.txt."""
    distributions = metadata.packages_distributions()
    return [
        str(each)
        for each in imports(sources)
        if top(each.target) not in {*sys.stdlib_module_names, *PACKAGES, "app"}
        and top(each.target) not in PROVIDED.get(each.importer, ())
        and not (top(each.target).startswith("mypy_boto3_") and not each.at_load)
        # What is not installed here (ministack lives in .venv-aws) goes by its own name.
        and not {
            canonical(name) for name in distributions.get(top(each.target), [top(each.target)])
        }
        & declared
    ]


def test_imports_of_this_project_point_one_way() -> None:
    sources = project_sources()
    assert {"contract", "training.recipes.config", "trainctl.__main__"} <= sources.keys()
    assert violations(sources) == []


def test_modules_of_this_project_load_in_one_order() -> None:
    order = load_order(project_sources())
    assert order.index("contract") < order.index("training.recipes.config")


@pytest.mark.parametrize(
    ("packages", "files"),
    [
        ({"training", "containers"}, ["containers/requirements.txt", COMPILE]),
        ({"app", "trainctl", "stacks"}, ["requirements.txt"]),
        ({"rehearsal"}, ["requirements.txt", "rehearsal/requirements.txt"]),
        (
            {"benchmarks", "tests"},
            ["containers/requirements.txt", "requirements.txt", "requirements-dev.txt", COMPILE],
        ),
    ],
)
def test_what_is_imported_is_asked_for_by_name(packages: set[str], files: list[str]) -> None:
    declared = {name for file in files for name in pins(ROOT / file)}
    sources = {name: text for name, text in project_sources().items() if top(name) in packages}
    assert undeclared(sources, declared) == []


# The rules above are only as good as the eyes they look with: small projects, one fault each.
_CLEAN = {
    "training": "",
    "contract": "import re",
    "training.recipes.config": "from contract import InputError",
    "training.data": "",
    "training.data.images": "import torch\nfrom training import config",
    "training.data.sources": "from training.data import idx",
    "training.data.idx": "from contract import InputError",
    "training.recipes.ddp.loop": "from training import data\nfrom training.data import images",
    "training.models.classifiers": "import torch",
    "training.recipes.fsdp.loop": "from training import models",
    "training.launch": "def run():\n    from training import ddp",
    "trainctl.submit": "import boto3\nfrom contract import EXIT_OK",
    "stacks.settings": "from training import config",
    "app": "from stacks.settings import Settings",
}


def test_a_project_that_keeps_the_rules_passes() -> None:
    assert violations(_CLEAN) == []
    assert load_order(_CLEAN)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("contract", "import torch", "for the standard library alone"),
        (
            "training.recipes.config",
            "def f():\n    import numpy as np",
            "for the standard library alone",
        ),
        ("contract", "from training import config", "imports point down"),
        ("training.recipes.config", "import training.models.classifiers", "imports point down"),
        (
            "training.models.classifiers",
            "from training.recipes.ddp.loop import train",
            "imports point down",
        ),
        ("training.data.idx", "from training import launch", "imports point down"),
        (
            "training.recipes.ddp.loop",
            "def f():\n    from training import launch",
            "imports point down",
        ),
        (
            "training.recipes.fsdp.loop",
            "from training.recipes.ddp.loop import train",
            "do not import each other",
        ),
        ("training.models.classifiers", "from stacks import settings", "nobody imports stacks"),
        ("training.models.classifiers", "import trainctl.submit", "nobody imports trainctl"),
        (
            "training.models.classifiers",
            "from benchmarks import ddp",
            "nothing else of the project",
        ),
        ("benchmarks.ddp", "from trainctl import submit", "nobody imports trainctl"),
        ("trainctl.submit", "from stacks.settings import Settings", "nobody imports stacks"),
        ("trainctl.submit", "from training import models", "may import only"),
        ("containers.entry", "from training.models.classifiers import build", "may import only"),
        ("stacks.settings", "import training.data.images", "may import only"),
        ("training", "from contract import EXIT_OK", "loads before everything"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(
    module: str, source: str, complaint: str
) -> None:
    found = violations({**_CLEAN, module: source})
    assert len(found) >= 1
    assert any(f"{module}:" in line and complaint in line for line in found), found


def test_a_circle_is_found_unless_one_side_imports_late() -> None:
    eager = {"training.a": "from training import b", "training.b": "import training.a"}
    with pytest.raises(graphlib.CycleError):
        load_order(eager)
    assert load_order({**eager, "training.b": "def f():\n    import training.a"})
    assert load_order({**eager, "training.b": "if TYPE_CHECKING:\n    import training.a"})


def test_a_package_that_nobody_asked_for_is_found() -> None:
    source = {
        "training.models.classifiers": "import json\nimport pluggy\nimport numpy\nimport not_there"
    }
    assert undeclared(source, {"numpy"}) == [
        "training.models.classifiers:2 imports pluggy",
        "training.models.classifiers:4 imports not_there",
    ]
