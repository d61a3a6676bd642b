"""Models as they are published: each is loaded, trained, resumed, exported and loaded again as by
transformers, or refused with a sentence (``models.json`` has them, with their sources).

The table in docs/fsdp.md has the same results by ``model_type``.
"""

import json
import re
from pathlib import Path

import pytest

from contract.errors import InputError
from tests.published import table, trained
from tests.published.models import KINDS, ROWS
from tests.published.table import documented
from tests.published.trained import Outcome
from training.models import pretrained

REFUSED = [name for name, row in ROWS.items() if "refused" in row]
TRAINED = [name for name in ROWS if name not in REFUSED]
#: Tied embeddings, merged experts, windows, a list of stops, and one of each kind of attention,
#: norm and leftovers; the others at night.
OFTEN = (
    "DeepSeek-V3 in bf16, with its module for the next token but one",
    "EleutherAI/gpt-neox-20b",
    "Qwen/Qwen3-1.7B",
    "alpindale/WizardLM-2-8x22B",
    "google/gemma-3-1b-it",
    "google/gemma-4-e2b-it",
    "meta-llama/Llama-3.2-3B",
    "openai-community/gpt2",
    "tiiuae/falcon-180B-chat",
)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    asked = [each.name for each in request.session.items if "_is_trained_as_" in each.name]
    names = [name for name in TRAINED if any(f"[{name}]" in each for each in asked)]
    found = trained.measure(names, tmp_path_factory.mktemp("models"))
    return {each.name: each for each in found}


def test_the_docs_name_every_kind_that_is_tried() -> None:
    assert sorted(documented()) == sorted({KINDS[name] for name in TRAINED})
    assert len(TRAINED) >= 40
    assert all(row["source"] for row in ROWS.values())


def test_the_page_of_what_is_tried_is_current() -> None:
    told = "python -m tests.published.table writes docs/published.md"
    assert table.PAGE.read_text("utf-8") == table.page() + "\n", told


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_trained_is_refused_by_its_configuration(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ROWS[name]["config"]))
    with pytest.raises(InputError, match=re.escape(ROWS[name]["refused"])):
        pretrained.model_config(str(tmp_path), runs="")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in OFTEN else pytest.mark.night) for each in TRAINED],
)
def test_a_model_is_trained_as_transformers_does_or_refused_as_documented(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    outcome, row = outcomes[name], ROWS[name]
    is_trained, packed = documented()[KINDS[name]]
    assert outcome.is_right or outcome.refused, f"losses differ by {outcome.difference} nats"
    # Reasons have figures, which the table leaves out.
    reason = re.sub(r" \([^)]*\)", "", outcome.refused)
    assert (
        is_trained == "yes" if outcome.is_right else is_trained.removeprefix("refused: ") in reason
    )
    assert outcome.packs == (packed == "yes")
    assert ("which the model does not use" in outcome.note) == row.get("named", False)
