"""``trainctl report``: fetch a run's report and open it."""

import html
import webbrowser
from pathlib import Path
from typing import Annotated, Final

import typer

from contract.runs import RESULT_FILE, check_run_name, run_prefix
from trainctl import output
from trainctl.aws.errors import CliError, UsageError
from trainctl.options import Browser, RunName, WhereOrHere
from trainctl.runs.run_list import files_of
from trainctl.ui.pages import Pages

#: Any job may have written a run's report: scripts, forms and requests of it do not work in here.
#: Ours has no scripts.
_FRAME: Final = """\
<!doctype html><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{run}</title>
<iframe sandbox style="position: fixed; inset: 0; width: 100%; height: 100%; border: 0"
 srcdoc="{page}"></iframe>
"""


def report(
    *,
    run: RunName,
    to: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="File here.",
            metavar="FILE",
            show_default="RUN-report.html",
        ),
    ] = "",
    browser: Browser = True,
    where: WhereOrHere,
) -> None:
    """Fetch a run's report and open it.

    A page that needs nothing else: it can be sent to others. An earlier one is replaced.
    """
    check_run_name(run)
    file = Path(to or f"{run}-report.html")
    if file.is_dir():
        raise UsageError(f"--output {to} is a folder: give the name of a file")
    deployment = where.find()
    page = Pages(deployment).report(run)
    if page is None:
        files = files_of(deployment.bucket, run)
        if f"{run_prefix(run)}{RESULT_FILE}" in {each.key for each in files}:
            raise CliError(
                f"run {run} has a result and no report: trainctl logs {run} shows the reason"
            )
        raise CliError(
            f"run {run} has no report: a recipe writes one when it ends, and of a program it has "
            f"the scalars for TensorBoard. trainctl show {run} tells how far it is; trainctl "
            f"download {run} fetches the files of your own program"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        shown = html.escape(page.decode(errors="replace"))
        file.write_text(_FRAME.format(run=run, page=shown), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror or error}. Give another --output"
        ) from None
    output.print_text(str(file))
    if browser:
        webbrowser.open(file.resolve().as_uri())
