"""Programs in these tests write to folders of their own: a machine's other folders, which its
other processes use, are not looked through."""

import ctypes
import sys
from collections.abc import Iterator

import pytest

from containers.program.files import disk


@pytest.fixture(autouse=True)
def _only_own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_writable", list)


@pytest.fixture(autouse=True)
def _leave_orphans_to_init() -> Iterator[None]:
    """Undo ``machine.adopt_orphans``: later tests wait until their orphans are gone."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER
