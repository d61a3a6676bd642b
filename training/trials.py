"""Settings of a recipe to try, and how trials are compared. Standard library only: a laptop that
submits a job checks them here; ``training.tune`` trains them.
"""

import itertools
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from contract.errors import InputError
from contract.runs import check_run_name
from training.recipe import Recipe
from training.record.events import Evaluation, Measure

#: Module that trains them.
TUNE: Final = "training.tune"
MOST_TRIALS: Final = 1000
#: A trial is compared with others once it has this many evaluations, and they are as many.
_LEAST: Final = 3
LOSS: Final = Measure(name="loss", higher_is_better=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Settings to try.

    Raises:
        InputError: a value is not usable.
    """

    vary: Mapping[str, tuple[str, ...]]
    """Name of a setting -> its values."""
    number: int = 0
    """Number of combinations, drawn at random; 0: all of them."""
    seed: int = 0
    metric: str = ""
    """Measure by which they are compared; empty: the recipe's first, else the loss."""
    stops_hopeless: bool = False
    """End a trial whose best evaluation is worse than the median of the others so far."""

    def __post_init__(self) -> None:
        total = 1
        for name, values in self.vary.items():
            total *= len(values)
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or len({*values}) < len(values):
                raise InputError(f"--vary {name}={','.join(values)}: give NAME=VALUE,VALUE,...")
        if not 0 <= self.number <= total or (self.number or total) > MOST_TRIALS:
            raise InputError(
                f"--vary makes {total} combinations, and --trials is {self.number}: try at most "
                f"{min(total, MOST_TRIALS)}"
            )

    @classmethod
    def of(
        cls, vary: Sequence[str], *, trials: str = "", metric: str = "", hopeless: bool = False
    ) -> Self:
        """Read the options ``--vary NAME=V1,V2``, each once, and ``--trials N[:SEED]``."""
        found: dict[str, tuple[str, ...]] = {}
        for each in vary:
            name, _, values = each.partition("=")
            if name in found or not values:
                raise InputError(f"--vary is {each!r}: give NAME=V1,V2,... once for each name")
            found[name.lstrip("-").replace("_", "-")] = tuple(values.split(","))
        if not re.fullmatch(r"(\d+(:\d+)?)?", trials):
            raise InputError(f"--trials is {trials!r}: give a number, or NUMBER:SEED")
        number, _, seed = trials.partition(":")
        return cls(
            vary=found,
            number=int(number or 0),
            seed=int(seed or 0),
            metric=metric,
            stops_hopeless=hopeless,
        )

    def words(self) -> list[str]:
        """Options of ``training.tune``'s command line that mean the same."""
        found = [f"--vary={name}={','.join(values)}" for name, values in self.vary.items()]
        found += [f"--trials={self.number}:{self.seed}"] if self.number else []
        found += [f"--metric={self.metric}"] if self.metric else []
        return found + ["--stop-hopeless"] * self.stops_hopeless

    def trials(self) -> list[dict[str, str]]:
        """The combinations, in their order."""
        each = ([(name, value) for value in values] for name, values in self.vary.items())
        found = [dict(pairs) for pairs in itertools.product(*each)]
        return random.Random(self.seed).sample(found, self.number) if self.number else found

    def runs(self, name: str) -> dict[str, dict[str, str]]:
        """Name of each trial's run -> its settings: the tuning's name, and the values.

        Raises:
            InputError: two would have the same name.
        """
        found: dict[str, dict[str, str]] = {}
        for each in self.trials():
            values = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", value) for value in each.values())
            run = check_run_name(f"{name}-{values}"[:63])
            if run in found:
                raise InputError(f"two trials would be run {run}: give values that differ sooner")
            found[run] = each
        return found

    def measure(self, recipe: Recipe) -> Measure:
        """The measure by which trials are compared.

        Raises:
            InputError: the recipe has none of that name.
        """
        known = {each.name: each for each in (*recipe.measures, LOSS)}
        if self.metric and self.metric not in known:
            raise InputError(f"--metric is {self.metric}: {recipe.name} has {', '.join(known)}")
        return known[self.metric] if self.metric else next(iter(known.values()))


def options(settings: Mapping[str, str]) -> list[str]:
    """The words of a recipe's command line for some settings."""
    return [f"--{name}={value}" for name, value in settings.items()]


@dataclass(kw_only=True, slots=True)
class Trial:
    """A trial and what it has reached."""

    run: str
    settings: Mapping[str, str]
    status: str = "waiting"
    step: int = 0
    """Steps done."""
    reached: Sequence[float] = ()
    """The measure at each evaluation."""

    def to_json(self, measure: Measure) -> dict[str, object]:
        best = best_of(self.reached, measure)
        return {"run": self.run, **self.settings, "status": self.status, measure.name: best}


def best_of(values: Sequence[float], measure: Measure) -> float | None:
    """The best of some values; None of none."""
    if not values:
        return None
    return max(values) if measure.higher_is_better else min(values)


def by_value(rows: Sequence[dict[str, object]], measure: Measure) -> list[dict[str, object]]:
    """Rows of trials, the best first; those without a value last."""

    def key(row: dict[str, object]) -> tuple[bool, float]:
        value = row.get(measure.name)
        if not isinstance(value, int | float):
            return True, 0
        return False, -value if measure.higher_is_better else value

    return sorted(rows, key=key)


def is_hopeless(own: Sequence[float], others: Sequence[Sequence[float]], measure: Measure) -> bool:
    """True if the best value so far is worse than the median of what others had reached by then
    (the median stopping rule of Google Vizier, 2017, without its running mean).

    Args:
        own: values at the evaluations of a trial.
        others: those of the others.
    """
    then = [best_of(each[: len(own)], measure) for each in others if len(each) >= len(own)]
    known = [each for each in then if each is not None]
    best = best_of(own, measure)
    if best is None or len(own) < _LEAST or len(known) < _LEAST:
        return False
    middle = statistics.median(known)
    return best < middle if measure.higher_is_better else best > middle


def value_at(evaluation: Evaluation, measure: Measure) -> float | None:
    """The measure at an evaluation; None: it has none."""
    if measure.name == LOSS.name:
        return evaluation.loss
    return evaluation.measures.get(measure.name)
