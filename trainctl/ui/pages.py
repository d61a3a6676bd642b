"""Pages of ``trainctl ui``: a list of jobs, a job with its run's curves, its log, its report, and
runs on one chart.

All pages that are open share what AWS has answered: it is asked once every few seconds. Jinja
escapes every string, and shows control characters instead of sending them.
"""

import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from contract.runs import REPORT_FILE
from contract.text import dollars
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError, explained
from trainctl.aws.jobs import JobExecution
from trainctl.runs.curves import Chart, Curve, LiveRecord, compared
from trainctl.watch import job_log, polling
from trainctl.watch.overview import COLUMNS, NODES, Row, View, rows_of
from training.record import style

_HERE: Final = Path(__file__).parent
_OF_REPORT: Final = Path(style.__file__).parent
#: Jobs of the list, the newest ones.
_JOBS: Final = 300
#: Last lines of a job's log on its page, and on the log's own.
_LINES: Final = 12
_LOG_LINES: Final = 2000
#: Runs on one chart: more lines cannot be told apart.
_COMPARED: Final = 7
_FILES: Final = {"ui.css": "text/css", "ui.js": "text/javascript"}


class Page(NamedTuple):
    """An answer to a browser."""

    content: bytes
    type: str = "text/html"
    is_foreign: bool = False
    """True if any job may have written it."""


class Card(NamedTuple):
    """A part of a page: a table, a curve or a text."""

    title: str
    rows: Iterable[Sequence[object]] = ()
    heads: Sequence[str] = ()
    text: str = ""
    chart: Chart | None = None
    place: str = "all wide"
    """Classes of the style sheet."""


