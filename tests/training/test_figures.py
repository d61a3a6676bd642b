"""Figures of a report: colors that everyone can tell apart, and marks where the text says."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from training.record import plots, reader

#: Machado, Oliveira and Fernandes 2009: linear RGB as people see it who lack a kind of cone.
VISIONS = {
    "all cones": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(color: str, vision: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """CIE L*a*b* of a color as it is seen."""
    encoded = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_parts_of_a_step_are_told_apart_with_every_kind_of_vision(vision: str, theme: int) -> None:
    # 2.3 is just noticeable side by side.
    for one, other in itertools.combinations([*plots.PART_COLORS, plots.OTHER_COLOR], 2):
        colors = [plots.COLORS[name][theme] for name in (one, other)]
        first, second = (lab(color, vision) for color in colors)
        assert np.linalg.norm(first - second) > 17, (one, other)


def test_of_equal_values_the_last_one_is_marked_as_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure: dict[str, object] = {"type": "measure", "name": "accuracy", "form": "percent"}
    lines = [
        {"type": "evaluation", "step": epoch, "epoch": epoch}
        | {"measures": ["accuracy"], "accuracy": accuracy}
        for epoch, accuracy in enumerate([0.5, 0.9, 0.8, 0.9], 1)
    ]
    lines.insert(0, measure)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = reader.read_run(tmp_path)
    (accuracy,) = [each for each in run.measures if each.name == "accuracy"]
    marked: list[float] = []
    plot = Axes.plot

    def seen(self: Axes, *places: Any, **style: Any) -> Any:
        if style.get("label") == "best":
            marked.append(float(places[0]))
        return plot(self, *places, **style)

    monkeypatch.setattr(Axes, "plot", seen)
    with plots.drawing():
        drawn = plots.measure_plot(run, accuracy)
    assert drawn is not None
    assert drawn.text == "90.00% after the last epoch, the best."
    assert marked == [4.0]
