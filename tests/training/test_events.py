"""A damaged line of a run's record loses only itself, and the docs name every field
(``tests/test_untrusted.py`` has the way of each event through JSON)."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.training.sample_events import step
from training import recipes
from training.record import events, reader
from training.record.events import (
    TYPES,
    RankTimes,
    Step,
    parse_metrics,
)
from training.record.result import (
    HeldOutText,
    Result,
    Table,
)


def test_the_documentation_names_every_field_of_the_record() -> None:
    page = (ROOT / "docs" / "record.md").read_text()
    in_file = {
        name: kind for name, kind in TYPES.items() if "``metrics.jsonl``" in str(kind.__doc__)
    }
    kinds = [*in_file.values(), Result, HeldOutText, Table]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {"rate"}
    measures = {each.name for recipe in recipes.ALL for each in recipe.measures}
    wanted = {*in_file, *names, *measures}
    assert len(wanted) > 60
    assert {name for name in wanted if f"`{name}`" not in page} == set()


def test_a_part_of_a_step_may_be_called_as_a_field_is() -> None:
    times = RankTimes(step=1, epoch=1, rank=0, step_time_s=0.5, phases={"communication": 0.2})
    assert events.from_json(events.to_json(times)) == times


@pytest.mark.parametrize(
    "changed",
    [
        {"step": True},
        {"loss": None},
        {"type": "of_a_later_version"},
    ],
    ids=str,
)
def test_a_line_with_a_value_of_another_kind_is_damaged_and_nothing_else_is_lost(
    changed: dict[str, Any],
) -> None:
    whole = [events.to_json(step(number)) for number in (1, 2, 3)]
    metrics = parsed([whole[0], whole[1] | changed, whole[2] | {"of_a_later_version": 1}])
    assert metrics.events == [step(1), step(3)]
    assert metrics.num_damaged == 1


def parsed(lines: list[dict[str, object]]) -> events.Metrics:
    return parse_metrics("\n".join(map(json.dumps, lines)).encode() + b"\n")


@given(st.binary(max_size=60), st.integers(0, 3))
def test_any_bytes_between_two_lines_lose_only_themselves(damage: bytes, at: int) -> None:
    lines = [json.dumps(events.to_json(step(number))).encode() for number in (1, 2, 3)]
    lines.insert(at, b"{" + damage.replace(b"\n", b""))
    found = parse_metrics(b"\n".join(lines) + b"\n")
    assert [each.step for each in found.of(Step)] == [1, 2, 3]


def test_nothing_is_read_where_there_is_nothing(tmp_path: Path) -> None:
    assert reader.read_metrics(str(tmp_path)).events == []
    assert reader.read_result(str(tmp_path)) is None
