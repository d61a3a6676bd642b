"""Draw docs/images from today's code: ``make pictures``.

``demo.svg`` shows what ``make demo`` prints and ``report.svg`` the figures of its report: draw them
on an idle machine. A test compares those of ``DRAWN`` with the settings of the default preset.
``dashboard.svg`` is what CloudWatch would draw of made-up metrics, ``ui.png`` and ``ui-job.png``
are pages of made-up jobs in chromium; ``make pictures`` needs no AWS.
``job.svg`` is a ``trainctl submit --follow`` in the tests' model of AWS. Another command's output
becomes a picture by ``python .ci/pictures.py NAME COMMAND ...``.
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
from contract.nodes import METRICS_NAMESPACE
from stacks import settings
from training.record import plots, style
from training.record.reader import read_metrics

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
#: Pictures with prices and sizes that follow from the settings: what one types, and what is wired.
DRAWN: Final = ("architecture", "deployment")
RUN: Final = ROOT / "runs" / "demo"
#: Of the lines of a graph on the dashboard.
LINES: Final = ("blue", "orange", "sky", "umber")
#: What lets rich print colors, and no line that moves.
COLORED: Final = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "TERM": "xterm-256color"}
#: Left, top, width and height of the report's figures in its picture.
PLACES: Final = ((20, 50, 980, 320), (20, 420, 468, 280), (532, 420, 468, 280))


def of_the_settings(name: str) -> str:
    """A picture of ``DRAWN`` with the machines of the default preset and their list prices."""
    given = settings.load(json.loads((ROOT / "cdk.json").read_text())["context"])
    values = asdict(given) | {"market": "spot" if given.spot else "on demand"}
    values |= _machine("head", given.head) | _machine("worker", given.worker)
    prices = Prices.of(region="us-east-1", head=given.head, worker=given.worker, spot=given.spot)
    hourly = prices.usd_per_hour(given.max_workers) or 0.0
    values |= {
        "nodes": given.max_workers,
        "nat": f"{prices.standing_usd_per_hour:.2f}",
        "job": f"{hourly:.2f}",
        "run": f"{round(hourly / 6, 1):.2f}",  # ten minutes
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
        drawn = plots.draw(read_metrics(str(run)))
        placed = [
            f'<text x="{x}" y="{y - 12}">{html.escape(plot.title)}</text>'
            f'<svg x="{x}" y="{y}" width="{width}" height="{height}" '
            + plot.svg.removeprefix("<svg ")
            for plot, (x, y, width, height) in zip(drawn, PLACES, strict=True)
        ]
    return themed("".join(placed), "0 0 1020 720")


def themed(body: str, box: str) -> str:
    """A picture of a page's shapes: light or dark as the reader's system is."""
    light, dark = (
        "".join(f"--{name}:{pair[theme]};" for name, pair in style.COLORS.items())
        for theme in (0, 1)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box}"><style>svg{{{light}font:600 15px sans-serif;fill:var(--ink)}}'
        f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
        f'<rect width="100%" height="100%" fill="var(--surface)"/>{body}</svg>\n'
    )


def dashboard() -> str:
    """The GPU graphs of preset fsdp on made-up metrics of two hosts, in shapes instead of fonts."""
    import matplotlib
    from matplotlib.figure import Figure

    # The CDK takes seconds to load, and no other picture needs it.
    from stacks.cluster.host_setup import agent_config
    from tests.stacks import cloudwatch
    from tests.stacks.conftest import synthesized

    body = cloudwatch.dashboard(synthesized((("preset", "fsdp"),)), cloudwatch.HOSTS[0])
    config = agent_config(has_gpus=True, metrics=METRICS_NAMESPACE)
    metrics = cloudwatch.training_hour(config)
    with plots.drawing(), matplotlib.rc_context({"svg.fonttype": "path", "font.size": 10}):
        figure = Figure(figsize=(1000 / 72, 860 / 72), dpi=72, layout="constrained")
        figure.suptitle("Made-up metrics: two hosts with four GPUs train for an hour")
        for widget, axes in zip(body["widgets"], figure.subplots(3, 2).flat, strict=False):
            shown = widget["properties"]
            scale = shown["yAxis"]["left"]
            axes.set_prop_cycle(color=[plots.light(color) for color in LINES])
            for asked in shown["metrics"]:
                for label, samples in cloudwatch.lines(asked, metrics).items():
                    minutes = [second / 60 for second in samples]
                    axes.plot(minutes, [*samples.values()], label=label)
            axes.set(title=shown["title"], ylabel=scale["label"], xlim=(0, 60))
            axes.set_ylim(0, scale.get("max"))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
        titles = "; ".join(each.get_title() for each in figure.axes)
        return plots.svg("dashboard", f"CloudWatch dashboard, made-up metrics: {titles}", figure)


def pages() -> None:
    """Pages of ``trainctl ui`` on made-up jobs, in a browser."""
    from tests.trainctl import browser, test_ui
    from tests.trainctl.account import Account

    account = Account()
    test_ui.many(account, 14, running=3, queued=2)
    test_ui.record(account, "resnet-296", epochs=9)
    with test_ui.serving(account) as served, browser.browser() as window:
        window.shows(1000, 620)
        for name, path in (("ui", ""), ("ui-job", "jobs/resnet-296-lusab-babad")):
            window.go(f"{served.server.url}{path}")
            IMAGES.joinpath(f"{name}.png").write_bytes(window.picture())


def terminal(name: str, command: list[str], *, title: str = "") -> None:
    """Draw what a command prints where no one can be asked, as on a terminal.

    Args:
        title: the command that a person types, if that is another one.
    """
    shown = subprocess.run(
        command,
        cwd=ROOT,
        # Inside `make pictures`, another make would print its folder.
        env={key: value for key, value in os.environ.items() if "MAKE" not in key} | COLORED,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    # Without rich's fonts, which a page would fetch from elsewhere.
    drawn = console.export_svg(title=title or " ".join(command), unique_id=name)
    without_fonts = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    IMAGES.joinpath(f"{name}.svg").write_text(without_fonts)


def main(arguments: list[str]) -> None:
    """Draw one command's output, or all the pictures that need no AWS."""
    if arguments:
        terminal(arguments[0], arguments[1:])
        return
    for name in DRAWN:
        IMAGES.joinpath(f"{name}.svg").write_text(of_the_settings(name))
    IMAGES.joinpath("dashboard.svg").write_text(themed(dashboard(), "0 0 1000 860"))
    pages()
    terminal("demo", ["make", "demo"])
    job = "trainctl submit ddp --run digits --preset digits --epochs 3 --nodes 2 --max-hours 1"
    terminal("job", [sys.executable, "-m", "tests.trainctl.followed"], title=f"{job} --follow")
    IMAGES.joinpath("report.svg").write_text(report(RUN))


if __name__ == "__main__":
    main(sys.argv[1:])
