"""The longest files of tests start first, and a table shows what each file took."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import ROOT
from tests.ordering import sort_by_seconds, unit


def test_files_start_by_the_seconds_of_those_of_their_tests_that_run() -> None:
    def test(file: str, *markers: str) -> Any:
        return SimpleNamespace(nodeid=f"{file}::test", path=Path(file), keywords={*markers})

    table = {"short.py": 1, "mixed.py": 2, "mixed.py slow": 60, "mixed.py long": 900, "long.py": 80}
    names = ("short.py", "new.py", "mixed.py", "long.py")
    items = [test(name) for name in names] + [test("mixed.py", "slow")]
    sort_by_seconds(items, table)
    # A file without a record counts as short; tests stay in order within their file.
    order = [item.path.name for item in items]
    assert order == ["long.py", "mixed.py", "mixed.py", "short.py", "new.py"]
    assert [item.keywords for item in items[1:3]] == [set(), {"slow"}]


def test_what_shares_templates_goes_to_one_worker_and_starts_by_its_sum() -> None:
    stacks = ["tests/stacks/test_a.py", "tests/stacks/test_b.py"]
    names = [stacks[0], "other.py", stacks[1], "tests/stacks/test_deploy.py"]
    items: list[Any] = [SimpleNamespace(nodeid=f"{name}::test", keywords={}) for name in names]
    sort_by_seconds(items, {**dict.fromkeys(stacks, 2), "other.py": 3})
    assert [item.nodeid.partition("::")[0] for item in items] == [*stacks, *names[1::2]]
    assert len({unit(item.nodeid) for item in items}) == 3


def test_the_table_has_a_row_per_file_and_counts_what_failed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    (tmp_path / "test_b.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_one(broken): pass\n@pytest.mark.skip\ndef test_two(): pass\n"
    )
    words = ["-p", "tests.ordering", "-c", os.devnull, "--rootdir", str(tmp_path), "-n", "1"]
    words += ["--dist", "loadfile", "--no-loadscope-reorder", "--table", str(tmp_path / "table")]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)],
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    assert (tmp_path / "table").read_text() == (
        "| test_a.py | 2 | 1 | 1 | 0 |\n| test_b.py | 2 | 0 | 1 | 0 |\n"
    )
