"""The edits of ``tests.rehearsal.undo``: each switch has one, and each fits the sources."""

from rehearsal.ministack.switches import Strict
from tests.conftest import ROOT
from tests.rehearsal.undo import UNDOS


def test_each_switch_has_an_edit_that_takes_away_what_deals_with_it() -> None:
    assert {each.switch for each in UNDOS} == {*Strict}
    found = {each.old: (ROOT / each.file).read_text().count(each.old) for each in UNDOS}
    assert {old for old, times in found.items() if times != 1} == set()
    assert all((ROOT / each.test.partition("::")[0]).exists() for each in UNDOS)
