"""The fsdp recipe beside an independent plain loop of transformers: the same losses, norms, rates,
held-out losses and exported weights.

The recipe is stopped in the middle and resumed on another number of workers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from store.cache import CACHE_VARIABLE
from tests import forks
from tests.published.models import from_pretrained
from tests.training.plain_loop import STEPS, Job, plain, recipe, write
from training import export
from training.fsdp import inputs
from training.record.events import Evaluation, Event, Step

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.long]

STOP_AT: Final = 3
TOLERANCE: Final = 1e-5


@pytest.mark.parametrize(
    ("name", "form", "more"),
    [
        ("google/gemma-3-1b-it", "chats", {}),
        ("allenai/Olmo-3.1-32B-Instruct", "tools", {}),
        ("ibm-granite/granite-3.0-8b-base", "weights", {}),
        ("HuggingFaceTB/SmolLM3-3B", "columns", {}),
        ("Qwen/Qwen3-30B-A3B", "tools", {"lora_rank": 4}),
        ("gpt-oss-120b in bf16", "weights", {"packing": False}),
        ("HuggingFaceTB/SmolLM3-3B", "tools", {"recompute": "full"}),
    ],
)
# peft asks transformers by a name of before.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_recipe_takes_the_steps_of_a_plain_loop(
    name: str,
    form: str,
    more: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(folder=tmp_path, name=name, form=form, more=more)
    write(job)
    cache = str(tmp_path / "cache")
    monkeypatch.setenv(CACHE_VARIABLE, cache)
    config = inputs.prepare(job.config)
    events: list[Event] = []
    for num, stop_at in ((1, STOP_AT), (2, STEPS)):
        own = replace(config, num_workers=num)
        events += forks.run(num, recipe, own, cache, stop_at)[0]
    steps, evaluations, weights = plain(job, config.text_key)
    found = {e.step: (e.loss, e.grad_norm, e.lr) for e in events if isinstance(e, Step)}
    assert found.keys() == steps.keys()
    for step, (loss, norm, rate) in steps.items():
        assert found[step][0] == pytest.approx(loss, abs=TOLERANCE)
        assert found[step][1:] == pytest.approx((norm, rate), rel=TOLERANCE)
    judged = {each.step: each.loss for each in events if isinstance(each, Evaluation)}
    assert judged == pytest.approx(evaluations, abs=TOLERANCE)

    place = export.export(
        export.newest_checkpoint("r", config.storage), str(tmp_path / "out"), dtype=torch.float32
    )
    exported = from_pretrained(place).state_dict()
    assert exported.keys() == weights.keys()
    for key, value in weights.items():
        # Where gradients are near nothing, Adam makes steps of their rounding.
        assert (exported[key] - value).abs().max() <= 1e-3 * value.abs().max(), key