class Pages:
    """The pages of a deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._every_s = polling.LOCAL_S if deployment.is_local else polling.SHORTEST_S
        # Clients of boto3 are made one at a time, too.
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, dict[str, object]]] = {}
        self._ended: dict[str, Row] = {}
        self._records: dict[str, LiveRecord] = {}

    def page(self, path: str, root: str, *, runs: str = "") -> Page:
        """The page at an address below ``root``, which ends in a slash.

        Args:
            runs: those to compare, with commas.
        """
        kind, _, name = path.partition("/")
        content: dict[str, object] = {"title": "Error"}
        try:
            if kind == "report":
                return self._report(name)
            if kind in _FILES:
                text = (_HERE / kind).read_text("utf-8")
                own = style.css() if kind == "ui.css" else ""
                return Page((own + text).encode(), type=_FILES[kind])
            content = self._recent(kind, name or runs)
        except Exception as error:  # the page shows it
            content["text"] = explained(error)
        page = _template().render(root=root, **content)
        return Page(page.encode("utf-8", "replace"))

    def _list(self, _name: str) -> dict[str, object]:
        from markupsafe import Markup

        jobs = self._deployment.jobs
        names = jobs.newest_ids(limit=_JOBS)
        # Those that have ended, and whose cost is known, stay as they are.
        fresh = [jobs.find(name) for name in names if name not in self._ended]
        rows = self._ended | {row.job.id: row for row in rows_of(self._deployment, fresh)}
        self._ended = {
            name: row for name, row in rows.items() if row.job.is_over and row.usd is not None
        }
        since = datetime.now(tz=UTC) - timedelta(days=1)
        order = sorted((rows[name] for name in names), key=_turn)
        turns = [_turn(row) for row in order]
        usd = sum(row.usd or 0 for row in order if row.job.began > since)
        head = Markup('<a href="?by={0}">{0}</a>')
        # What orders rows by age, and what compares their runs.
        link = Markup('<a href="jobs/{}" data-run="{}" data-began="{}">{}</a>')
        state = Markup('<span class="status {}">{}</span>')
        cells = [
            [
                link.format(quote(job.id, safe=""), job.run, job.began.timestamp(), _shown(job.id)),
                state.format("open" if row.place else _mark(job), _shown(row.state)),
                *row.cells[2:],
            ]
            for row in order
            for job in [row.job]
        ]
        return {
            "title": "Jobs",
            "state": f"{turns.count(0)} running, {turns.count(1)} queued, {dollars(usd)} in 24 h",
            "text": f"the newest {len(names)} in {self._deployment.account_id}, "
            f"{self._deployment.region}",
            "search": ("q", "Filter: failed anna"),
            "cards": [
                Card(
                    "",
                    cells,
                    [head.format(each) for each in COLUMNS],
                    place="all jobs",
                )
            ],
        }

    def _job(self, name: str) -> dict[str, object]:
        from markupsafe import Markup

        job = self._deployment.jobs.find(name)
        view = View(self._deployment, job, lines=_LINES)
        words: dict[str, object] = {**view.words()}
        if view.result:
            link = Markup('<a href="../report/{}">open</a>')
            words["report"] = link.format(quote(job.run))
        link = Markup('<a href="../log/{}">Last lines</a>')
        lines = "\n".join(map(job_log.text, view.lines))
        last = Card(link.format(quote(job.id, safe="")), text=lines or "none yet")
        cards = [] if self._deployment.is_here else [last]
        if view.trials.rows:
            cards.append(Card("Trials", view.trials.cells, view.trials.columns))
        cards += _charts(self._curves(job.run) if job.run else ())
        if view.use:
            cards.append(Card("Use this model", text="\n".join(view.use)))
        cards.append(Card("Job", words.items()))
        if not self._deployment.is_here:
            cards.append(Card("Nodes", view.node_cells(), NODES))
        return {
            "title": job.id,
            "state": view.state,
            "mark": _mark(job),
            "text": view.words()["state"].removeprefix(view.state),
            "facts": words,
            "is_over": job.is_over,
            "cards": cards,
            "commands": self._commands(job),
        }

    def _commands(self, job: JobExecution) -> list[str]:
        """Commands about a job."""
        name = shlex.quote(job.id)
        commands = [f"logs {name} --follow", f"top {name}", f"shell {name}", f"stop {name}"]
        if self._deployment.is_here:
            commands = [f"top {name} --runs {shlex.quote(self._deployment.region)}"]
        elif job.is_over:
            commands = [f"logs {name}", *([f"download {shlex.quote(job.run)}"] if job.run else [])]
        return [output.addressed(f"trainctl {each}") for each in commands]

    def _log(self, name: str) -> dict[str, object]:
        """The last lines of a job, with a search."""
        job = self._deployment.jobs.find(name)
        log, tasks = job_log.JobLog(self._deployment.logs), self._deployment.jobs.all_nodes(job)
        lines = [job_log.text(line) for line in log.last(job, tasks, _LOG_LINES)] if tasks else []
        return {
            "title": job.id,
            "text": f"the last {len(lines)} lines",
            "search": ("find", "Search these lines"),
            "is_over": job.is_over,
            "cards": [Card("", enumerate(lines, 1), ("", ""), place="all wide lines")],
        }

    def _compare(self, runs: str) -> dict[str, object]:
        """Curves of several runs, a figure on one chart."""
        names = [*dict.fromkeys(filter(None, runs.split(",")))][:_COMPARED]
        curves = {name: self._curves(name) for name in names}
        return {
            "title": "Compared",
            "text": ", ".join(names),
            "cards": _charts(compared(curves)),
        }

    def _curves(self, run: str) -> Sequence[Curve]:
        self._deployment.bucket.run(run)  # checks the name
        record = LiveRecord(self._deployment.bucket, run)
        return self._records.setdefault(run, record).curves()

    def report(self, run: str) -> bytes | None:
        """The report that a recipe has written, or the curves of a run so far, such as a program's
        scalars, as a page that needs nothing else; None where there are none."""
        content = self._deployment.bucket.read_of_run(run, REPORT_FILE)
        if content is None and (curves := self._curves(run)):
            page = _template().render(
                title=run,
                text="What it has recorded so far",
                cards=_charts(curves),
                style=style.css() + (_HERE / "ui.css").read_text("utf-8"),
            )
            content = page.encode("utf-8", "replace")
        return content

    def _report(self, run: str) -> Page:
        with self._lock:
            content = self.report(run)
        if content is None:
            raise UsageError(f"run {run!r} has no report: a recipe writes one when it ends")
        return Page(content, is_foreign=True)

    def _recent(self, kind: str, name: str) -> dict[str, object]:
        """Content of a page, a few seconds old at most."""
        pages = {"jobs": self._job, "log": self._log, "compare": self._compare}
        key = f"{kind}/{name}"
        with self._lock:
            now = time.monotonic()
            oldest = now - self._every_s
            self._kept = {key: each for key, each in self._kept.items() if each[0] > oldest}
            if key not in self._kept:
                self._kept[key] = (now, pages.get(kind, self._list)(name))
            return self._kept[key][1]


def _charts(curves: Iterable[Curve]) -> list[Card]:
    return [Card(curve.title, chart=curve.chart(), place="") for curve in curves]


def _turn(row: Row) -> int:
    """Which rows come first: those that run, those that wait, those that have ended."""
    return 2 if row.job.is_over else int(row.place is not None)


def _mark(job: JobExecution) -> str:
    """Class of its state."""
    return "good" if not job.is_over or job.outcome.brief == "succeeded" else "bad"


def _shown(value: object) -> object:
    """A string of others without control characters; Jinja escapes it."""
    return output.visible(value) if type(value) is str else value


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader

    folders = FileSystemLoader([_HERE, _OF_REPORT])
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=folders, finalize=_shown, **options).get_template("ui.html.j2")
