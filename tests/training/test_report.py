"""The report of a run opens anywhere, runs nothing and hides nothing.

Every test makes the record of a small run and reads the page as a browser would.
"""

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.conftest import ROOT
from training.record import plots, style
from training.record.events import (
    ACCURACY,
    PERPLEXITY,
    Evaluation,
    Event,
    Line,
    Metrics,
    RankTimes,
    Resume,
    Sample,
    Silent,
    Step,
)
from training.record.fields import Rate
from training.record.page import write_report
from training.record.result import HeldOutText, Result, Table

NUM_PLOTS = 3
VOID = {"meta", "img", "br", "hr", "link", "input"}
STEPS_PER_EPOCH = 20
CLASSES = ("T-shirt", "$x_{$ & <b>bag</b>", "Coat")
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
DETAILS: Final = Table(
    title="Confusion matrix",
    heads=CLASSES,
    names=CLASSES,
    rows=((90, 7, 3), (4, 96, 0), (11, 0, 89)),
)
RESULT: Final = Result(
    run="first",
    recipe="ddp",
    status="succeeded",
    measures={"accuracy": 0.9361},
    loss=0.22144,
    seconds=3845.0,
    steps=60,
    total_steps=60,
    rate=Rate(items="images", per_s=948.2),
    world_size=2,
    resumed_from=30,
    parameters=11_175_370,
    flops_per_s=None,
    mfu=None,
    memory_bytes=3 * 2.0**30,
    gpu_utilization=0.89,
    device="CPU",
    precision="fp32",
    error=None,
)


class Page(HTMLParser):
    """A parsed report: its elements in order, its text, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def key_figures(self) -> dict[str, str]:
        """The row of figures below the title, as a browser would read it out."""
        words = [word.strip() for word in self.words if word.strip()]
        words = words[words.index("accuracy") : words.index("Training")]
        return dict(zip(words[::2], words[1::2], strict=False))


def record(*events: Event) -> Metrics:
    return Metrics(lines=[Line(text="", event=each, step=None, lease=0) for each in events])


def epochs(num_epochs: int, steps_per_epoch: int = STEPS_PER_EPOCH) -> list[Event]:
    found: list[Event] = [ACCURACY]
    for step in range(1, num_epochs * steps_per_epoch + 1):
        epoch = (step - 1) // steps_per_epoch + 1
        loss = 2 / math.sqrt(step) + 0.05 * math.sin(step * 1.7)
        at = 1.7e9 + 5 * math.ceil(step / 10)
        found.append(Step(step=step, epoch=epoch, loss=loss, lr=1 / step, grad_norm=1.0, time=at))
        if step % steps_per_epoch:
            continue
        for rank in range(2):
            # The first epoch is slow, and must not count in the means.
            seconds = 0.1 * (10 if epoch == 1 else 1) * (1 + rank)
            parts = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.05}
            found.append(
                RankTimes(
                    epoch=epoch,
                    step=step,
                    rank=rank,
                    phases={name: share * seconds for name, share in parts.items()},
                    step_time_s=seconds,
                    rate=Rate(items="images", per_s=480.0),
                    memory_bytes=(11 + rank) * 1e9,
                    gpu_utilization=0.99 - 0.2 * rank,
                )
            )
        found.append(
            Evaluation(
                epoch=epoch,
                step=step,
                loss=1 / epoch,
                measures={"accuracy": 1 - 0.3 / epoch},
                train_loss=1.1 / epoch,
                rate=Rate(items="images", per_s=950.0),
                seconds=63.2 * epoch,
                mfu=0.4 - 0.1 / epoch,
            )
        )
    return found


def written(folder: Path, **changed: Any) -> str:
    """The report of a finished run of three epochs, resumed once, with some of it changed."""
    found = epochs(3)
    given = {
        "result": RESULT,
        "metrics": record(*found[:33], Resume(step=30, world_size=2), *found[33:]),
        "settings": {"run": "first", "recipe": "ddp", "preset": "ddp", "lr": 0.1},
        "environment": {"cpu": "Imaginary 9000", "started_at": "2025-01-02T03:04:05Z"},
        "evaluated": DETAILS,
        **changed,
    }
    return write_report(folder, given.pop("result"), **given).read_text("utf-8")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of a run's report, for tests that only look."""
    return written(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(content: str) -> Page:
    return Page(content)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made and not rendered, which takes most of a report's time."""
    monkeypatch.setattr(plots, "svg", lambda *_: "")


def test_the_page_shows_the_values_of_the_result(page: Page) -> None:
    assert page.key_figures() == {
        "accuracy": "93.61%",
        "evaluation loss": "0.2214",
        "throughput": "948 images/s on CPU",
        "steps": "60 on 2 workers, resumed from 30",
        "training time": "1 h 4 min",
        "GPU utilization": "89.00%",
        "memory": "3 GiB per worker",
    }


def test_the_page_shows_every_part_of_the_record(page: Page) -> None:
    for part in (
        "succeeded recipe ddp · preset ddp",
        "Evaluation loss 0.3333 at the end, its best.",
        "90.00% at the end, the best.",
        "Slowest 200 ms.",  # rank 1 after the first epoch
        "rank 1 GPU 79%",
        "Resumed at step 30 on 2 workers.",
        "2 40 0.55 0.5000 85.00% 950 2 min 6 s",
        f"{CLASSES[1]} 4 96 0",
        '"lr": 0.1',
        '"cpu": "Imaginary 9000"',
    ):
        assert part in page.text
    assert "damaged" not in page.text


def test_the_page_is_balanced_and_fetches_nothing(content: str, page: Page) -> None:
    assert page.unbalanced == []
    assert not re.search(r"https?:|url\((?!#)|@import|<script|<link", content)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            # What a link leads to is not fetched.
            if tag != "a" and name in {"src", "href", "xlink:href", "srcset"}:
                assert value.startswith(("data:", "#")), (tag, name, value)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    used = re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", content)
    assert len(ids) == len(set(ids))
    assert {a or b for a, b in used} <= set(ids)


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_a_stopped_run_says_how_far_it_came_and_what_was_lost(tmp_path: Path) -> None:
    stopped = replace(RESULT, status="stopped", steps=3, total_steps=2350, damaged_lines=2)
    hung = Silent(after=2, seconds=600.0, time=1.7e9)
    metrics = record(*epochs(1), hung)
    text = Page(written(tmp_path, result=stopped, metrics=metrics, evaluated=None)).text
    assert "Started again after 1 hang." in text
    assert "steps 3 of 2,350 on 2 workers" in text
    assert "metrics.jsonl: 2 damaged lines left out." in text
    assert "Confusion" not in text


def test_the_page_can_be_read_aloud(page: Page) -> None:
    elements = page.elements
    assert ("html", {"lang": "en"}) in elements
    drawings = [attributes for tag, attributes in elements if tag == "svg"]
    assert len(drawings) == NUM_PLOTS
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)
    assert all(attributes["scope"] in {"row", "col"} for tag, attributes in elements if tag == "th")


