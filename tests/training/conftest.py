"""Fixtures of the tests of training: a cache and a process group that no other test shares."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of what is fetched, converted and made into tokens."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process only."""
    import torch.distributed as dist  # which most of these tests do without

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
