"""What CloudWatch answers to the dashboard and to the alarm on idle GPUs, on made-up metrics.

No AWS: the metrics are those that the CloudWatch agent publishes with a configuration, and of the
grammars of searches and Metrics Insights there is what our expressions use. An expression with
another namespace, metric or set of dimensions than the published one finds nothing, as there.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from tests.stacks.conftest import Templates, text

Samples = Mapping[int, float]
"""Second -> value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric with all that was reported of it."""

    namespace: str
    name: str
    dimensions: Mapping[str, str]
    samples: Samples


# --- what the agent publishes ---------------------------------------------------------------------
#: Measurements of ``nvidia_gpu`` (Amazon CloudWatch User Guide, Collect NVIDIA GPU metrics), and
#: the value of each before and in training, on an A10G.
GPU_VALUES: Final[Mapping[str, tuple[float, float]]] = {
    "utilization_gpu": (0, 98),
    "utilization_memory": (0, 61),
    "memory_used": (470, 21200),
    "memory_free": (22260, 1530),
    "memory_total": (23028, 23028),
    "temperature_gpu": (31, 63),
    "power_draw": (24, 262),
    "clocks_current_graphics": (210, 1710),
    "clocks_current_memory": (405, 6251),
    "clocks_current_sm": (210, 1710),
}
HOSTS: Final = ("i-0a12f6c43d9e8b571", "i-0c95e0b7218fd4a36")
START_S, END_S, SAVE_EVERY_S, SAVE_S = 240, 3300, 900, 40


def training_hour(config: Mapping[str, Any], *, num_gpus: int = 4) -> list[Metric]:
    """Metrics of an hour in which two hosts train.

    Args:
        config: of the agent.
    """
    given, found = config["metrics"], []
    for number, host in enumerate(HOSTS):
        own = dict.fromkeys(given["append_dimensions"], host)
        if not config["agent"].get("omit_hostname"):
            own["host"] = f"ip-10-0-1-{number}"
        times = range(0, 3600, config["agent"]["metrics_collection_interval"])
        series = {
            (name, ""): {second: 31.0 + 2 * math.sin(second / 500) for second in times}
            for name in given["metrics_collected"]["mem"]["measurement"]
        }
        for index in range(num_gpus):
            for name in given["metrics_collected"]["nvidia_gpu"]["measurement"]:
                values = {second: _value(name, second, 4 * number + index) for second in times}
                series[f"nvidia_smi_{name}", str(index)] = values
        found += [
            Metric(
                namespace=given["namespace"],
                name=name,
                dimensions=own
                | ({"arch": "Ampere", "index": index, "name": "NVIDIA A10G"} if index else {}),
                samples=samples,
            )
            for (name, index), samples in series.items()
        ]
    return found


def _value(name: str, second: int, gpu: int) -> float:
    idle, busy = GPU_VALUES[name]
    # No two GPUs are alike, and the second host starts later.
    since, until = second - START_S - 80 * (gpu // 4), END_S - second
    busy += 0.011 * gpu * (idle - busy)
    if name == "temperature_gpu":  # it follows slowly
        warm = 1 - math.exp(-max(0, since) / 200)
        return idle + gpu / 2 + (busy - idle) * warm * math.exp(min(0, until) / 200)
    saves = second % SAVE_EVERY_S < SAVE_S
    if since < 0 or until < 0:
        return idle
    if name.startswith("memory"):
        return busy
    return idle if saves else busy * (0.99 + 0.01 * math.sin(second * (gpu + 3)))


# --- what is asked of them ------------------------------------------------------------------------
def dashboard(templates: Templates, host: str = "") -> dict[str, Any]:
    """The dashboard's body, with ``host`` chosen as the console does it."""
    body = text(templates.only("AWS::CloudWatch::Dashboard")["DashboardBody"])
    found: dict[str, Any] = json.loads(body)
    for variable in found.get("variables", []) if host else []:
        assert variable["type"] == "pattern"
        found = json.loads(re.sub(variable["pattern"], host, body))
    return found


STATISTICS: Final[Mapping[str, Any]] = {
    **{"AVG": mean, "Average": mean, "MAX": max, "Maximum": max, "MIN": min},
}
SEARCH: Final = re.compile(
    r"SEARCH\('\{([^,}]+),([^}]+)\} ((?:\w+=\"[^\"]*\" ?)+)', '(\w+)', (\d+)\)"
)
SELECT: Final = re.compile(
    r'SELECT (\w+)\((\w+)\) FROM SCHEMA\("([^"]+)", ([^)]+)\) GROUP BY (\w+)'
    r"(?: ORDER BY \w+\(\) (?:ASC|DESC))?"
)
PROPERTY: Final = re.compile(r"\$\{PROP\('Dim\.(\w+)'\)\}")


def lines(asked: list[Any], metrics: list[Metric]) -> dict[str, Samples]:
    """Label -> points: what one member of a graph's ``metrics`` draws.

    Raises:
        ValueError: an expression is none that is known here.
    """
    *metric, options = asked
    label, period = options["label"], options["period"]
    if metric:
        namespace, name, *own = metric
        pairs = dict(zip(own[::2], own[1::2], strict=True))
        found = [each for each in _of(metrics, namespace, name, pairs) if each.dimensions == pairs]
        return {label: _points(found, options["stat"], period)} if found else {}
    if match := SEARCH.fullmatch(options["expression"]):
        namespace, dimensions, terms, statistic, every = match.groups()
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', terms))
        name = wanted.pop("MetricName")
        return {
            _named(label, each): _points([each], statistic, int(every))
            for each in _of(metrics, namespace, name, dimensions.split(","))
            if wanted.items() <= each.dimensions.items()
        }
    if match := SELECT.fullmatch(options["expression"]):
        function, name, namespace, dimensions, by = match.groups()
        groups: dict[str, list[Metric]] = {}
        for each in _of(metrics, namespace, name, re.findall(r'"(\w+)"', dimensions)):
            groups.setdefault(each.dimensions[by], []).append(each)
        return {f"{label} {of}": _points(groups[of], function, period) for of in groups}
    raise ValueError(f"no search and no query of ours: {options['expression']}")


def _named(label: str, metric: Metric) -> str:
    return PROPERTY.sub(lambda part: metric.dimensions[part[1]], label)


def _of(
    metrics: list[Metric], namespace: str, name: str, dimensions: Iterable[str]
) -> list[Metric]:
    """Those with just these dimensions."""
    asked = (namespace, name, {*dimensions})
    return [each for each in metrics if (each.namespace, each.name, {*each.dimensions}) == asked]


def _points(metrics: list[Metric], statistic: str, period: int) -> Samples:
    """One value for each period in which there is any."""
    values: dict[int, list[float]] = {}
    for each in metrics:
        for second, value in each.samples.items():
            values.setdefault(second // period * period, []).append(value)
    return {second: STATISTICS[statistic](values[second]) for second in sorted(values)}
