"""Sizes and seams of the product, so that its rooms stay small and what crosses them has a type."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PRODUCT = ("contract", "training", "containers", "stacks", "trainctl", "rehearsal")
MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 100
MOST_ROOMS = 20
#: The loops of the recipes, which are to be read from top to bottom.
LOOPS = "training/recipes/*/loop.py"
#: Other programs call these with dictionaries of their own: AWS with events, the emulator with the
#: records that it keeps.
CALLED_FROM_OUTSIDE = (
    *("stacks/job_keeper", "stacks/teardown_handler", "stacks/export_handler"),
    "rehearsal/ministack",
)


def files() -> list[Path]:
    return [ROOT / "app.py", *(file for name in PRODUCT for file in (ROOT / name).rglob("*.py"))]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_file_is_too_long() -> None:
    lines = {name_of(file): len(file.read_text().splitlines()) for file in files()}
    assert len(lines) > 100
    assert {name: num for name, num in lines.items() if num > MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    loops = set(ROOT.glob(LOOPS))
    assert loops
    found = {
        f"{name_of(file)}:{node.name}": num
        for file in files()
        for node in functions(file)
        if (num := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION
        and not (file in loops and node.name in ("train", "_train"))
    }
    assert found == {}


def test_training_shows_at_most_twenty_rooms() -> None:
    rooms = [
        path.name
        for path in (ROOT / "training").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    assert 5 < len(rooms) <= MOST_ROOMS, sorted(rooms)


def public_annotations(file: Path) -> Iterator[tuple[str, ast.expr]]:
    """Annotations of the arguments and results of a file's public functions and methods."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.expr]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from walk(node.body, f"{prefix}{node.name}.")
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") and node.name != "__init__":
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for each in (*given, node.args.vararg, node.args.kwarg):
                if each is not None and each.annotation is not None:
                    yield f"{prefix}{node.name}({each.arg})", each.annotation
            if node.returns is not None:
                yield f"{prefix}{node.name} ->", node.returns

    yield from walk(ast.parse(file.read_text()).body, "")


def test_no_public_signature_has_a_dictionary_of_anything() -> None:
    seen = 0
    found = []
    for file in files():
        if name_of(file).startswith(CALLED_FROM_OUTSIDE):
            continue
        for where, annotation in public_annotations(file):
            seen += 1
            if "dict[str, Any]" in ast.unparse(annotation):
                found.append(f"{name_of(file)}: {where}: {ast.unparse(annotation)}")
    assert seen > 1000
    assert found == []
