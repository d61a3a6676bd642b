"""The edits of ``tests.planted_faults`` fit the sources, and each strict behavior has one."""

from pathlib import Path

from rehearsal.ministack.switches import Strict
from tests.conftest import ROOT
from tests.planted_faults import FAULTS, STRICT


def test_each_planted_fault_fits_the_sources(tmp_path: Path) -> None:
    for fault in (*FAULTS, *STRICT):
        (tmp_path / fault.file).parent.mkdir(parents=True, exist_ok=True)
        fault.plant(tmp_path)
        assert all((ROOT / name).exists() for name in fault.tests.split()), fault.name
    assert {each.name.removesuffix("-2") for each in STRICT} == {*Strict}
