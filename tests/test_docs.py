"""What the docs say of the sources is what the sources say."""

from docs import modules


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
