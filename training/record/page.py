"""The report of one run: a page that opens anywhere.

Reads the record that a run leaves in its folder and writes ``report.html``, which needs no
network and no other file. An unfinished run gets a report of what there is.
Needs NumPy, Matplotlib and Jinja2, but neither torch nor Ray. To watch a run live, read
its ``metrics.jsonl`` instead: this draws everything again each time.

The page's content is put together here; ``page.html.j2`` lays it out and ``page.css`` styles it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from contract.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    REPORT_FILE,
    RESULT_FILE,
)
from contract.text import compact, counted, duration, percent, significant
from store import storage
from training.record import plots
from training.record.events import Sample, Silent
from training.record.fields import number
from training.record.plots import COLORS, Plot, draw
from training.record.reader import RecordedRun, figure, listed, read_run
from training.record.result import SUCCEEDED, HeldOutText, Result, Table

_HERE: Final = Path(__file__).parent


def write_report(
    run_dir: Path, result: Result | None = None, *, check: Callable[[], None] | None = None
) -> Path:
    """Write ``report.html`` into ``run_dir`` and return its path.

    Args:
        result: in place of that in the folder.
        check: see ``storage.write_bytes``.

    The same record gives the same bytes. The file is replaced whole, so a reader never sees half
    of it. Matplotlib's settings are changed while this runs: not for use while another thread
    draws.

    Raises:
        ValueError: ``run_dir`` is not a folder, or holds nothing of a run's record.
        OSError: A file cannot be read or written.
    """
    run = read_run(run_dir)
    run = replace(run, result=result or run.result)
    with plots.drawing():
        drawn = draw(run)
    path = run_dir / REPORT_FILE
    storage.write_bytes(str(path), page(run, drawn).encode("utf-8", "replace"), check=check)
    return path


def page(run: RecordedRun, drawn: Sequence[Plot]) -> str:
    """The whole document. Every string of the record is escaped."""
    return render(
        "page.html.j2",
        run=run,
        status=_status(run),
        facts=_facts(run),
        reached=_reached(run),
        error=run.result.error if run.result else None,
        key_figures=key_figures(run),
        plots=drawn,
        resumes=_resumes(run),
        evaluations=_evaluations(run),
        section=_section(run),
        held_out=_held_out(run),
        details=_details(run.evaluated) if isinstance(run.evaluated, Table) else None,
        texts=_texts(run.metrics.of(Sample)),
        next_steps=_next_steps(run),
        config=_flat(run.config),
        environment=_flat(run.environment),
        footer=_footer(run),
        files={
            "config": CONFIG_FILE,
            "environment": ENVIRONMENT_FILE,
            "evaluation": EVALUATION_FILE,
            "metrics": METRICS_FILE,
            "result": RESULT_FILE,
        },
    )


def render(template: str, **content: object) -> str:
    """Fill in a template of this folder; every string is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(css=_css(), **content)


def key_figures(run: RecordedRun) -> list[tuple[str, str]]:
    """The row of figures below the title: labels and values."""

    def of(name: str) -> float | None:
        return number(getattr(run.result, name, None))

    resumed_from = of("resumed_from")
    if resumed_from is None and run.resumes:
        resumed_from = run.resumes[-1].step
    figures: list[tuple[str, float | None, Callable[[float], str]]] = [
        *((each.title, run.last(each.name), each.words) for each in run.measures),
        ("Evaluation loss", run.last("loss"), significant),
        (f"{run.items.capitalize()}/s", run.last("items_per_s"), compact),
        ("Training time", of("seconds"), duration),
        ("With start-up", of("total_seconds"), duration),
        ("Cost", of("usd"), lambda usd: f"about ${usd:,.2f}"),
        ("Workers", of("world_size") or number(run.config.get("num_workers")), compact),
        ("Resumed from", resumed_from, lambda step: f"step {step:,.0f}"),
        ("Preempted", of("preempted") or None, compact),
        ("Started again", len(run.metrics.of(Silent)) or None, compact),
        ("Steps", of("steps"), compact),
        ("Skipped steps", of("skipped_steps") or None, compact),
        ("Parameters", of("parameters") or None, compact),
        ("MFU", of("mfu"), percent),
        ("Memory per worker", run.last("memory_bytes"), lambda size: f"{size / 2**30:.3g} GiB"),
    ]
    return [(label, words(value)) for label, value, words in figures if value is not None]


def _section(run: RecordedRun) -> str:
    """Which details of the evaluation the page shows; ``none`` while there are none."""
    match run.evaluated:
        case Table():
            return "table"
        case HeldOutText():
            return "texts"
    return "texts" if run.metrics.of(Sample) else "none"


def _details(table: Table) -> dict[str, object]:
    rows = [[f"{each:,.10g}" for each in row] for row in table.rows]
    heads = [*table.heads]
    if table.names:
        heads = ["", *heads]
        rows = [[name, *row] for name, row in zip(table.names, rows, strict=True)]
    return {"title": table.title, "heads": heads, "rows": rows}


def _status(run: RecordedRun) -> dict[str, str]:
    name = run.result.status if run.result and run.result.status else "unfinished"
    kind = {SUCCEEDED: "good", "failed": "bad"}.get(name, "open")
    mark = {SUCCEEDED: "✓", "failed": "✗", "stopped": "■"}.get(name, "…")
    return {"name": name, "kind": kind, "mark": mark}


