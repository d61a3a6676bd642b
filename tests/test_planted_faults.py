"""The edits of ``tests.planted_faults`` fit the sources."""

from tests.conftest import ROOT
from tests.planted_faults import CONTROL, FAULTS, STORED, STRICT


def test_each_planted_fault_fits_the_sources() -> None:
    for fault in (*FAULTS, *STRICT, *CONTROL, *STORED):
        fault.planted((ROOT / fault.file).read_text())
        assert all((ROOT / name).exists() for name in fault.tests.split()), fault.name