def test_every_colour_of_a_drawing_follows_the_theme(content: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", content, re.DOTALL)
    assert drawings
    for drawing in drawings:
        assert set(re.findall(r"var\(--(\w+)\)", drawing)) <= set(style.COLORS)
        assert "var(--" in drawing
        assert not re.search(r"(fill|stroke|color)(: |=\")(#|rgb|black|white)", drawing)
    light = [light for light, _ in style.COLORS.values()]
    assert len(light) == len(set(light))


def test_strings_of_the_record_are_never_markup(tmp_path: Path) -> None:
    sample = Sample(step=1, prompt=HOSTILE, text=HOSTILE)
    page = Page(
        written(
            tmp_path,
            result=replace(RESULT, run=HOSTILE, status=HOSTILE, error=HOSTILE),
            settings={"recipe": HOSTILE, HOSTILE: HOSTILE},
            environment={"cpu": HOSTILE},
            evaluated=replace(DETAILS, title=HOSTILE, names=(HOSTILE, "-->", "]]>")),
            metrics=record(*epochs(1), sample),
        )
    )
    assert page.unbalanced == []
    assert "script" not in {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert page.text.count(HOSTILE) >= 7


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    nan = math.nan
    broken = Step(step=61, epoch=4, loss=nan, lr=math.inf, grad_norm=nan, time=nan)
    scored = Evaluation(step=62, epoch=4, loss=nan, measures={"accuracy": nan})
    page = Page(written(tmp_path, metrics=record(*epochs(3), broken, scored)))
    assert "nan" not in page.text.lower().split()
    assert "at step 60." in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_language_model_has_perplexity_its_held_out_loss_and_samples(tmp_path: Path) -> None:
    events: list[Event] = [PERPLEXITY]
    for step, perplexity in ((1, 21.3), (2, 30.5)):
        scored = Evaluation(step=step, epoch=step, measures={"perplexity": perplexity})
        events += [scored, Sample(step=step, prompt="Once", text=f" upon {step}")]
    details = HeldOutText(loss=3.4177, perplexity=30.5, num_tokens=12_345)
    page = Page(written(tmp_path, metrics=record(*events), evaluated=details))
    assert "30.5 at the end; best 21.3 at step 1." in page.text
    assert "Loss 3.4177 nats per token over 12,345 held-out tokens." in page.text
    assert "after 1 step Once upon 1 after 2 steps Once upon 2" in page.text


def test_many_ranks_are_cut_to_the_slowest(tmp_path: Path) -> None:
    ranks = [
        RankTimes(step=9, epoch=1, rank=rank, step_time_s=0.1 + rank / 1000) for rank in range(64)
    ]
    page = Page(written(tmp_path, metrics=record(*ranks)))
    assert "Slowest 163 ms. The 16 slowest of 64 ranks." in page.text
    assert "rank 63" in page.words
    assert "rank 47" not in page.words


def test_the_names_of_all_parts_of_a_step_are_in_its_figure() -> None:
    parts = dict.fromkeys(("data", "forward", "backward", "optimizer", "checkpoint"), 0.01)
    with plots.drawing():
        drawn = plots.step_time_plot(
            [RankTimes(step=9, epoch=1, rank=0, step_time_s=0.1, phases=parts)]
        )
    assert drawn is not None
    (left,) = re.findall(r'<text [^>]*\bx="([\d.]+)" [^>]*>other<', drawn.svg)
    assert float(left) < 400


def test_a_curve_of_one_point_has_room_and_cuts_off_no_other_curve() -> None:
    with plots.drawing():
        _, axes = plots.new_axes(468, 280)
    shown = []
    for places in ([8.0], [2.0, 40.0]):
        plots.line(axes, np.array(places), np.ones(len(places)), color="blue")
        shown.append(axes.get_xlim())
    (left, right), (first, last) = shown
    assert left <= 7
    assert right >= 9
    assert first <= 2
    assert last >= 40


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    content = written(tmp_path, metrics=record(*epochs(10, steps_per_epoch=2000)))
    assert len(content) < 300_000
    assert "40-step mean" in Page(content).text


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("writer, reader", {"torch", "ray", "numpy", "matplotlib", "jinja2", "PIL", "rich"}),
        ("page", {"torch", "ray", "matplotlib", "jinja2", "PIL"}),
    ],
)
def test_importing_a_module_brings_in_no_heavy_library(modules: str, heavy: set[str]) -> None:
    code = f"import sys; from training.record import {modules}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == ""
