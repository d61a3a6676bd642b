"""Reader of a run's record, also of an unfinished or damaged one, and of another version's."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import InputError
from contract.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    RESULT_FILE,
)
from store import storage
from training.record.events import (
    Evaluation,
    Measure,
    Metrics,
    RankTimes,
    Resume,
    Step,
    described,
    parse_metrics,
)
from training.record.fields import number
from training.record.result import Evaluated, Result, evaluated_from_json


def read_metrics(run_uri: str) -> Metrics:
    """Read the ``metrics.jsonl`` of a run; without one, there are no lines."""
    return parse_metrics(storage.read_bytes(storage.join(run_uri, METRICS_FILE)) or b"")


def read_json(
    run_uri: str, name: str, *, notes: list[str] | None = None
) -> dict[str, object] | None:
    """Read a JSON file of a run's record; None when it is not there or not readable.

    Args:
        notes: gets a sentence where it is not readable.
    """
    content = storage.read_bytes(storage.join(run_uri, name))
    if not content:
        return None
    try:
        values = json.loads(content)
        if isinstance(values, dict):
            return values
        error: Exception | str = "it holds no JSON object"
    except (ValueError, RecursionError) as failure:
        error = failure
    if notes is not None:
        notes.append(f"{name} was left out: {error}.")
    return None


def read_result(run_uri: str, *, notes: list[str] | None = None) -> Result | None:
    """Read the ``result.json`` of a run; None when it is not there or not readable.

    Args:
        notes: gets a sentence where it is not readable.
    """
    values = read_json(run_uri, RESULT_FILE, notes=notes)
    try:
        return None if values is None else Result.from_json(values)
    except ValueError as error:
        if notes is not None:
            notes.append(f"{RESULT_FILE} was left out: {error}.")
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """The content of a run's folder. Mappings are empty, and lists short, while a run goes on."""

    name: str
    config: Mapping[str, object]
    environment: Mapping[str, object]
    result: Result | None
    evaluated: Evaluated | None
    """Details of the last evaluation."""
    metrics: Metrics
    notes: Sequence[str]
    """Files and lines that could not be read, a sentence each."""

    @property
    def steps(self) -> list[Step]:
        return self.metrics.of(Step)

    @property
    def ranks(self) -> list[RankTimes]:
        return self.metrics.of(RankTimes)

    @property
    def evaluations(self) -> list[Evaluation]:
        return self.metrics.of(Evaluation)

    @property
    def resumes(self) -> list[Resume]:
        return self.metrics.of(Resume)

    @property
    def clock(self) -> str:
        """Unit that counts evaluations: epochs, or steps where some lie within an epoch."""
        epochs = [each.epoch for each in self.evaluations if math.isfinite(each.epoch)]
        if epochs and not any(epochs):
            return "step"  # there are no epochs
        return "epoch" if all(epoch == math.floor(epoch) for epoch in epochs) else "step"

    @property
    def items(self) -> str:
        """Kind of data that the run trained on: images, tokens."""
        records = [self.result, *self.evaluations, *self.ranks]
        rates = [each.rate for each in records if each is not None and each.rate is not None]
        return rates[0].items if rates else "items"

    @property
    def measures(self) -> list[Measure]:
        """What the run is judged by: the measures that its record declares, and others that it has
        a value of."""
        declared = self.metrics.of(Measure)
        valued = [] if self.result is None else measured(self.result.measures)
        for each in self.evaluations:
            valued += measured(each.measures)
        names = dict.fromkeys([*(each.name for each in declared), *valued])
        return [described(name, declared) for name in names]

    def last(self, field: str) -> float | None:
        """The result's value of a field or a measure, or the last evaluation's while there is
        none."""
        for record in (self.result, *reversed(self.evaluations)):
            value = None if record is None else figure(record, field)
            if value is not None:
                return value
        return None

    @property
    def gpus(self) -> str:
        """Names of the GPUs, empty without one.

        A cluster's head, which describes the environment, may have none where its workers do:
        the result's devices, which are the workers', come first.
        """
        device = self.result.device if self.result else ""
        if device and device != "CPU":
            return device
        gpus = self.environment.get("gpus")
        return listed(gpus) if isinstance(gpus, list) and not device else ""


def read_run(folder: Path) -> RecordedRun:
    """Read the record in ``folder``; a missing or damaged file counts as empty.

    Raises:
        InputError: ``folder`` is not a folder, or holds nothing of a run's record.
    """
    files = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, EVALUATION_FILE, RESULT_FILE)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of a run")
    if not any((folder / name).is_file() for name in files):
        raise InputError(
            f"{folder} is not the folder of a run: it has none of {', '.join(files)}; "
            "give the folder that --storage and the run's name lead to"
        )
    notes: list[str] = []
    uri = str(folder)
    config, environment, details = (
        read_json(uri, name, notes=notes) or {}
        for name in (CONFIG_FILE, ENVIRONMENT_FILE, EVALUATION_FILE)
    )
    result = read_result(uri, notes=notes)
    evaluated = evaluated_from_json(details)
    if details and evaluated is None:
        notes.append(f"{EVALUATION_FILE} was left out: it is damaged, or of a kind not known here.")
    metrics = read_metrics(uri)
    if metrics.num_damaged:
        notes.append(f"{METRICS_FILE}: {metrics.num_damaged} damaged lines were left out.")
    return RecordedRun(
        name=str(config.get("run") or folder.resolve().name),
        config=config,
        environment=environment,
        result=result,
        evaluated=evaluated,
        metrics=metrics,
        notes=notes,
    )


def figure(record: Result | Step | RankTimes | Evaluation, name: str) -> float | None:
    """A field of an event or a result, or one of its measures, as a finite number."""
    if hasattr(record, name):
        return number(getattr(record, name))
    if isinstance(record, Result | Evaluation):
        return number(record.measures.get(name))
    return None


def measured(values: Mapping[str, float | None]) -> list[str]:
    """The names of what has a value."""
    return [name for name, value in values.items() if value is not None]


def listed(values: Sequence[object]) -> str:
    """Values as text, equal ones once; of a dictionary its name."""
    names = [str(v["name"]) if isinstance(v, dict) and "name" in v else str(v) for v in values]
    counts = Counter(names).items()
    return ", ".join(f"{count}x {name}" if count > 1 else name for name, count in counts)
