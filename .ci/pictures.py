"""Draw docs/images from today's code: ``make pictures``.

``demo.svg`` shows what ``make demo`` prints and ``report.svg`` the figures of its report: draw them
on an idle machine. A test compares those of ``DRAWN`` with the settings of the default preset.
Another command's output becomes a picture by ``python .ci/pictures.py NAME COMMAND ...``:
``job.svg`` is that of a ``trainctl submit --follow`` on the local AWS.
"""

import html
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Final

from rich.console import Console
from rich.text import Text

from contract.instance_types import InstanceType, Prices
from stacks import settings
from training.record import plots
from training.record.reader import read_run

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
#: Pictures with prices and sizes that follow from the settings: what one types, and what is wired.
DRAWN: Final = ("architecture", "deployment")
RUN: Final = ROOT / "runs" / "demo"
#: Left, top, width and height of the report's figures in its picture.
PLACES: Final = ((20, 50, 980, 320), (20, 420, 468, 280), (532, 420, 468, 280))


def of_the_settings(name: str) -> str:
    """A picture of ``DRAWN`` with the machines of the default preset and their list prices."""
    given = settings.load(json.loads((ROOT / "cdk.json").read_text())["context"])
    values = asdict(given) | {"market": "spot" if given.spot else "on demand"}
    values |= _machine("head", given.head) | _machine("worker", given.worker)
    prices = Prices.of(region="us-east-1", head=given.head, worker=given.worker, spot=given.spot)
    values |= {
        "nodes": given.max_workers,
        "nat": f"{prices.standing_usd_per_hour:.2f}",
        "job": f"{prices.usd_per_hour(given.max_workers):.2f}",
    }
    return Template((ROOT / ".ci" / f"{name}.svg").read_text()).substitute(values)


def _machine(name: str, machine: InstanceType) -> dict[str, str]:
    memory, shm = machine.container_memory_mib / 1024, machine.shm_mib / 1024
    return {
        name: machine.name,
        f"{name}_disk": f"{machine.root_volume_gib} GiB, {machine.root_volume_mibps} MiB/s",
        f"{name}_task": f"GPUs: {machine.num_gpus}; {machine.container_cpu / 1024:.1f} CPUs, "
        f"{memory:.1f} GiB",
        f"{name}_shm": f"{shm:.1f} GiB",
    }


def report(run: Path) -> str:
    """Loss, measure and step times of a run, as its report has them."""
    with plots.drawing():
        drawn = plots.draw(read_run(run))
        placed = [
            f'<text x="{x}" y="{y - 12}">{html.escape(plot.title)}</text>'
            f'<svg x="{x}" y="{y}" width="{width}" height="{height}" '
            + plot.svg.removeprefix("<svg ")
            for plot, (x, y, width, height) in zip((*drawn[:2], drawn[-1]), PLACES, strict=True)
        ]
    light, dark = (
        "".join(f"--{name}:{pair[theme]};" for name, pair in plots.COLORS.items())
        for theme in (0, 1)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 1020 720"><style>svg{{{light}font:600 15px sans-serif;fill:var(--ink)}}'
        f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
        f'<rect width="100%" height="100%" fill="var(--surface)"/>{"".join(placed)}</svg>\n'
    )


def terminal(name: str, command: list[str]) -> None:
    """Draw what a command prints where no one can be asked, as on a terminal."""
    shown = subprocess.run(
        command,
        cwd=ROOT,
        # Inside `make pictures`, another make would print its folder.
        env={key: value for key, value in os.environ.items() if "MAKE" not in key},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    # Without rich's fonts, which a page would fetch from elsewhere.
    drawn = console.export_svg(title=" ".join(command), unique_id=name)
    without_fonts = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    IMAGES.joinpath(f"{name}.svg").write_text(without_fonts)


def main(arguments: list[str]) -> None:
    """Draw one command's output, or all the pictures that need no AWS."""
    if arguments:
        terminal(arguments[0], arguments[1:])
        return
    for name in DRAWN:
        IMAGES.joinpath(f"{name}.svg").write_text(of_the_settings(name))
    terminal("demo", ["make", "demo"])
    IMAGES.joinpath("report.svg").write_text(report(RUN))


if __name__ == "__main__":
    main(sys.argv[1:])
