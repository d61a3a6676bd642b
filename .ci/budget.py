"""Compare the size of each folder with its budget: ``python .ci/budget.py``.

Counts tokens of Python without comments, docstrings and layout: explaining code costs nothing, and
writing it denser gains nothing. ``budget.toml`` has the numbers, and when they may rise.
"""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_LAYOUT: Final = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def num_tokens(source: str) -> int:
    """Tokens of a module that are code."""
    documented = {
        each.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for each in node.body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    }
    return sum(
        token.type not in {*_LAYOUT, tokenize.ENDMARKER}
        and not (token.type == tokenize.STRING and token.start[0] in documented)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def sizes() -> dict[str, int]:
    """Tokens of each top folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    used = Counter[str]()
    for name in subprocess.check_output(command, cwd=ROOT, text=True).split():
        if (ROOT / name).exists():
            used[name.partition("/")[0]] += num_tokens((ROOT / name).read_text())
    return used


def exceeded() -> list[str]:
    """Sentences about what is larger than its budget."""
    budget = tomllib.loads((ROOT / ".ci" / "budget.toml").read_text())
    found = [
        f"{folder} has {used:,} tokens, and its budget is {budget['folders'].get(folder, 0):,}"
        for folder, used in sorted(sizes().items())
        if used > budget["folders"].get(folder, 0)
    ]
    allowed = budget["base"] + sum(budget["allowances"].values())
    if (total := sum(budget["folders"].values())) > allowed:
        found.append(f"the budgets are {total:,}, {allowed:,} with all allowances")
    return found


if __name__ == "__main__":
    for folder, used in sorted(sizes().items()):
        print(f"{folder:20}{used:>10,}")
    sys.exit("\n".join(exceeded()) or None)
