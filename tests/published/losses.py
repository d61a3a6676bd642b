"""Losses of the fsdp recipe on two workers beside a plain loop, for each family that is trained.

``python -m benchmarks.losses`` writes the table of docs/benchmarks.md.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from store.cache import CACHE_VARIABLE
from tests import forks
from tests.published.models import KINDS, ROWS, config_of
from tests.published.table import documented
from tests.training.plain_loop import SEQ_LEN, STEPS, Job, encoded, plain, recipe, write
from training.fsdp import inputs
from training.record.events import Evaluation, Event, Step

#: Largest relative difference in fp32.
TOLERANCE: Final = 1e-5


def _rope(name: str) -> str:
    rope: dict[str, Any] = config_of(name).get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "")


#: A published model of each family and kind of rope.
NAMES: Final = {
    (kind, _rope(name)): name
    for name, kind in reversed(KINDS.items())
    if "refused" not in ROWS[name] and documented()[kind][0] == "yes"
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Largest relative differences of the losses of a family."""

    packs: bool
    """Conversations are packed; else each has a sequence."""
    beyond: int
    """Conversations that are longer than what a scaled rope was trained on."""
    fp32: float
    """Of each step and each evaluation, recipe and plain loop."""
    bf16: float
    """Of the evaluations, recipe in bf16 and plain loop in fp32."""
    seeds: float
    """Of the evaluations, plain loop with one seed and with another."""

    @property
    def is_right(self) -> bool:
        return self.fp32 <= TOLERANCE and self.bf16 <= self.seeds


def measure(kind: str, rope: str, folder: Path) -> Losses:
    """Train a model of a family in all ways.

    Args:
        folder: for the model, the runs and the token store.
    """
    os.environ[CACHE_VARIABLE] = cache = str(folder / "cache")
    packs = documented()[kind][1] == "yes"
    more = {"packing": packs, "num_workers": 2}
    job = Job(folder=folder, name=NAMES[kind, rope], form="tools", more=more)
    write(job)
    config = inputs.prepare(job.config)
    key = config.text_key
    first, again = (
        plain(Job(**vars(job) | {"more": more | {"seed": seed}}), key) for seed in (0, 1)
    )

    def run(precision: str) -> Sequence[Event]:
        own = replace(config, run=precision, precision=precision)
        events: Sequence[Event] = forks.run(2, recipe, own, cache, STEPS)[0]
        return events

    exact = run("fp32")
    steps = {each.step: each.loss for each in exact if isinstance(each, Step)}
    return Losses(
        packs=packs,
        beyond=sum(len(ids) > SEQ_LEN // 2 for ids, _ in encoded(job)[0]) if rope else 0,
        fp32=max(
            _apart(steps, {step: loss for step, (loss, _, _) in first[0].items()}),
            _apart(_judged(exact), first[1]),
        ),
        bf16=_apart(_judged(run("bf16")), first[1]),
        seeds=_apart(again[1], first[1]),
    )


def _judged(events: Sequence[Event]) -> dict[int, float]:
    return {each.step: each.loss or 0.0 for each in events if isinstance(each, Evaluation)}


def _apart(found: Mapping[int, float | None], expected: dict[int, float]) -> float:
    assert found.keys() == expected.keys()
    return max(abs((found[step] or 0.0) / loss - 1) for step, loss in expected.items())
