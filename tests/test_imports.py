"""Imports point one way, so that a laptop needs no torch and a recipe can be read from below.

    contract <- system <- record <- loop <- data <- models <- checkpoint <- recipes <- runtime

Sources are parsed, never imported. Imports inside functions count like all others, because they
fail all the same on a machine that lacks the package, and so do modules that are named in strings
for ``importlib`` or a fork server. Every module has its place in a list below: a new one that has
none fails here, until someone has decided where it belongs.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.test_packaging import canonical, pins

# Not ours to declare: Lambda puts it beside code that a template carries inline.
PROVIDED = {
    "stacks.export_handler.index": {"cfnresponse"},
    "stacks.teardown_handler.index": {"cfnresponse"},
}

#: From the ground up; a package may import those before it that ``MAY`` lists, and itself.
PACKAGES = (
    *("contract", "training", "containers", "stacks", "rehearsal", "trainctl", "benchmarks"),
    *("examples", "tests"),
)
MAY: Mapping[str, set[str]] = {
    "contract": set(),
    "training": {"contract"},
    "containers": {"contract", "training"},
    "stacks": {"contract", "containers"},
    "rehearsal": {"contract", "training", "containers"},
    # Of stacks: the settings, which need no CDK, to look at a deployment before it is made.
    "trainctl": {"contract", "training", "rehearsal", "stacks"},
    "benchmarks": {"contract", "training", "containers", "rehearsal"},
    "examples": {"trainctl", "training"},
    "app": {"contract", "stacks"},
}

#: Recipes, each in a folder; they do not import each other.
RECIPES = {
    f"training.recipes.{file.parent.name}"
    for file in (ROOT / "training" / "recipes").glob("*/__init__.py")
}

#: Of ``training``: a layer may import those before it and its own modules. A package stands for all
#: of its modules; the longest name that fits counts.
LAYERS: tuple[set[str], ...] = (
    {"training"},
    {"training.system"},
    {"training.record"},
    {"training.loop"},
    {"training.data"},
    {"training.models"},
    {"training.recipes.recipe", "training.recipes.settings"},
    {"training.checkpoint"},
    {"training.recipes.bookkeeping"},
    RECIPES,
    {"training.recipes", "training.plan", "training.export"},
    {"training.runtime", "training.generate"},
    {"training.launch"},
)
#: What needs the standard library alone: laptops and node processes import it. A package stands for
#: itself and not for its modules.
STANDARD = {
    *("training", "training.data", "training.data.catalog", "training.data.download"),
    "training.data.mixture",
    *("training.data.pictures", "training.data.pictures.index", "training.data.pictures.layout"),
    *("training.models", "training.models.weight_files"),
    *("training.recipes", "training.recipes.recipe", "training.recipes.settings"),
    "training.recipes.command",
    *RECIPES,
    *(f"{name}.settings" for name in RECIPES),
    *("training.record", "training.record.fields", "training.record.result"),
    "training.record.events",
    *("training.record.progress", "training.plan"),
    *("training.models", "training.models.estimates", "training.models.model_shapes"),
    "training.models.picture_shapes",
}
#: What others may import of ``training``, beside ``STANDARD``.
OF_TRAINING: Mapping[str, set[str]] = {
    "containers": set(),
    # These need Pillow, and boto3 for a set in S3; both are there on a laptop.
    "trainctl": {
        *("training.data.pictures.prepare", "training.data.pictures.verify"),
        "training.data.pictures.destination",
    },
    "stacks": set(),
}
#: What ``trainctl`` may import of ``stacks``.
OF_STACKS = {"stacks", "stacks.settings"}
COMPILE = "containers/requirements-compile.txt"  # pinned for those who ask for it


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


@cache
def project_sources() -> Mapping[str, str]:
    """Module name -> source, of everything in the project."""
    files = [*ROOT.glob("*.py")]
    for package in PACKAGES:
        files += (ROOT / package).rglob("*.py")
    return {module_name(file.relative_to(ROOT)): file.read_text() for file in files}


class Statement(NamedTuple):
    """One import statement, or a string that may be the name of a module."""

    line: int
    package: str | None
    """Of ``from package import``."""
    names: list[str]
    at_load: bool
    is_string: bool = False


@cache
def statements(source: str) -> list[Statement]:
    """All that a source may import by, found in one walk: it takes most of these tests' time."""
    found = []
    # Each node, and whether it runs later or never: in a function or under `if TYPE_CHECKING`.
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, later = pending.pop()
        children = [*ast.iter_child_nodes(node)]
        match node:
            case ast.Import():
                names = [each.name for each in node.names]
                found.append(Statement(node.lineno, None, names, not later))
            case ast.ImportFrom():
                assert node.level == 0, f"line {node.lineno}: relative import {ast.unparse(node)}"
                names = [each.name for each in node.names]
                found.append(Statement(node.lineno, node.module, names, not later))
            # A word such as "training" or "docs" is a word.
            case ast.Constant(value=str(name)) if "." in name:
                found.append(Statement(node.lineno, None, [name], False, is_string=True))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                later = True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                later = True
            case ast.List() | ast.Tuple():
                # What follows "-m" is a program, which another process runs.
                for before, after in pairwise(node.elts):
                    if isinstance(before, ast.Constant) and before.value == "-m":
                        children.remove(after)
        pending += [(child, later) for child in children]
    return sorted(found, key=lambda each: each.line)


