"""The longest files of tests start first, and a table shows what each file took."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


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
