"""The report of a run opens anywhere, runs nothing, hides nothing, and copes with half a record.

Every test writes the record of a small run by hand and reads the page as a browser would.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from training.record import plots
from training.record.page import write_report

NUM_PLOTS = 3
VOID = {"meta", "img", "br", "hr", "link", "input"}
STEPS_PER_EPOCH = 20
CLASSES = ["T-shirt", "$x_{$ & <b>bag</b>", "Coat"]
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


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
        words = words[words.index("Accuracy") : words.index("Training")]
        return dict(zip(words[::2], words[1::2], strict=False))


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metrics(num_epochs: int, steps_per_epoch: int = STEPS_PER_EPOCH) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"type": "measure", "name": "accuracy", "form": "percent"}]
    for step in range(1, num_epochs * steps_per_epoch + 1):
        epoch = (step - 1) // steps_per_epoch + 1
        loss = 2 / math.sqrt(step) + 0.05 * math.sin(step * 1.7)
        lines.append({"type": "step", "step": step, "epoch": epoch, "loss": loss, "lr": 1 / step})
        if step % steps_per_epoch:
            continue
        for rank in range(2):
            # The first epoch is slow, and must not count in the means.
            seconds = 0.1 * (10 if epoch == 1 else 1) * (1 + rank)
            parts = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.05}
            lines.append(
                {"type": "rank", "epoch": epoch, "step": step, "rank": rank}
                | {f"{name}_s": share * seconds for name, share in parts.items()}
                | {"phases": [*parts], "step_time_s": seconds, "images_per_s": 480.0}
            )
        lines.append(
            {"type": "evaluation", "epoch": epoch, "step": step, "loss": 1 / epoch}
            | {
                "measures": ["accuracy"],
                "accuracy": 1 - 0.3 / epoch,
                "train_loss": 1.1 / epoch,
                "images_per_s": 950.0,
            }
            | {"seconds": 63.2 * epoch, "a_later_version": True}
        )
    return lines


def write_record(folder: Path) -> Path:
    """The record of a finished run of three epochs, resumed once."""
    folder.mkdir()
    lines = metrics(3)
    resume = {"type": "resume", "step": 30, "world_size": 2}
    other = [{"type": "phase", "name": "start", "time": 1.7e9}, {"type": "new", "step": 60}]
    write_lines(folder / "metrics.jsonl", [*lines[:33], resume, *lines[33:], *other])
    for name, values in {
        "config": {"run": "first", "recipe": "ddp", "preset": "ddp", "elastic": {"min": 1}},
        "environment": {"cpu": "Imaginary 9000", "gpus": [], "started_at": "2025-01-02T03:04:05Z"},
        "evaluation": {
            "title": "Confusion matrix",
            "heads": CLASSES,
            "names": CLASSES,
            "rows": [[90, 7, 3], [4, 96, 0], [11, 0, 89]],
        },
        "result": {
            "status": "succeeded",
            "measures": ["accuracy"],
            "accuracy": 0.9361,
            "loss": 0.22144,
            "seconds": 3845.0,
            "steps": 60,
            "images_per_s": 948.2,
            "world_size": 2,
            "resumed_from": 30,
            "parameters": 11_175_370,
            "mfu": None,
            "error": None,
        },
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_record(tmp_path / "first")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of a run's report, for tests that only look."""
    run = write_record(tmp_path_factory.mktemp("runs") / "first")
    return write_report(run).read_text("utf-8")


@pytest.fixture(scope="module")
def page(content: str) -> Page:
    return Page(content)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made and not rendered, which takes most of a report's time."""
    monkeypatch.setattr(plots, "svg", lambda *_: "")


