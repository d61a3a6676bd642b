"""The pictures of the stacks have today's prices and sizes."""

import runpy

import pytest

from tests.conftest import ROOT

PICTURES = ("architecture", "deployment")


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_stacks_have_todays_settings(name: str) -> None:
    drawing = runpy.run_path(str(ROOT / ".ci" / "pictures.py"))
    assert drawing["DRAWN"] == PICTURES
    drawn = drawing["of_the_settings"](name)
    assert (ROOT / f"docs/images/{name}.svg").read_text() == drawn, "run `make pictures`"
