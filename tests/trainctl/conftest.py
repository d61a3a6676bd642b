"""The account that the commands find, and nothing else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ProfileNotFound

from tests.trainctl.account import Account
from trainctl import follow, polling


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    """An account with both stacks, whose clients every command gets."""
    found = Account()

    def session(profile_name: str | None, region_name: str | None) -> Any:
        if profile_name == "unknown":
            raise ProfileNotFound(profile="unknown")
        region = region_name or found.region
        return SimpleNamespace(region_name=region, client=lambda _service, **_options: found)

    monkeypatch.setattr(boto3, "Session", session)
    for name in ("SHORTEST_S", "LONGEST_S"):
        monkeypatch.setattr(polling, name, 0.0)
    monkeypatch.setattr(follow, "LAST_LINES_S", 0.0)
    monkeypatch.setattr("shutil.which", lambda _name, **_: None)
    return found


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with a user's own code, and what is no code."""
    folder = tmp_path / "code"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "old.py").write_text("")
    (folder / "mine.py").write_text("print(1)\n")
    (folder / "empty").mkdir()
    return folder
