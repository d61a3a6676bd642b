"""A tiny model of each family goes through the whole recipe beside transformers: see
``benchmarks.families``. What comes out is the table in docs/fsdp.md."""

import re

import pytest

from benchmarks import families
from benchmarks.families import FAMILIES, Outcome, part, table

# One of each kind of attention, norm and experts: tried at each change, the others at night.
ALWAYS = ["deepseek_v3", "gemma3_text", "gpt2", "gpt_neox", "llama", "mixtral"]
# What people fine-tune; none of them may come to be refused unnoticed.
WANTED = [
    "cohere",
    "deepseek_v3",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    at_night = any("table_in_the_docs" in each.name for each in request.session.items)
    kinds = FAMILIES if at_night else ALWAYS
    found = families.measure(kinds, tmp_path_factory.mktemp("families"))
    return {each.kind: each for each in found}


def test_the_docs_name_every_family_that_is_tried() -> None:
    rows = [line for line in part().splitlines() if line.startswith("| `")]
    named = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(FAMILIES)
    assert {*WANTED} <= {*FAMILIES}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.night) for kind in FAMILIES],
)
def test_a_family_is_trained_as_transformers_does_or_refused(
    kind: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[kind]
    assert outcome.is_right or outcome.refused, f"losses differ by {outcome.difference} nats"
    assert outcome.is_right or kind not in WANTED, outcome.refused


@pytest.mark.slow
@pytest.mark.night
def test_the_table_in_the_docs_is_what_comes_out(outcomes: dict[str, Outcome]) -> None:
    assert part() == table([*outcomes.values()]), "run python -m benchmarks.families --write"
