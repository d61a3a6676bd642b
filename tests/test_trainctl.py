"""``trainctl`` is reserved: it helps, names its version, and refuses what it cannot do yet."""

import tomllib
from importlib import metadata

import pytest

from tests.conftest import ROOT
from trainctl.__main__ import main


def test_help_points_to_the_command_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python -m training.launch" in capsys.readouterr().out


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "no cluster commands in this version yet" in capsys.readouterr().out


def test_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"trainctl {metadata.version('ecs-train')}\n"


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["submit", "--workers", "2"], "'submit'"), (["--workers"], "'--workers'")],
)
def test_what_it_does_not_know_is_named_and_refused(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"trainctl": "trainctl.__main__:main"}
    (entry,) = metadata.entry_points(group="console_scripts", name="trainctl")
    assert entry.load() is main