def imports(sources: Mapping[str, str]) -> Iterator[Import]:
    """Every import in ``sources``; ``from package import name`` names the module, if it is one.

    A string that is the name of a module counts too: ``importlib`` and the fork server import by
    such names.
    """
    for importer, source in sources.items():
        for line, package, targets, at_load, is_string in statements(source):
            if package is not None:
                full = [f"{package}.{name}" for name in targets]
                targets = [name if name in sources else package for name in full]
            elif is_string:
                targets = [name for name in targets if name in sources]
            for target in dict.fromkeys(targets):
                if target != importer:
                    yield Import(importer, line, target, at_load)


def top(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int | None:
    """Layer of a module of ``training``: that of the longest name in ``LAYERS`` that it begins
    with; None where it has none."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        for number, names in enumerate(LAYERS):
            if ".".join(parts[:length]) in names:
                return number
    return 0 if module == "training" else None


def recipe(module: str) -> str:
    """The recipe that a module belongs to; "" for others."""
    return next((name for name in RECIPES if f"{module}.".startswith(f"{name}.")), "")


def violations(sources: Mapping[str, str]) -> list[str]:
    """Each import that points the wrong way, and the rule it breaks."""
    found = [
        f"{module} has no place: add it to LAYERS in tests/test_imports.py"
        for module in sources
        if top(module) == "training" and layer(module) is None
    ]
    for each in imports(sources):
        importer, target = each.importer, each.target
        own, other = top(importer), top(target)
        ours = target in sources or other in PACKAGES
        light = own == "contract" or importer in STANDARD
        if light and not ours and other not in sys.stdlib_module_names:
            found.append(f"{each}: {importer} is for the standard library alone")
        if not ours or own == "tests":
            continue
        if other != own and other not in MAY[own]:
            found.append(f"{each}: {own} may import only {', '.join(sorted(MAY[own])) or 'itself'}")
        elif other == "stacks" and own == "trainctl" and target not in OF_STACKS:
            found.append(f"{each}: trainctl may import of stacks only the settings")
        elif other == "training" and own in OF_TRAINING:
            if target not in STANDARD | OF_TRAINING[own]:
                found.append(f"{each}: {own} may import of training only what needs no torch")
        elif own == other == "trainctl":
            if importer.startswith("trainctl.aws") and not target.startswith("trainctl.aws"):
                found.append(f"{each}: trainctl.aws is below the rest of trainctl")
        elif own == other == "training":
            here, there = layer(importer), layer(target)
            # A package's own __init__ loads before its modules.
            if here is not None and there is not None and there > here:
                found.append(f"{each}: imports point down, from commands to contract")
            if recipe(target) and recipe(importer) not in ("", recipe(target)):
                found.append(f"{each}: recipes do not import each other")
            if importer in STANDARD and each.at_load and target not in STANDARD:
                found.append(f"{each}: {importer} is for the standard library alone")
    return found


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, late imports and names in strings counted.

    ``from package import module`` does not count as an import of the package, nor does a package's
    import of its own modules by name when it is asked for one of them.
    """
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for each in imports(sources):
        if each.target in sources and top(each.importer) != "tests":
            graph[each.importer].add(each.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [*error.args[1]]
    return []


def pairs(sources: Mapping[str, str]) -> set[tuple[str, str]]:
    """Folders whose modules import each other, late imports and names in strings counted.

    A package's own ``__init__`` and ``__main__`` do not count as importers: they list what the
    package has, or start it.
    """
    packages = {module.rpartition(".")[0] for module in sources}

    def folder(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    found = {
        (folder(each.importer), folder(each.target))
        for each in imports(sources)
        if each.target in sources
        and top(each.importer) not in ("tests", "app")
        and each.importer not in packages
        and not each.importer.endswith(".__main__")
    }
    return {(one, other) for one, other in found if one < other and (other, one) in found}


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
    assert {"contract.job", "training.recipes.settings", "trainctl.__main__"} <= sources.keys()
    assert violations(sources) == []


def test_no_modules_of_this_project_import_each_other() -> None:
    assert cycle(project_sources()) == []


def test_one_module_reaches_into_the_emulator() -> None:
    sources = project_sources()
    reach = {each.importer for each in imports(sources) if top(each.target) == "ministack"}
    reach |= {name for name, source in sources.items() if '"ministack.' in source}
    assert reach == {"rehearsal.ministack.internals", "tests.test_imports"}


def test_no_folders_import_each_other() -> None:
    assert pairs(project_sources()) == set()


def test_every_place_that_is_named_here_is_there() -> None:
    sources = project_sources()
    named = {name for names in LAYERS for name in names} | STANDARD
    named |= {name for names in OF_TRAINING.values() for name in names}
    assert named - sources.keys() == set()


@pytest.mark.parametrize(
    ("packages", "files"),
    [
        ({"contract", "training", "containers"}, ["containers/requirements.txt", COMPILE]),
        ({"app", "contract", "trainctl", "stacks"}, ["requirements.txt"]),
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
    "contract": "",
    "contract.errors": "import re",
    "training": "",
    "training.data": "",
    "training.data.images": "import torch\nfrom training.data import idx",
    "training.data.idx": "from contract.errors import InputError",
    "training.system.storage": "def f():\n    import fsspec",
    "training.recipes": "from training.recipes.ddp import RECIPE",
    "training.recipes.settings": "from contract.errors import InputError",
    "training.recipes.ddp": "LOOP = 'training.recipes.ddp.loop'",
    "training.recipes.ddp.settings": "from training.recipes.settings import option",
    "training.recipes.ddp.loop": "from training.recipes.ddp.settings import DdpConfig\n"
    "from training.data import images",
    "training.recipes.fsdp": "",
    "training.recipes.fsdp.loop": "import torch",
    "training.runtime.driver": "from training import recipes",
    "training.launch": "def run():\n    from training.runtime.driver import Driver",
    "containers.node": "from contract.errors import InputError",
    "trainctl.submit": "import boto3\nfrom contract.errors import InputError\n"
    "from training import recipes",
    "stacks.settings": "from contract import errors",
    "app": "from stacks.settings import Settings",
}


def test_a_project_that_keeps_the_rules_passes() -> None:
    assert violations(_CLEAN) == []
    assert cycle(_CLEAN) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("contract.errors", "import torch", "for the standard library alone"),
        ("contract.errors", "from training import storage", "may import only itself"),
        (
            "training.recipes.settings",
            "def f():\n    import numpy",
            "for the standard library alone",
        ),
        ("training.recipes.settings", "import training.data.images", "standard library alone"),
        ("training.data.images", "from training.recipes.ddp.loop import train", "point down"),
        ("training.data.images", "NAME = 'training.recipes.ddp.loop'", "point down"),
        ("training.data.images", "def f():\n    import training.launch", "point down"),
        ("training.runtime.driver", "from training import launch", "point down"),
        ("training.recipes.fsdp.loop", "from training.recipes.ddp import loop", "each other"),
        ("training.lost", "", "has no place"),
        ("training.system.storage", "from stacks import settings", "may import only contract"),
        ("training.system.storage", "import trainctl.submit", "may import only contract"),
        ("training.system.storage", "from containers import node", "may import only contract"),
        ("benchmarks.ddp", "from trainctl import submit", "may import only"),
        ("trainctl.submit", "from stacks.core_stack import CoreStack", "only the settings"),
        ("trainctl.submit", "from training.data import images", "only what needs no torch"),
        ("trainctl.aws.jobs", "from trainctl import output", "below the rest"),
        ("containers.node", "def f():\n    import rehearsal", "may import only"),
        ("stacks.settings", "from training import recipes", "may import only"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(
    module: str, source: str, complaint: str
) -> None:
    found = violations({**_CLEAN, module: source})
    assert len(found) == 1, found
    assert complaint in found[0]


@pytest.mark.parametrize(
    "back",
    ["import b", "def f():\n    import b", "NAME = 'x.b'", "if TYPE_CHECKING:\n    import b"],
)
def test_a_circle_is_found_also_where_one_side_imports_late(back: str) -> None:
    back = back.replace("import b", "import x.b")
    assert {"x.a", "x.b"} <= {*cycle({"x.a": back, "x.b": "import x.a"})}
    assert cycle({"x.a": "", "x.b": "import x.a"}) == []
    assert cycle({"x.a": "command = ['python', '-m', 'x.b']", "x.b": "import x.a"}) == []


@pytest.mark.parametrize("back", ["import x.y.b", "def f():\n    import x.y.b", "N = 'x.y.b'"])
def test_folders_that_import_each_other_are_found(back: str) -> None:
    project = {"x": "import x.y.b", "x.y": "", "x.y.b": "import x.a", "x.a": "", "x.c": ""}
    assert pairs(project) == set()
    assert pairs({**project, "x.c": back}) == {("x", "x.y")}


def test_a_package_that_nobody_asked_for_is_found() -> None:
    source = {"training.models.x": "import json\nimport pluggy\nimport numpy\nimport not_there"}
    assert undeclared(source, {"numpy"}) == [
        "training.models.x:2 imports pluggy",
        "training.models.x:4 imports not_there",
    ]
