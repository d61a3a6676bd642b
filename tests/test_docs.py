"""The docs name files and tests that exist, and the site has every page."""

import functools
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from contract import exits
from tests.conftest import ROOT


@functools.cache
def lines() -> list[tuple[str, str]]:
    """Each line of the project's text files, and where it is."""
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.md", "*.py", "*.yml", "*.yaml", "*.json", "*.toml", "*.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.split()]
    return [
        (f"{file.relative_to(ROOT)}:{number}", line.strip())
        for file in files
        if file.name != "test_docs.py" and file.exists()
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
    ]


def pages() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [ROOT / name for name in names]


def anchors(page: Path) -> set[str]:
    """What a link can name behind ``#``: the headings of a page, as GitHub writes them there."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_link_to_a_file_of_the_project_leads_somewhere() -> None:
    links = [
        (page, page.parent / target if target else page, heading)
        for page in pages()
        for target, heading in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text("utf-8"))
    ]
    assert len(links) > 40
    assert [
        f"{page.name}: {to.name}#{heading}"
        for page, to, heading in links
        if not to.exists() or (heading and heading not in anchors(to))
    ] == []


#: A path in code quotes, and a test in it.
_QUOTED = re.compile(r"``?((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|sh|json|toml|txt|yaml))?)(?:::(\w+))?`")


def test_every_file_of_the_project_that_is_named_is_there() -> None:
    folders = {each.parent.name for each in ROOT.glob("*/__init__.py")} | {
        "docs",
        "examples",
        "tests",
    }
    quoted = [
        (place, name, test)
        for place, line in lines()
        for name, test in _QUOTED.findall(line)
        if name.partition("/")[0] in folders and not re.search(r"\b[A-Z]+\b|no_such", name)
    ]
    assert len(quoted) > 80
    assert [each for each in quoted if not (ROOT / each[1]).exists()] == []
    tests = [each for each in quoted if each[2]]
    assert len(tests) > 70
    missing = [
        each for each in tests if f"def {each[2]}(" not in (ROOT / each[1]).read_text("utf-8")
    ]
    assert missing == []


def test_every_exit_code_of_a_job_is_in_its_page() -> None:
    told = (ROOT / "docs" / "jobs.md").read_text()
    assert "exits with 74 to 80, 124, 130 or 143" in told
    assert {*exits.OF_THE_SYSTEM} == {*range(74, 81), 124, 130, 143}
    for code in (*exits.TRIED_AGAIN, exits.KILLED):
        assert re.search(rf"\((exit code )?{code}\b", told), code


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    navigation = (ROOT / ".ci" / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = re.findall(r"[\w/-]+\.md", navigation)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


@pytest.mark.parametrize("name", ["architecture", "deployment"])
def test_the_pictures_of_the_stacks_have_todays_settings(name: str) -> None:
    drawn = runpy.run_path(str(ROOT / ".ci" / "pictures.py"))["of_the_settings"](name)
    assert (ROOT / f"docs/images/{name}.svg").read_text() == drawn, "run `make pictures`"
