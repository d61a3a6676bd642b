"""Pages of ``trainctl ui``: a list of jobs, a job with its run's curves, and its report.

All pages that are open share what AWS has answered: it is asked once every few seconds. Jinja
escapes every string, and shows control characters instead of sending them.
"""

import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from contract.runs import REPORT_FILE
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError, explained
from trainctl.aws.jobs import JobExecution
from trainctl.runs.curves import Curve, LiveRecord
from trainctl.watch import job_log, polling
from trainctl.watch.overview import COLUMNS, NODES, Row, View, rows_of
from training.record import style

_HERE: Final = Path(__file__).parent
_OF_REPORT: Final = Path(style.__file__).parent
#: Jobs of the list, the newest ones.
_JOBS: Final = 300
#: Last lines of a job's log on its page.
_LINES: Final = 30
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
    curve: Curve | None = None
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

    def page(self, path: str, root: str) -> Page:
        """The page at an address below ``root``, which ends in a slash."""
        kind, _, name = path.partition("/")
        content: dict[str, object] = {"title": "Error"}
        try:
            if kind == "report":
                return self._report(name)
            if kind in _FILES:
                text = (_HERE / kind).read_text("utf-8")
                own = style.css() if kind == "ui.css" else ""
                return Page((own + text).encode(), type=_FILES[kind])
            content = self._recent(name)
        except Exception as error:  # the page shows it
            content["text"] = explained(error)
        page = _template().render(root=root, **content)
        return Page(page.encode("utf-8", "replace"))

    def _list(self) -> dict[str, object]:
        from markupsafe import Markup

        jobs = self._deployment.jobs
        names = jobs.newest_ids(limit=_JOBS)
        # Those that have ended, and whose cost is known, stay as they are.
        fresh = [jobs.find(name) for name in names if name not in self._ended]
        rows = self._ended | {row.job.id: row for row in rows_of(self._deployment, fresh)}
        self._ended = {
            name: row for name, row in rows.items() if row.job.is_over and row.usd is not None
        }
        link = Markup('<a href="jobs/{}">{}</a>')
        cells = [
            [link.format(quote(name, safe=""), _shown(name)), *rows[name].cells[1:]]
            for name in names
        ]
        states = {row.state.partition(" (")[0] for row in rows.values()}
        return {
            "title": "Jobs",
            "state": f"{len(names)} newest",
            "text": f"in {self._deployment.account_id}, {self._deployment.region}",
            "words": sorted({*states, *(row.who for row in rows.values())}),
            "cards": [Card("", cells, COLUMNS, place="all jobs")],
        }

    def _job(self, name: str) -> dict[str, object]:
        from markupsafe import Markup

        job = self._deployment.jobs.find(name)
        view = View(self._deployment, job, lines=_LINES)
        words: dict[str, object] = {**view.words()}
        cards = []
        if job.run:
            record = LiveRecord(self._deployment.bucket, job.run)
            record = self._records.setdefault(job.run, record)
            cards = [Card(curve.title, curve=curve, place="") for curve in record.curves()]
        if view.result:
            link = Markup('<a href="../report/{}">open</a>')
            words["report"] = link.format(quote(job.run))
        if view.trials.rows:
            cards.append(Card("Trials", view.trials.cells, view.trials.columns))
        lines = "\n".join(map(job_log.text, view.lines))
        if view.use:
            cards.append(Card("Use this model", text="\n".join(view.use)))
        cards.append(Card("Job", words.items()))
        if not self._deployment.is_here:
            cards.append(Card("Nodes", view.node_cells(), NODES))
            cards.append(Card("Last lines", text=lines or "none yet"))
        return {
            "title": job.id,
            "state": view.state,
            "text": view.words()["state"].removeprefix(view.state),
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

    def _report(self, run: str) -> Page:
        with self._lock:
            content = self._deployment.bucket.read_of_run(run, REPORT_FILE)
        if content is None:
            raise UsageError(f"run {run!r} has no report: a recipe writes one when it ends")
        return Page(content, is_foreign=True)

    def _recent(self, name: str) -> dict[str, object]:
        """Content of a job's page, or of the list, a few seconds old at most."""
        with self._lock:
            now = time.monotonic()
            oldest = now - self._every_s
            self._kept = {key: each for key, each in self._kept.items() if each[0] > oldest}
            if name not in self._kept:
                self._kept[name] = (now, self._job(name) if name else self._list())
            return self._kept[name][1]


def _shown(value: object) -> object:
    """A string of others without control characters; Jinja escapes it."""
    return output.visible(value) if type(value) is str else value


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader

    folders = FileSystemLoader([_HERE, _OF_REPORT])
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=folders, finalize=_shown, **options).get_template("ui.html.j2")
