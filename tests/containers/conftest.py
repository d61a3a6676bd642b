"""Programs in these tests write to folders of their own: a machine's other folders, which its
other processes use, are not looked through."""

import pytest

from containers.program import disk


@pytest.fixture(autouse=True)
def _only_own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_writable", list)
