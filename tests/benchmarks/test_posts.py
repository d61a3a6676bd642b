"""The pages have the figures that commands print, of the second post and of the benchmarks."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import ROOT
from trainctl.__main__ import main as trainctl
from training import plan


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

    def first(tokens_s: float) -> str:
        """A first run, in seconds and dollars."""
        whole_s = tokens_s + others_s
        return f"{whole_s:.0f} s, ${an_hour * whole_s / 3600 + gateway_usd:.2f}"

    assert f"**{first(steps_s)}**" in pages["docs/fsdp.md"]
    assert f"**{per_s:,.0f} tokens/s" in pages["docs/fsdp.md"]
    in_words = first(steps_s).replace(" s,", " seconds and")
    assert in_words in pages["README.md"]
    assert in_words in pages["docs/tutorials/fine-tune.md"]


_TABLE = re.compile(r"<!-- benchmarks/results/(\w+)\.json -->\n\n((?:\|.*\n)+)")


def values(found: Any) -> Iterator[float]:
    """All numbers of a JSON value."""
    if isinstance(found, dict | list):
        for each in found.values() if isinstance(found, dict) else found:
            yield from values(each)
    elif isinstance(found, int | float):
        yield found


def test_tables_have_the_figures_and_the_dates_of_the_files_that_they_name() -> None:
    tables = _TABLE.findall((ROOT / "docs/benchmarks.md").read_text())
    files = (ROOT / "benchmarks/results").iterdir()
    assert sorted(name for name, _ in tables) == sorted(each.stem for each in files)
    ratios = {}
    for name, table in tables:
        found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        machine, ratios[name] = found["environment"], found["ratio"]
        assert machine["command"].startswith(f"-m benchmarks.{name}")
        header, _, *rows = table.splitlines()
        assert machine["started_at"][:10] in header, name
        for cell in (cell for row in rows for cell in row.split("|")[2:]):
            for printed in re.findall(r"\d[\d,.]*", cell):
                digits = len(printed.partition(".")[2])
                assert printed in {f"{each:,.{digits}f}" for each in values(found)}, (name, cell)
    readme = (ROOT / "README.md").read_text()
    assert f"| {ratios['ddp']:.2f} times the images per CPU second" in readme
    assert f"| {1 / ratios['checkpoint']:.1f} of torch's `async_save` |" in readme
