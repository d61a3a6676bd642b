"""The table of the posts' figures shows what the files hold, and takes what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks import on_gpu, posts
from tests.conftest import ROOT


def test_the_page_has_the_table_that_the_program_prints() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    _, _, rest = page.partition("test_posts.py -->\n")
    assert rest.partition("<!-- end of posts -->")[0] == posts.table()
    assert {*posts.STEPS} < {step.name for step in on_gpu.STEPS}


def test_what_has_been_measured_is_written_and_kept_where_a_later_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(step: str, **found: object) -> None:
        text = f"$ words\nprogress\n{json.dumps(found, indent=1)}\na warning\n"
        (tmp_path / f"{step}.txt").write_text(text)

    monkeypatch.setattr(posts, "FIGURES", tmp_path)
    (tmp_path / "summary.json").write_text('{"gpus": ["NVIDIA H100"]}')
    fashion = {"images_per_s": 6000.0, "world_size": 2, "total_seconds": 100.0}
    case = {"tokens_per_s": 9000.0, "peak_memory_bytes": 100 * 2**30, "failure": ""}
    printed("fashion", **fashion, accuracy=0.92, loss=0.2)
    printed("dolly", cases=[{"recipe": case}])
    printed("resnet50", runs=[{"model": "resnet50", "images_per_s": 3000.0}])
    (tmp_path / "b7.txt").write_text("Traceback")
    posts.take(tmp_path)
    printed("dolly", cases=[{"recipe": case | {"failure": "out of memory"}}])
    posts.take(tmp_path)
    file = json.loads((tmp_path / "1-x-nvidia-h100.json").read_text())
    values = {key: each["value"] for key, each in file["figures"].items()}
    assert values == {
        "fashion_epoch_s": 10.0,
        "fashion_images_per_s": 3000.0,
        "fashion_total_s": 100.0,
        "fashion_accuracy": 0.92,
        "fashion_loss": 0.2,
        "dolly_tokens_per_s": 9000.0,
        "dolly_gib": 100.0,
        "resnet50_images_per_s": 3000.0,
    }
    assert {*values} <= {*posts.ROWS}
    assert all(each["how"] == "measured" for each in file["figures"].values())
