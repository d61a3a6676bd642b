"""Reader of a run's record, also of an unfinished or damaged one."""

from contract.runs import METRICS_FILE, RESULT_FILE
from contract.typed_json import loads_if_any
from store import storage
from training.record.events import Metrics, parse_metrics
from training.record.result import Result


def read_metrics(run_uri: str) -> Metrics:
    """Read the ``metrics.jsonl`` of a run; without one, there are no lines."""
    return parse_metrics(storage.read_bytes(storage.join(run_uri, METRICS_FILE)) or b"")


def read_json(run_uri: str, name: str) -> dict[str, object] | None:
    """Read a JSON file of a run's record; None when it is missing or cannot be read."""
    return loads_if_any(storage.read_bytes(storage.join(run_uri, name)))


def read_result(run_uri: str) -> Result | None:
    """Read the ``result.json`` of a run; None when it is missing or cannot be read."""
    values = read_json(run_uri, RESULT_FILE)
    try:
        return None if values is None else Result.from_json(values)
    except ValueError:
        return None
