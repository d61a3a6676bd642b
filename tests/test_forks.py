"""Ranks that are slow are waited for, and ranks that hang are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forks


@pytest.mark.parametrize(
    ("busy_until", "codes", "waited"), [(300, [0], 300), (60, [None], 180)], ids=["slow", "hangs"]
)
def test_a_rank_is_waited_for_as_long_as_it_uses_the_processor(
    busy_until: float,
    codes: list[int | None],
    waited: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    now = used = 0.0
    rank: Any = SimpleNamespace(pid=1, sentinel=1, exitcode=None)

    def wait(_: list[int], timeout: float) -> None:
        nonlocal now, used
        assert timeout == 1
        now += 30
        if now <= busy_until:
            used += 1
        if now == 300:
            rank.exitcode = 0

    monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("multiprocessing.connection.wait", wait)
    monkeypatch.setattr(
        "psutil.Process",
        lambda _: SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=used, system=0)),
    )
    ranks = forks.Ranks(processes=[rank], out=tmp_path / "out", err=tmp_path / "err")
    assert ranks.wait() == codes
    assert now == waited