def _facts(run: RecordedRun) -> list[str]:
    facts = [f"recipe {run.config.get('recipe', 'unknown')}"]
    if preset := run.config.get("preset"):
        facts.append(f"preset {preset}")
    if reached := _reached(run):
        facts.append(reached)
    if started := run.environment.get("started_at"):
        facts.append(f"started {_moment(started)}")
    return facts


def _reached(run: RecordedRun) -> str:
    """How far a run came that did not come to its end; empty for others."""
    result = run.result
    if result is None or result.status == SUCCEEDED or not result.total_steps:
        return ""
    words = f"{result.status} at step {result.steps:,} of {result.total_steps:,}"
    epochs = number(run.config.get("epochs"))
    if not (epochs and run.steps and run.steps[-1].epoch <= epochs):  # --max-steps may go on
        return words
    return f"{words} (epoch {run.steps[-1].epoch:.0f} of {epochs:.0f})"


def _resumes(run: RecordedRun) -> list[str]:
    found = []
    for resume in run.resumes:
        words = f"at step {resume.step:,}"
        if resume.world_size is not None:
            words += f" on {counted(resume.world_size, 'worker')}"
        found.append(words)
    return found


def _evaluations(run: RecordedRun) -> dict[str, list[str] | list[list[str]]]:
    """Table of the numbers behind the curves: the fields that any evaluation has."""
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("Epoch", "epoch", significant),
        ("Step", "step", compact),
        ("Training loss", "train_loss", significant),
        ("Evaluation loss", "loss", significant),
        *((each.title, each.name, each.words) for each in run.measures),
        (f"{run.items.capitalize()}/s", "items_per_s", compact),
        ("Elapsed", "seconds", duration),
    ]
    table: dict[str, list[float | None]] = {
        name: [figure(each, name) for each in run.evaluations] for _, name, _ in columns
    }
    known = [each for each in columns if any(value is not None for value in table[each[1]])]
    rows = [
        ["-" if (value := table[name][row]) is None else words(value) for _, name, words in known]
        for row in range(len(run.evaluations))
    ]
    return {"heads": [head for head, _, _ in known], "rows": rows}


def _held_out(run: RecordedRun) -> str:
    """Loss over held-out text, in a sentence."""
    found = run.evaluated
    if not isinstance(found, HeldOutText) or number(found.loss) is None:
        return f"Held-out loss: left out. {EVALUATION_FILE} has none yet."
    return f"Loss {found.loss:.4f} nats per token over {found.num_tokens:,} held-out tokens."


def _texts(samples: Iterable[Sample]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Continuations of each prompt, and when they were made."""
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    for sample in samples:
        when = f"after {counted(sample.step, 'step')}" if sample.step else "before training"
        by_prompt.setdefault(sample.prompt, []).append((when, sample.text))
    return [*by_prompt.items()]


def _flat(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and values as text, nested dictionaries unfolded."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found.append((f"{prefix}{key}", listed(value) or "none"))
        elif value is None or value == "":
            found.append((f"{prefix}{key}", "-"))
        else:
            words = str(value).lower() if isinstance(value, bool) else str(value)
            found.append((f"{prefix}{key}", words))
    return found


def _footer(run: RecordedRun) -> str:
    if run.gpus:
        words = f"Measured on GPUs: {run.gpus}."
    elif run.environment.get("cpu"):
        words = f"Measured on a CPU: {run.environment['cpu']}. No GPU took part."
    else:
        words = "The record does not name the machine that this was measured on."
    words += f" {run.items.capitalize()}/s are those of all workers together; times per step are "
    words += "each rank's own means, the first stretch left out where there are more."
    return " ".join([words, *run.notes])


def _next_steps(run: RecordedRun) -> list[tuple[str, str]]:
    """Commands that resume a run, or train it again, and that get its model."""
    command = str(run.environment.get("command", ""))
    if not command:
        return []
    storage = str(run.config.get("storage", ""))
    if storage.startswith("s3://"):  # the job decides about the workers
        command = command.replace("python -m training.launch", "trainctl submit")
        command = re.sub(r" --workers[ =]\S+", "", command)
    if "--run" not in command:
        command += f" --run {run.name}"
    command = command.replace(" --overwrite", "")
    is_complete = run.result is not None and run.result.status == SUCCEEDED
    rows = [("Train again", f"{command} --overwrite") if is_complete else ("Resume", command)]
    if is_complete:  # a model is published at the end
        found = {name: run.environment.get(name) for name in ("model", "export")}
        rows += [(name.title(), str(place)) for name, place in found.items() if place]
    return [*rows, ("Files", f"{storage}/{run.name}/")]


def _moment(value: object) -> str:
    """An ISO time to the minute, or the value itself when it is none."""
    try:
        return f"{datetime.fromisoformat(str(value)):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return str(value)


def _css() -> str:
    light, dark = (
        ";".join(f"--{name}:{pair[theme]}" for name, pair in COLORS.items()) for theme in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"{(_HERE / 'page.css').read_text('utf-8')}"
    )
