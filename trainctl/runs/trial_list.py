"""Trials of a tuning, from the table that its job keeps in the bucket."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from contract.runs import TRIALS_FILE
from contract.text import significant
from trainctl.aws.deployment_bucket import DeploymentBucket, json_object
from training.record.events import Measure
from training.trials import by_value

_OWN: Final = ("run", "status")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialList:
    """Trials, the best first; empty for a run that is no tuning."""

    rows: list[dict[str, object]]
    metric: str = ""

    @classmethod
    def of_json(cls, values: Mapping[str, object]) -> Self:
        """From the content of the table; any job may have written it."""
        found, metric = values.get("trials"), str(values.get("metric") or "")
        rows = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        measure = Measure(
            name=metric, higher_is_better=values.get("higher_is_better") is not False
        )
        return cls(rows=by_value(rows, measure), metric=metric)

    @property
    def columns(self) -> list[str]:
        """Headings of ``cells``."""
        settings = [each for row in self.rows[:1] for each in row if each not in _OWN]
        settings = [each for each in settings if each != self.metric]
        return [self.metric, *settings, *_OWN] if self.rows else []

    @property
    def cells(self) -> list[list[str]]:
        """A row for each trial."""
        return [[_text(row.get(each)) for each in self.columns] for row in self.rows]


def of(bucket: DeploymentBucket, run: str) -> TrialList:
    """Trials of a run."""
    return TrialList.of_json(json_object(bucket.read_of_run(run, TRIALS_FILE)))


def _text(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return significant(float(str(value))) if is_number else "" if value is None else str(value)
