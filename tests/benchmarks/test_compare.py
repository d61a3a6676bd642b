"""The table of comparisons is made of what the benchmarks print."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare

PRINTED: dict[str, Any] = {
    "ddp": {"ratio": 1.6},
    "gpu_fsdp": {"cases": [{"ratios": {"plain": 1.1, "trainer": 0.9}}]},
    "checkpoint": {
        "seconds": {
            "here": {"waited": 0.05, "cpu": 0.4},
            "thread": {"waited": 0.1, "cpu": 0.3},
            "process": {"waited": 0.2, "cpu": 0.2},
        }
    },
    "images": {"pictures_per_cpu_s": {"plain": 100.0, "tree": 260.0}},
    "fashion": {"ratio": 0.5},
}


def test_each_comparison_is_a_line_and_the_one_furthest_from_its_aim_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(module: str, _: object) -> tuple[int, str]:
        return 0, json.dumps(PRINTED[module.removeprefix("benchmarks.")])

    monkeypatch.setattr(compare, "run", run)
    (tmp_path / "ddp.json").write_text("of the last time")
    assert compare.main(["--plain", "loop.py", "--to", str(tmp_path)]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["ddp.json"]
    assert json.loads((tmp_path / "ddp.json").read_text()) == PRINTED["ddp"]
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["ratio"] == pytest.approx(0.5 / 0.91)
    ratios = [round(row["ratio"], 2) for row in result["rows"]]
    assert ratios == [1.6, 1.1, 0.9, 2.0, 0.5, 2.6, 0.5]
    assert "0.90  (aim 1.00)  fsdp: tokens per CPU second to the trainer loop's" in said.err


def test_a_benchmark_that_fails_ends_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run", lambda *_: (3, ""))
    assert compare.main([]) == 3
