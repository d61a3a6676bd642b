"""The table of the posts' figures shows what the files hold, and takes what was measured."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import on_gpu, posts
from tests.conftest import ROOT
from trainctl.__main__ import main as trainctl
from training import plan


def test_the_page_has_the_table_that_the_program_prints() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    _, _, rest = page.partition("test_posts.py -->\n")
    assert rest.partition("<!-- end of posts -->")[0] == posts.table()
    assert {*posts.STEPS} < {step.name for step in on_gpu.STEPS}


def test_the_second_posts_figures_are_those_that_the_commands_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(command: Callable[[list[str]], int], words: str) -> Any:
        assert command([*words.split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    job = "plan fsdp --preset dolly --data tiny-shakespeare -c preset=fsdp"
    planned = printed(trainctl, job)
    an_hour = planned["usd_per_hour"]
    steps_s = 3600 * planned["usd_expected"] / an_hour
    per_s = printed(plan.main, "fsdp --preset dolly --workers 8")["tokens_per_s"]

    pages = {
        name: " ".join((ROOT / name).read_text().split())
        for name in ("README.md", "docs/tutorials/fine-tune.md", "docs/fsdp.md")
    }
    _, _, arithmetic = pages["docs/fsdp.md"].partition("lower limits:")
    parts, _, _ = arithmetic.partition("**with the steps**")
    others_s, gateway_usd = sum(map(int, re.findall(r"\| (\d+) s", parts))), 0.62
    assert f"${gateway_usd} for the gateway" in parts

    def both(tokens_s: float) -> tuple[str, str]:
        """The steps, and a first run, in seconds and dollars."""
        whole_s = tokens_s + others_s
        whole_usd = an_hour * whole_s / 3600 + gateway_usd
        return (
            f"{tokens_s:.0f} s and ${an_hour * tokens_s / 3600:.2f}",
            f"{whole_s:.0f} s, ${whole_usd:.2f}",
        )

    # All that the recipe packs.
    steps, first = both(steps_s)
    assert f"{steps}, steps only" in pages["docs/fsdp.md"]
    assert f"**{first}**" in pages["docs/fsdp.md"]
    in_words = first.replace(" s,", " seconds and")
    assert in_words in pages["README.md"]
    assert in_words in pages["docs/tutorials/fine-tune.md"]
    assert f"{steps_s:.0f} seconds of them in steps" in pages["README.md"]

    # As much as the post's job learns.
    steps, first = both(posts.TOKENS / per_s)
    figures = json.loads((posts.FIGURES / "hosts-of-the-posts.json").read_text())["figures"]
    seconds, usd = figures["dolly_epoch_s"], figures["dolly_usd"]
    assert steps == f"{seconds['value']} s and ${usd['value']}"
    assert first == f"{seconds['note'].split()[2]} s, ${usd['note'].split()[2]}"
    assert f"learns {posts.TOKENS:,} tokens, {steps}" in pages["docs/fsdp.md"]
    assert figures["dolly_tokens_per_s"]["value"] == round(per_s)
    assert f"**{per_s:,.0f} tokens/s" in pages["docs/fsdp.md"]


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
    printed("resnet50", images_per_s=6000.0, world_size=2)
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
