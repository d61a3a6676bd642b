"""The first hour of docs/tutorials on a local AWS: ``make rehearse``, and tests in containers.

``rehearsal.cycle`` deploys the stacks and pushes the images. Then the lines of the page run as they
are printed there, the stacks are destroyed, and nothing may be left in the account.
"""

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

from contract import exits
from contract.errors import ReportedError
from rehearsal import children
from rehearsal.children import Steps, interruptible
from rehearsal.cycle import Rehearsal, RehearsalError, bring_up, take_away
from rehearsal.local_aws import ROOT
from training.data import catalog, download

DATA: Final = "fashion-mnist"
PUT: Final = f"trainctl data put {DATA}"
SUBMIT: Final = (
    f"trainctl submit ddp --nodes 2 --run first --preset tuned --data {DATA} --max-hours 1 --follow"
)
LOGS: Final = "trainctl logs first --follow"
STOP: Final = "trainctl stop first"
#: Lines of the tutorials in the order of reading, and the options added to each: yes where no one
#: can be asked, and one thread for each of the nodes that share this machine. An epoch takes
#: minutes here, so the job is stopped long before its end.
FIRST: Final[Mapping[str, str]] = {
    "trainctl doctor": "",
    PUT: "",
    SUBMIT: "--yes --env OMP_NUM_THREADS=1",
    "trainctl ls": "",
    "trainctl show first": "",
    LOGS: "",
    STOP: "--yes",
    "trainctl cost first": "",
    "trainctl report first": "--no-browser",
    "trainctl data ls": "",
    "trainctl runs": "",
}
OWN: Final = "trainctl submit --code . --nodes 2 --run mine -- torchrun train.py"
#: The same, in the folder of a program.
OWN_CODE: Final[Mapping[str, str]] = {
    OWN: "--yes --follow --env OMP_NUM_THREADS=1",
    "trainctl show mine": "",
    "trainctl logs mine --node 1": "",
    "trainctl download mine": "",
}
PROGRAM: Final = ROOT / "examples" / "hf_trainer"
#: Lines that end so print until the job has ended, and the lines after them run meanwhile.
FOLLOW: Final = " --follow"
#: Of a job that has ended, no container may be left after this long.
GONE_WITHIN_S: Final = 30
_TIMEOUT_S: Final = 600


def rehearse() -> dict[str, object]:
    """Deploy, run the lines, destroy; return the figures. After a failure or Ctrl-C in the lines,
    nothing of it is left."""
    rehearsal = Rehearsal.here()
    began = time.monotonic()
    first = first_lines()
    steps = Steps(6 + len(first) + len(OWN_CODE))
    with interruptible(), tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        if rehearsal.is_up():
            # What an earlier one has left, should it have been killed.
            take_away(rehearsal)
        bring_up(rehearsal, steps)
        try:
            run_lines(rehearsal, steps, first, folder=Path(folder))
            program = Path(folder, "program")
            program.mkdir()
            program.joinpath("train.py").write_text(PROGRAM.joinpath("train.py").read_text())
            run_lines(rehearsal, steps, OWN_CODE, folder=program)
            rehearsal.undeploy(steps)
        except BaseException:
            take_away(rehearsal, keep_logs=True)
            raise
        take_away(rehearsal)
    return {"seconds": round(time.monotonic() - began), "steps_s": steps.seconds}


def first_lines() -> Mapping[str, str]:
    """``FIRST``; where FashionMNIST cannot be fetched, with the digits that every image has."""
    published = catalog.find(DATA)
    assert published is not None
    try:
        with Steps(1).step(f"download {DATA}"):
            download.published(published)
    except ReportedError as error:
        print(f"{error}\nscikit-learn's digits take the place of {DATA}", file=sys.stderr)
    else:
        return FIRST
    digits = SUBMIT.replace(f"--preset tuned --data {DATA}", "--preset digits --epochs 1000")
    lines = {digits if line == SUBMIT else line: added for line, added in FIRST.items()}
    del lines[PUT]
    return lines


class Shell(Protocol):
    """Where ``run_lines`` runs."""

    log: Path

    def shell(self) -> dict[str, str]:
        """Environment of the commands."""

    def running(self) -> Sequence[object]:
        """Nodes of jobs."""


def run_lines(
    rehearsal: Shell,
    steps: Steps,
    lines: Mapping[str, str],
    *,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    silent_s: float = _TIMEOUT_S,
    gone_within_s: float = GONE_WITHIN_S,
) -> dict[str, str]:
    """Run commands of ``trainctl`` one after the other, as in a shell; return what each printed.

    Args:
        lines: command -> options to add.
        folder: working directory of all of them.
        variables: of the environment, in addition.

    Raises:
        CommandError: a line failed.
        RehearsalError: a job has not ended as it should, or has left nodes.
    """
    shell = {**rehearsal.shell(), **(variables or {})}
    shown: dict[str, str] = {}
    following: dict[str, subprocess.Popen[str]] = {}
    with ExitStack() as at_the_end:
        for line, added in lines.items():
            with steps.step(line):
                words = _words(line, added)
                if line.endswith(FOLLOW):
                    process = children.open_group(words, environment=shell, folder=folder)
                    following[line] = process
                    at_the_end.callback(_end, process)
                    shown[line] = _read_until_it_trains(line, process)
                    continue
                shown[line] = children.run(
                    words,
                    environment=shell,
                    folder=folder,
                    log=rehearsal.log,
                    silent_s=silent_s,
                    streams_together=True,
                )
                if line == STOP:
                    for name, process in following.items():
                        shown[name] += process.communicate(timeout=_TIMEOUT_S)[0]
                        if process.returncode != exits.TERMINATED:
                            raise RehearsalError(f"{name} ended otherwise:\n{shown[name]}")
    deadline = time.monotonic() + gone_within_s
    while rehearsal.running():
        if time.monotonic() > deadline:
            raise RehearsalError(f"a job has left nodes {gone_within_s:.0f} s after its end")
        time.sleep(1)
    return shown


def _words(line: str, added: str) -> list[str]:
    """A line as a command, with options before the command of a job."""
    own, dashes, program = line.partition(" -- ")
    _trainctl, *words = shlex.split(f"{own} {added}{dashes}{program}")
    return [sys.executable, "-m", "trainctl", *words]


def _read_until_it_trains(line: str, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    printed = ""
    for text in process.stdout:
        printed += text
        children.heard[0] = text.strip()
        if "training: " in text:
            return printed
    raise RehearsalError(f"{line} ended before it trained:\n{printed}")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        children.end_group(process)
        process.communicate()
