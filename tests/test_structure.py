"""No folder, file or function grows too large, and what crosses a seam has a type."""

import ast
import re
import runpy
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PRODUCT = ("contract", "store", "training", "containers", "stacks", "trainctl", "rehearsal")
MOST_LINES = 700
#: Other programs call these with dictionaries of their own: AWS with events, the emulator with the
#: records that it keeps.
CALLED_FROM_OUTSIDE = (
    *("stacks/jobs/keeper", "stacks/teardown/handler.py", "stacks/storage/export_handler.py"),
    "rehearsal/ministack",
)


def files() -> list[Path]:
    return [ROOT / "app.py", *(file for name in PRODUCT for file in (ROOT / name).rglob("*.py"))]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_no_file_is_too_long() -> None:
    lines = {name_of(file): len(file.read_text().splitlines()) for file in files()}
    assert len(lines) > 100
    assert {name: num for name, num in lines.items() if num > MOST_LINES} == {}


def test_no_folder_is_larger_than_its_budget() -> None:
    assert runpy.run_path(str(ROOT / ".ci" / "budget.py"))["exceeded"]() == []


#: A recipe's loop, and lists of parts, may have more lines.
LONG = re.compile(r"training/\w+/train\.py _?train|stacks/.* (__init__|job_states)")


def decisions(node: ast.AST) -> int:
    """Decisions of a statement or an expression, as radon counts them; not of functions in it."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return 0
        case ast.Try() | ast.TryStar():
            own = len(node.handlers) + bool(node.orelse)
        case ast.Match():
            own = len(node.cases)
        case ast.For() | ast.AsyncFor() | ast.While():
            own = 1 + bool(node.orelse)
        case ast.BoolOp():
            own = len(node.values) - 1
        case ast.comprehension():
            own = 1 + len(node.ifs)
        case _:
            own = isinstance(node, ast.If | ast.IfExp | ast.Assert)
    return own + sum(map(decisions, ast.iter_child_nodes(node)))


def test_no_function_is_long_or_decides_much() -> None:
    found = []
    for file in files():
        source = file.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[ast.get_docstring(node) is not None :] or node.body
                body = lines[first[0].lineno - 1 : node.end_lineno]
                length = sum(not each.lstrip().startswith("#") for each in body if each.strip())
                num = 1 + sum(map(decisions, ast.iter_child_nodes(node)))
                name = f"{name_of(file)} {node.name}"
                if num > 20 or length > (150 if LONG.fullmatch(name) else 80):
                    found.append(f"{name}: {length} lines, {num} decisions")
    assert found == []


def test_whoever_catches_all_errors_says_why() -> None:
    """Or raises them again, as they are or in other words."""
    found = []
    for file in files():
        source = file.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ExceptHandler) and ast.unparse(node.type or node) in (
                "Exception",
                "BaseException",
            ):
                raises = any(isinstance(each, ast.Raise) for each in ast.walk(node))
                if not raises and "  # " not in lines[node.lineno - 1]:
                    found.append(f"{name_of(file)}:{node.lineno}")
    assert found == []


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


def nodes() -> Iterator[ast.AST]:
    for file in files():
        yield from ast.walk(ast.parse(file.read_text()))


def test_each_class_has_a_name_of_its_own() -> None:
    names = Counter(node.name for node in nodes() if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


def test_only_recipes_import_modules_of_ours_by_a_string() -> None:
    """The check of layers follows ``import`` statements."""
    named = [
        node.args[0].value
        for node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
        if isinstance(node.args[0], ast.Constant)
    ]
    assert named
    assert [name for name in named if str(name).startswith(PRODUCT)] == []


#: Words that say little, in names and at the beginning of docstrings. The setting of early stopping
#: has its usual name, ``patience``.
VAGUE = re.compile(
    r"(?i)(?:^|_)(?:told|given|whatever|whoever|beside)(?:_|$)|_patience|patience_"
    r'|^"""(?:Of|What|Whether|Whoever|Whatever|Beside)\s'
)


def test_names_and_docstrings_have_no_vague_words() -> None:
    found: list[str] = []
    for file in files():
        with file.open("rb") as opened:
            found += [
                f"{name_of(file)}:{token.start[0]}: {token.string}"
                for token in tokenize.tokenize(opened.readline)
                if VAGUE.search(token.string)
            ]
    assert found == [], "say who does what, or name the thing"
