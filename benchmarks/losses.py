"""Losses of the sharded recipe beside an independent plain loop, for each family of models: writes
the table of docs/benchmarks.md.

    python -m benchmarks.losses [FAMILY …]

Needs the tests' tiny models, and a quarter of an hour for all. With families it only shows theirs.
"""

import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Final

from benchmarks.tables import say
from tests.published import losses

PAGE: Final = Path(__file__).parents[1] / "docs/benchmarks.md"


def main(asked: list[str]) -> int:
    found = []
    for kind, rope in losses.NAMES:
        if not asked or kind in asked:
            with tempfile.TemporaryDirectory() as folder:
                each = losses.measure(kind, rope, Path(folder))
            found.append((each.packs, rope, kind, each))
            say(f"{kind} {each}{' differs' * (not each.is_right)}")
    lines = ["| families | packed | rope | fp32 | bf16 / two seeds |", f"|{' --- |' * 5}"]
    for (packs, rope), group in groupby(
        sorted(found, key=lambda row: row[:3]), lambda row: row[:2]
    ):
        rows = [*group]
        fp32 = max(each.fp32 for *_, each in rows)
        bf16 = max(each.bf16 / each.seeds for *_, each in rows)
        way = f"{'yes' if packs else 'no'} | {rope or 'plain'}"
        lines.append(f"| {len(rows)} | {way} | {fp32:.0e} | {bf16:.2f} |")
    table = "\n".join(["", *lines, "", ""])
    say(table)
    if not asked:
        between = re.compile(r"(?<=<!-- losses -->\n).*?(?=<!-- end of losses -->)", re.DOTALL)
        PAGE.write_text(between.sub(lambda _: table, PAGE.read_text("utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
