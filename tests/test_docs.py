"""What the docs say of the sources is what the sources say, in plain English."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

from docs import modules

#: What a reader would have to decode, and where it is something else: a user's name, an identifier.
PHRASES = {
    r"\bmend(s|ed)?\b": [],
    r"\bgives? back\b": [],
    r"\bone's own\b": [],
    r"\bto be had\b": [],
    r"\bfor want of\b": [],
    r"\bwho(so)?ever\b": [],
    r"\bwhatever becomes of\b": [],
    r"\bgoes on where\b": [],
    r"\bgo(es)? on from there\b": [],
    r"\bmost (that )?it can cost\b": [],
    r"\bsomebody\b": ["somebody-elses"],
    r"\bnobody\b": ['"nobody"', "as nobody", "nobody/knows"],
}


def test_the_list_of_modules_is_that_of_the_sources() -> None:
    text = modules.PAGE.read_text(encoding="utf-8")
    assert modules.page(text) == text, "run python -m docs.modules"
    assert "| `job.py` |" in text


def test_every_module_that_the_walk_names_is_there() -> None:
    text = modules.PAGE.read_text(encoding="utf-8")
    walk = text[text.index("## A job, file by file") : text.index("## Modules")]
    named = [word for word in walk.split("`") if word.endswith(".py")]
    assert len(named) > 12
    assert [name for name in named if not (modules.ROOT / name).is_file()] == []


@functools.cache
def lines() -> list[tuple[str, str]]:
    """Each line of the project's text files, and where it is."""
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.md", "*.py", "*.yml", "*.yaml", "*.json", "*.toml", "*.txt"],
        cwd=modules.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [modules.ROOT / name for name in listed.stdout.split()]
    return [
        (f"{file.relative_to(modules.ROOT)}:{number}", line.strip())
        for file in files
        if file.name != "test_docs.py" and file.exists()
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
    ]


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_that_must_be_decoded_do_not_occur(phrase: str) -> None:
    assert len(lines()) > 40_000
    found = [
        f"{place}: {line}"
        for place, line in lines()
        if re.search(phrase, line, re.IGNORECASE)
        and not any(allowed in line for allowed in PHRASES[phrase])
    ]
    assert found == []


#: Where a link leads does not count: it cannot be broken, and it is not read.
_TARGET = re.compile(r"\]\([^)]*\)")


def prose(text: str) -> list[tuple[int, str]]:
    """Lines of Markdown outside tables and code, with their numbers."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith("|"):
            found.append((number, line))
    return found


def pages() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", "*.md"],
        cwd=modules.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [modules.ROOT / name for name in names]


def test_prose_is_wrapped_at_a_hundred_columns() -> None:
    assert len(pages()) > 12
    long = [
        f"{page.name}:{number}"
        for page in pages()
        for number, line in prose(page.read_text("utf-8"))
        if len(_TARGET.sub("]", line)) > 100
    ]
    assert long == []


def test_every_link_to_a_file_of_the_project_leads_somewhere() -> None:
    links = [
        (page, target)
        for page in pages()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    ]
    assert len(links) > 40
    assert [f"{page.name}: {to}" for page, to in links if not (page.parent / to).exists()] == []


#: A path in code quotes, and a test in it.
_QUOTED = re.compile(r"``?((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|sh|json|toml|txt|yaml))?)(?:::\w+)?`")


def test_every_file_of_the_project_that_is_named_is_there() -> None:
    folders = {each.parent.name for each in modules.ROOT.glob("*/__init__.py")} | {
        "docs",
        "examples",
    }
    quoted = [
        (place, name)
        for place, line in lines()
        for name in _QUOTED.findall(line)
        if name.partition("/")[0] in folders and not re.search(r"\b[A-Z]+\b|no_such", name)
    ]
    assert len(quoted) > 80
    assert [each for each in quoted if not (modules.ROOT / each[1]).exists()] == []