def change(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def read(run_dir: Path) -> Page:
    """The page of a report written now."""
    return Page(write_report(run_dir).read_text("utf-8"))


def test_the_page_shows_the_values_of_the_result(page: Page) -> None:
    assert page.key_figures() == {
        "Accuracy": "93.61%",
        "Evaluation loss": "0.2214",
        "Images/s": "948",
        "Training time": "1 h 4 min",
        "Workers": "2",
        "Resumed from": "step 30",
        "Steps": "60",
        "Parameters": "11.18 M",
    }


def test_the_page_shows_every_part_of_the_record(page: Page) -> None:
    for part in (
        "succeeded recipe ddp · preset ddp · started 2025-01-02 03:04 UTC",
        "Evaluation loss 0.3333 at the end, its best.",
        "90.00% after the last epoch, the best.",
        "Slowest 200 ms.",  # rank 1 after the first epoch
        "Resumed at step 30 on 2 workers.",
        f"{CLASSES[1]} 4 96 0",
        "elastic.min 1",
        "Measured on a CPU: Imaginary 9000. No GPU took part.",
    ):
        assert part in page.text
    assert "left out." not in page.text
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
def test_the_page_of_a_stopped_run_says_how_far_it_came_and_names_no_model(run_dir: Path) -> None:
    change(run_dir / "config.json", {"epochs": 10})
    change(run_dir / "environment.json", {"command": LAUNCH, "model": "/runs/first/model"})
    change(run_dir / "result.json", {"status": "stopped", "steps": 3, "total_steps": 2350})
    (run_dir / "evaluation.json").unlink()
    text = " ".join(read(run_dir).text.split())
    reached = "stopped at step 3 of 2,350 (epoch 3 of 10)"
    assert text.count(reached) == 2
    assert f"No evaluation yet: {reached}." in text
    assert "/runs/first/model" not in text.partition("Configuration")[0]


LAUNCH = "python -m training.launch ddp --epochs 3"


@pytest.mark.parametrize(
    ("storage", "command", "status", "shown"),
    [
        ("runs", f"{LAUNCH} --local", "stopped", f"Resume {LAUNCH} --local --run first"),
        (
            "runs",
            f"{LAUNCH} --run first --overwrite",
            "succeeded",
            f"Train again {LAUNCH} --run first --overwrite Model trainctl download first",
        ),
        (
            "s3://bucket/runs",
            f"{LAUNCH} --run first --workers 1:4",
            "failed",
            "Resume trainctl submit ddp --epochs 3 --run first Files s3://bucket/runs/first/",
        ),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_page_has_the_commands_that_come_next(
    run_dir: Path, storage: str, command: str, status: str, shown: str
) -> None:
    change(run_dir / "config.json", {"storage": storage})
    model = {"model": "trainctl download first"}
    change(run_dir / "environment.json", {"command": command, **model})
    change(run_dir / "result.json", {"status": status})
    page = read(run_dir)
    assert shown in " ".join(page.text.split())
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == ["metrics.jsonl", "result.json", "config.json"]


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
        assert set(re.findall(r"var\(--(\w+)\)", drawing)) <= set(plots.COLORS)
        assert "var(--" in drawing
        assert not re.search(r"(fill|stroke|color)(: |=\")(#|rgb|black|white)", drawing)
    light = [light for light, _ in plots.COLORS.values()]
    assert len(light) == len(set(light))


def test_strings_of_the_record_are_never_markup(run_dir: Path) -> None:
    change(run_dir / "config.json", {"run": HOSTILE, "recipe": HOSTILE, HOSTILE: HOSTILE})
    change(run_dir / "environment.json", {"cpu": HOSTILE, "started_at": HOSTILE})
    change(run_dir / "evaluation.json", {"names": [HOSTILE, "-->", "]]>"], "title": HOSTILE})
    change(run_dir / "result.json", {"status": HOSTILE, "error": HOSTILE})
    lines = (run_dir / "metrics.jsonl").read_text()
    resume = {"type": "resume", "step": 60, "world_size": HOSTILE}
    (run_dir / "metrics.jsonl").write_text(lines + json.dumps(resume) + "\n")
    page = read(run_dir)
    assert page.unbalanced == []
    assert "script" not in {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert page.text.count(HOSTILE) >= 8


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "missing",
    [
        ["result.json", "evaluation.json"],
        ["metrics.jsonl"],
        ["config.json", "environment.json"],
        ["config.json", "environment.json", "evaluation.json", "result.json"],
    ],
)
def test_what_is_missing_is_left_out_and_said(run_dir: Path, missing: list[str]) -> None:
    for name in missing:
        (run_dir / name).unlink()
    page = read(run_dir)
    assert page.unbalanced == []
    for name in missing:
        assert name in page.text
    assert "first" in page.text  # without a configuration, the folder's name


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_run_shows_its_figures_so_far(run_dir: Path) -> None:
    (run_dir / "result.json").unlink()
    (run_dir / "evaluation.json").unlink()
    page = read(run_dir)
    assert "unfinished" in page.text
    assert page.key_figures()["Accuracy"] == "90.00%"


@pytest.mark.usefixtures("undrawn")
def test_damaged_files_are_left_out_and_told(run_dir: Path) -> None:
    (run_dir / "result.json").write_text('{"status": ')
    (run_dir / "config.json").write_text("[1, 2]")
    (run_dir / "evaluation.json").write_text('{"title": "t", "heads": ["a"], "rows": [[1, 2]]}')
    text = read(run_dir).text
    assert "result.json was left out: Expecting" in text
    assert "config.json was left out: it holds no JSON object." in text
    assert "evaluation.json was left out: it is damaged" in text


def test_numbers_that_are_not_finite_leave_gaps(run_dir: Path) -> None:
    broken: list[dict[str, Any]] = [
        {"type": "step", "step": 61, "loss": math.nan, "lr": math.inf},
        {"type": "step", "step": 62, "loss": None, "lr": "high"},
        {"type": "evaluation", "step": 62, "epoch": 4, "loss": math.nan, "accuracy": True},
        {"type": "step", "step": "many", "loss": 1.0},
    ]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in broken)
    page = read(run_dir)
    assert "nan" not in page.text.lower().split()
    assert "(smoothed) at step 60." in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_language_model_has_tokens_and_perplexity(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"type": "measure", "name": "perplexity", "higher_is_better": False},
        {"type": "step", "step": 1, "loss": 4.0, "lr": 0.1},
        {"type": "evaluation", "step": 1, "epoch": 1, "perplexity": 21.3, "tokens_per_s": 2.5e6},
        {"type": "evaluation", "step": 2, "epoch": 2, "perplexity": 30.5, "tokens_per_s": 1.5e6},
    ]
    for line in lines[2:]:
        line["measures"] = ["perplexity"]
    write_lines(tmp_path / "metrics.jsonl", lines)
    page = read(tmp_path)
    assert "Tokens/s 1.5 M" in page.text
    assert "30.5 after the last epoch; best 21.3 after epoch 1." in page.text


@pytest.mark.usefixtures("undrawn")
def test_gpus_of_the_workers_are_named_though_the_head_has_none(run_dir: Path) -> None:
    change(run_dir / "result.json", {"device": "NVIDIA A10G"})
    assert "Measured on GPUs: NVIDIA A10G." in read(run_dir).text
    change(run_dir / "environment.json", {"gpus": [{"name": "NVIDIA H200"}] * 8})
    change(run_dir / "result.json", {"device": None})
    assert "Measured on GPUs: 8x NVIDIA H200." in read(run_dir).text


def test_many_ranks_are_cut_to_the_slowest(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"type": "rank", "step": 9, "epoch": 1, "rank": rank, "step_time_s": 0.1 + rank / 1000}
        for rank in range(64)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    page = read(tmp_path)
    assert "Slowest 163 ms. The 16 slowest of 64 ranks." in page.text
    assert "rank 63" in page.words
    assert "rank 47" not in page.words


def test_a_curve_of_one_point_has_room_and_cuts_off_no_other_curve() -> None:
    with plots.drawing():
        _, axes = plots.new_axes(468, 280)
    shown = []
    for places in ([8.0], [2.0, 40.0]):
        plots.line(axes, np.array(places), np.ones(len(places)))
        shown.append(axes.get_xlim())
    (left, right), (first, last) = shown
    assert left <= 7
    assert right >= 9
    assert first <= 2
    assert last >= 40


def test_a_long_run_stays_small(run_dir: Path) -> None:
    write_lines(run_dir / "metrics.jsonl", metrics(10, steps_per_epoch=2000))
    path = write_report(run_dir)
    assert path.stat().st_size < 600_000
    assert "14-step mean" in Page(path.read_text("utf-8")).text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a folder"):
        write_report(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"none of config\.json"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


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
