"""What the docs say of the sources is what the sources say, in plain English."""

import functools
import re
import subprocess

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
