"""The site of the documentation has every page, and builds without a warning."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML, of the locked tools

from tests.conftest import ROOT

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


def leaves(tree: Any) -> list[str]:
    """Pages of a part of the navigation, in its order."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [page for part in parts for page in leaves(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = leaves(yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text("utf-8"))["nav"])
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    index = (docs / "README.md").read_text("utf-8")
    assert [page for page in listed[1:] if f"({page})" not in index] == []


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="no mkdocs: `make venv-docs` installs it")
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    built = subprocess.run(
        [
            str(MKDOCS),
            "build",
            "--strict",
            "--config-file",
            ".ci/mkdocs.yml",
            "--site-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = [page.read_text("utf-8") for page in tmp_path.rglob("*.html")]
    assert len(pages) > 20
    assert not [page for page in pages if re.search(r'<(script|link)[^>]* (src|href)="http', page)]
