"""Write the table of budgets into CONTRIBUTING.md: ``python .ci/budget.py [--grow]``.

A capability above its budget may shrink. It may grow only with ``--grow``, for a reviewer to see.

Counts tokens of Python without comments, docstrings and layout: explaining code costs nothing, and
writing it denser gains nothing.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BEGIN: Final = "<!-- budget: written by `python .ci/budget.py` -->\n"
END: Final = "<!-- end of budget -->\n"
_ROW: Final = re.compile(r"(?m)^\| (.+) \| ([\d,]+) \| [\d,]+ \|$")
#: Capability, its budget in tokens, and its files; a file belongs to the first row that has it.
ROWS: Final = (
    ("tests", 250_000, ("tests/*",)),
    ("rehearsal: the whole system on one machine", 37_000, ("rehearsal/*",)),
    ("your own program on all nodes", 14_000, ("containers/program/*",)),
    ("head, worker node, autoscaler, image", 18_000, ("containers/*",)),
    ("stacks", 22_000, ("stacks/*", "app.py")),
    ("trainctl", 47_500, ("trainctl/*",)),
    ("contract: what the others agree on", 11_000, ("contract/*",)),
    ("pictures", 11_000, ("training/data/pictures/*", "training/data/augmentation.py")),
    ("text, conversations", 17_000, ("training/data/*",)),
    (
        "plan: memory and speed",
        6_000,
        (
            "training/plan.py",
            "training/models/estimates.py",
            "training/models/model_shapes.py",
        ),
    ),
    (
        "models",
        13_000,
        ("training/models/*", "training/loop/losses.py", "training/loop/optimizers.py"),
    ),
    ("store: S3, disk, cache", 4_000, ("store/*",)),
    ("checkpoints, lease", 7_000, ("training/checkpoint/*", "training/system/lease.py")),
    ("record: events, result, report", 14_500, ("training/record/*",)),
    ("local start", 2_500, ("training/runtime/local*.py",)),
    ("Ray Train and torchrun", 10_000, ("training/runtime/*", "training/launch.py")),
    (
        "recipes",
        21_000,
        (
            "training/ddp/*",
            "training/fsdp/*",
            "training/imagenet/*",
            "training/bandwidth/*",
            "training/recipe*.py",
            "training/settings.py",
            "training/command.py",
            "training/bookkeeping.py",
            "training/loop/metrics.py",
        ),
    ),
    ("export, generate and the rest of training", 4_500, ("training/*",)),
    ("benchmarks", 15_000, ("benchmarks/*",)),
    ("examples", 6_500, ("examples/*",)),
    ("tools of this repository", 1_500, ("*",)),
)


def docstring_lines(source: str) -> set[int]:
    """First lines of docstrings, and of strings that document a field."""
    return {
        each.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for each in node.body
        if isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Constant)
        and isinstance(each.value.value, str)
    }


def num_tokens(source: str) -> int:
    """Tokens of a module that are code."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    layout |= {tokenize.ENCODING, tokenize.ENDMARKER}
    skipped = docstring_lines(source)
    return sum(
        token.type not in layout
        and not (token.type == tokenize.STRING and token.start[0] in skipped)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def sizes() -> dict[str, int]:
    """Tokens of each capability today."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    used = dict.fromkeys((name for name, _, _ in ROWS), 0)
    for path in filter(None, listed.split("\n")):
        if (ROOT / path).exists():
            row = next(row for row in ROWS if any(fnmatch(path, each) for each in row[2]))
            used[row[0]] += num_tokens((ROOT / path).read_text())
    return used


def grown(used: dict[str, int], page: str) -> list[str]:
    """Capabilities above their budgets that have more tokens than the page says."""
    said = {name: int(number.replace(",", "")) for name, number in _ROW.findall(page)}
    return [name for name, most, _ in ROWS if used[name] > max(most, said.get(name, 0))]


def table(used: dict[str, int]) -> str:
    """The table as Markdown."""
    lines = ["| capability | tokens | budget |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {used[name]:,} | {budget:,} |" for name, budget, _ in ROWS]
    product = sum(used.values()) - used["tests"]
    allowed = sum(budget for _, budget, _ in ROWS) - ROWS[0][1]
    lines.append(f"| **all but the tests** | {product:,} | {allowed:,} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    page, used = ROOT / "CONTRIBUTING.md", sizes()
    before, _, rest = page.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    if (more := grown(used, old)) and "--grow" not in sys.argv:
        sys.exit(f"above their budgets, and grown: {', '.join(more)}; take as much away")
    page.write_text(before + BEGIN + "\n" + table(used) + "\n" + END + after)


if __name__ == "__main__":
    main()
