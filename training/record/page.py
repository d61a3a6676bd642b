"""The report of one run: a page that opens anywhere.

``report.html`` is written when an attempt ends, and needs no network and no other file. Needs
NumPy, Matplotlib and Jinja2, but neither torch nor Ray. To watch a run live, read its
``metrics.jsonl`` instead.

The page's content is put together here; ``page.html.j2`` lays it out and ``page.css`` styles it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from contract.runs import METRICS_FILE, REPORT_FILE
from contract.text import compact, counted, duration, significant
from store import storage
from training.record import plots
from training.record.display import figures
from training.record.events import Measure, Metrics, Resume, Sample, Silent
from training.record.plots import figure
from training.record.result import SUCCEEDED, Evaluated, HeldOutText, Result, Table
from training.record.style import css

_HERE: Final = Path(__file__).parent


def write_report(
    folder: Path,
    result: Result,
    *,
    metrics: Metrics,
    settings: Mapping[str, object],
    environment: Mapping[str, object],
    evaluated: Evaluated | None = None,
    use: Sequence[str] = (),
    check: Callable[[], None] | None = None,
) -> Path:
    """Write ``report.html`` into ``folder`` and return its path.

    Args:
        settings: content of ``config.json``.
        environment: content of ``environment.json``.
        evaluated: details of the last evaluation.
        use: lines that use the model.
        check: see ``storage.write_bytes``.

    The same record gives the same bytes. The file is replaced whole, so a reader never sees half
    of it. Matplotlib's settings are changed while this runs: not for use while another thread
    draws.

    Raises:
        OSError: the file cannot be written.
    """
    with plots.drawing():
        drawn = plots.draw(metrics)
    content = _render(
        result=result,
        status=_status(result),
        facts=[f"{name} {settings[name]}" for name in ("recipe", "preset") if settings.get(name)],
        key_figures=figures(result, measures=metrics.measures),
        use="\n".join(use),
        plots=drawn,
        notes=_notes(metrics, result),
        evaluations=_evaluations(metrics, metrics.measures, result),
        details=_details(evaluated) if isinstance(evaluated, Table) else None,
        held_out=evaluated if isinstance(evaluated, HeldOutText) else None,
        texts=_texts(metrics.of(Sample)),
        files={
            "Configuration": json.dumps(settings, indent=1),
            "Environment": json.dumps(environment, indent=1),
        },
    )
    path = folder / REPORT_FILE
    storage.write_bytes(str(path), content.encode("utf-8", "replace"), check=check)
    return path


def _render(**content: object) -> str:
    """The whole document. Every string of the record is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(css=css(), **content)


def _status(result: Result) -> tuple[str, str]:
    """Kind of the status, and its mark."""
    return {SUCCEEDED: ("good", "✓"), "failed": ("bad", "✗")}.get(result.status, ("open", "■"))


def _notes(metrics: Metrics, result: Result) -> list[str]:
    """Events that are no figures, a sentence each."""
    notes = [
        f"Resumed at step {each.step:,} on {counted(each.world_size, 'worker')}."
        for each in metrics.of(Resume)
    ]
    if hangs := metrics.of(Silent):
        notes.append(f"Started again after {counted(len(hangs), 'hang')}.")
    if result.damaged_lines:
        notes.append(f"{METRICS_FILE}: {counted(result.damaged_lines, 'damaged line')} left out.")
    return notes


def _details(table: Table) -> dict[str, object]:
    rows = [[f"{each:,.10g}" for each in row] for row in table.rows]
    heads = [*table.heads]
    if table.names:
        heads = ["", *heads]
        rows = [[name, *row] for name, row in zip(table.names, rows, strict=True)]
    return {"title": table.title, "heads": heads, "rows": rows}


def _evaluations(
    metrics: Metrics, measures: Sequence[Measure], result: Result
) -> dict[str, list[str] | list[list[str]]]:
    """Table of the numbers behind the curves: the fields that any evaluation has."""
    items = result.rate.items if result.rate else "items"
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("Epoch", "epoch", significant),
        ("Step", "step", compact),
        ("Training loss", "train_loss", significant),
        ("Evaluation loss", "loss", "{:.4f}".format),
        *((each.title, each.name, each.words) for each in measures),
        (f"{items.capitalize()}/s", "items_per_s", compact),
        ("Elapsed", "seconds", duration),
    ]
    evaluations = metrics.evaluations
    table = {name: [figure(each, name) for each in evaluations] for _, name, _ in columns}
    known = [each for each in columns if any(value is not None for value in table[each[1]])]
    rows = [
        ["-" if (value := table[name][row]) is None else words(value) for _, name, words in known]
        for row in range(len(evaluations))
    ]
    return {"heads": [head for head, _, _ in known], "rows": rows}


def _texts(samples: Iterable[Sample]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Continuations of each prompt, and when they were made."""
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    for sample in samples:
        when = f"after {counted(sample.step, 'step')}" if sample.step else "before training"
        by_prompt.setdefault(sample.prompt, []).append((when, sample.text))
    return [*by_prompt.items()]
