"""A tiny model of each family goes through the whole recipe beside transformers, with the results
of the table in docs/fsdp.md: see ``families.py``."""

import re

import pytest

from tests.conftest import ROOT
from tests.training import families
from tests.training.families import FAMILIES, Outcome

# One of each kind of attention, norm and experts: tried at each change, the others at night.
ALWAYS = ["deepseek_v3", "gemma3_text", "gpt2", "gpt_neox", "llama", "mixtral"]


def documented() -> dict[str, tuple[str, str]]:
    """Family -> how the table in docs/fsdp.md says that it is trained, and packed."""
    _, _, rest = (ROOT / "docs/fsdp.md").read_text().partition("<!-- families:")
    table, _, _ = rest.partition("<!-- end of families -->")
    found: dict[str, tuple[str, str]] = {}
    for line in table.splitlines()[3:]:
        _, kinds, trained, packed, _ = (cell.strip() for cell in line.split("|"))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", kinds), (trained, packed))
    return found


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    kinds = [kind for kind in FAMILIES if any(f"[{kind}]" in i.name for i in request.session.items)]
    found = families.measure(kinds, tmp_path_factory.mktemp("families"))
    return {each.kind: each for each in found}


def test_the_docs_name_every_family_that_is_tried() -> None:
    assert sorted(documented()) == sorted(FAMILIES)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.night) for kind in FAMILIES],
)
def test_a_family_is_trained_as_transformers_does_or_refused_as_documented(
    kind: str, outcomes: dict[str, Outcome]
) -> None:
    outcome, (trained, packed) = outcomes[kind], documented()[kind]
    assert outcome.is_right or outcome.refused, f"losses differ by {outcome.difference} nats"
    # Reasons have figures, which the table leaves out.
    reason = re.sub(r" \([^)]*\)", "", outcome.refused)
    assert trained == "yes" if outcome.is_right else trained.removeprefix("refused: ") in reason
    assert outcome.packs == (packed == "yes")
