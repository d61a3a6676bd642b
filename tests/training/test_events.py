"""Proves that every event and result survives the way through JSON, and that a damaged line loses
only itself."""

import dataclasses
import json
import pickle
import types
import typing
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
    Event,
    Process,
    RankTimes,
    Step,
    parse_metrics,
)
from training.record.fields import Named, Rate
from training.record.result import (
    HeldOutText,
    Result,
    Table,
)

# A value of each kind of field. Infinite and missing numbers have tests of their own.
NUMBERS = st.floats(allow_nan=False)
NAMES = ("accuracy", "mean_error", "decode", "bus_gb_per_s")
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: NUMBERS | st.integers(),
    bool: st.booleans(),
    str: st.text(),
    types.NoneType: st.none(),
    Rate: st.builds(Rate, items=st.sampled_from(["images", "tokens", "frames"]), per_s=NUMBERS),
    tuple[str, ...]: st.lists(st.text()).map(tuple),
    # The last name ends as a rate does.
    Named: st.dictionaries(st.sampled_from(NAMES), NUMBERS),
}


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Objects of a dataclass, with any values that its fields may have."""
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        several = isinstance(hint, types.UnionType)
        values[field.name] = st.one_of(
            *(KINDS[each] for each in (typing.get_args(hint) if several else [hint]))
        )
    return st.builds(kind, **values)


KINDS[HeldOutText] = any_of(HeldOutText)
KINDS[tuple[Process, ...]] = st.lists(any_of(Process)).map(tuple)
KINDS[Table] = st.integers(1, 3).flatmap(
    lambda num: st.builds(
        Table,
        title=st.text(),
        heads=st.lists(st.text(), min_size=num, max_size=num).map(tuple),
        rows=st.tuples(*[st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * num)] * 2),
        names=st.sampled_from([(), ("one", "two")]),
    )
)


@given(st.one_of(*(any_of(kind) for kind in TYPES.values())))
def test_every_event_survives_json_and_pickle(event: Event) -> None:
    values = events.to_json(event)
    assert values["type"] in TYPES
    assert events.from_json(json.loads(json.dumps(values))) == event
    assert pickle.loads(pickle.dumps(event)) == event


@given(any_of(Result))
def test_every_result_survives_json_and_has_all_of_its_fields_there(result: Result) -> None:
    values = result.to_json()
    assert Result.from_json(json.loads(json.dumps(values))) == result
    names = {field.name for field in dataclasses.fields(Result)} - {"rate"}
    assert names <= values.keys()


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
        {"step": "many"},
        {"step": True},
        {"step": None},
        {"epoch": "two"},
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
