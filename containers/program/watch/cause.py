"""Cause of a program's failure in one line: the first uncaught exception on any of its nodes.

Each Python of a program notes such an exception in a file (``startup/sitecustomize.py``). Where
none did, because it was killed or has its own hook, the last traceback in the log is used.
``cause`` compares what all nodes have found.
"""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from containers.program.watch.ends import SUFFIX
from contract import exits

#: Texts of errors that a process has only because another one has ended.
_FELT: Final = re.compile(
    r"[Cc]onnection|DistBackendError|DistNetworkError|DistStoreError|ChildFailedError|"
    r"CalledProcessError|ProcessExitedException|SignalException|Gloo|gloo|NCCL"
)
#: Lines of a traceback in a log: the first one, a frame and the last one.
_BEGIN: Final = "Traceback (most recent call last)"
_FRAME: Final = re.compile(r'  File "(.+)", line (\d+)')
_END: Final = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")
#: Prefixes that torchrun and other launchers put before the lines of processes.
_PREFIX: Final = re.compile(r"^(\[[\w ]+\]:\s?)+")
#: Last words of a program without a traceback: argparse's, click's, fire's, a recipe's.
_SAID: Final = re.compile(r"(?:error|Error|ERROR): |[\w./-]+: error: ")
#: Lines of torchrun's own. After the one about a process that has failed, all are.
_LAUNCHER: Final = re.compile(r"[EWI]\d{4} .*torch/distributed/elastic/")
_LONGEST: Final = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """An exception that nothing in its process has caught, or what else is known of an end."""

    line: str
    """Its type, the first line of its text, and where in the program it was raised."""
    at: float = 0.0
    """Unix time."""
    node: int | None = None
    """Number of the node; None on the head."""
    rank: str = ""
    """Rank of the process; empty where it has none."""
    attempt: str = ""
    """Number of restarts by torchrun until then; empty in a process of no torchrun."""

    @property
    def distance(self) -> int:
        """Distance from the cause: 0 for an error, 1 for what a launcher reports of its process's
        end, 2 for what a process has only because another one has ended."""
        return 2 if _FELT.search(self.line) else int(self.line.startswith("exit code"))

    def reason(self, run: str, status: str = "failed") -> str:
        """The reason of a job that it has ended, with the command that shows more."""
        places = [
            *([] if self.node is None else [f"node {self.node}"]),
            *([f"rank {self.rank}"] if self.rank else []),
        ]
        where = f" on {', '.join(places)}" if places else ""
        option = "" if self.node is None else f" --node {self.node}"
        return f"{status}{where}: {self.line}; trainctl logs {run}{option}"


def errors_in(folder: Path, node: int | None = None) -> tuple[Error, ...]:
    """Errors that the processes of a program have noted in a folder."""
    found: dict[str, tuple[str, Error]] = {}  # process -> its parent, and its error
    for path in folder.glob("*.json"):
        # Any process of a user's can write there.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            noted = json.loads(path.read_text(encoding="utf-8"))
            error = Error(
                line=str(noted["line"])[:_LONGEST],
                at=float(noted["at"]),
                node=node,
                rank=str(noted["rank"])[:9],
                attempt=str(noted["attempt"])[:9],
            )
            found[path.stem] = str(noted["parent"]), error
    # A program that fails has survived the errors of its child processes, such as a trial import;
    # unless it only tells of their ends.
    return tuple(
        error
        for parent, error in found.values()
        if parent not in found or found[parent][1].distance
    )


class LogEnd:
    """Last line of a log, its last line that says "error", and its last traceback that tells of
    more than another's end."""

    def __init__(self) -> None:
        self.line = self.said = self.error = ""
        self._has_failed = False
        self._place: str | None = None
        """File and line in the traceback that is being read; None outside of one."""

    def hear(self, line: str) -> None:
        """The next line."""
        line = _PREFIX.sub("", line)
        if _LAUNCHER.match(line):
            self._has_failed = self._has_failed or "failed" in line
        elif not self._has_failed:
            self.line = line.strip() or self.line
        if _SAID.match(line):
            self.said = line.removeprefix("error: ")[:_LONGEST]
        if line.startswith(_BEGIN):
            self._place = ""
        elif self._place is None:
            return
        elif frame := _FRAME.match(line):
            if "site-packages" not in frame[1]:
                self._place = f" ({Path(frame[1]).name}:{frame[2]})"
        elif _END.match(line):
            found = Error(line=f"{line[:_LONGEST]}{self._place}")
            self.error = self.error if found.distance else found.line
            self._place = None


def cause(
    errors: Sequence[Error],
    *,
    code: int,
    node: int | None = None,
    log: LogEnd | None = None,
) -> Error:
    """Find why a program failed.

    The error that came first counts. Those that only tell of another's end come last, and of
    processes that torchrun has started again only the last start counts: the ones before were got
    over.

    Args:
        errors: that its processes have noted, on all of its nodes.
        code: exit code of the program on the node on which it ended first.
        node: that node.
        log: of the program there, if it is known.
    """
    last = max((error.attempt for error in errors), default="", key=lambda text: (len(text), text))
    counts = [error for error in errors if error.attempt in ("", last)]
    first = min(counts, key=lambda error: (error.distance, error.at), default=None)
    if log and log.error and (first is None or first.distance):
        return Error(line=log.error, node=node)
    if first and first.distance == 2 and first.node != node:
        first = None  # it was killed, or ended without an exception: its exit code tells more
    first = first or Error(line=f"exit code {code}", node=node)
    if first.distance != 1:
        return first
    if log and log.said and code < exits.INTERRUPTED:
        return replace(first, line=log.said)
    killed = " (killed, perhaps out of memory)" if code == exits.KILLED else ""
    # Such as the text of ``sys.exit(...)``, or a shell's word about a command that it has not.
    after = f" after {log.line[:_LONGEST]!r}" if log and log.line else ""
    return replace(first, line=f"{first.line}{killed}{after}")


def hidden(
    folder: Path, outlived: Mapping[int, Sequence[str]], node: int | None = None
) -> list[str]:
    """Failures inside a command that has ended with 0, a clause each.

    Args:
        folder: with the notes of ``ends.py`` and ``startup/bash_env``.
        outlived: words of what had to be ended with the command, by process id.
    """
    tries: dict[int, tuple[float, str]] = {}  # of the same command, the last one counts
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # as above
            noted, _, code = path.read_bytes().partition(b"\n")
            words, group, at = json.loads(noted)
            end = f"ended with exit code {code[-1]}" if code else "was killed"
            # Of an exception that nothing has caught, more is known.
            is_known = int(path.stem) in outlived or path.with_suffix(".json").exists()
            end = "" if code[-1:] == b"\0" or is_known else f"{_short(words)} {end}"
            tries[group] = max(tries.get(group, (0.0, "")), (at, end))
    found = [line for _, line in sorted(tries.values()) if line]
    found += [f"{_short(words)} still ran and was ended" for words in outlived.values()]
    with contextlib.suppress(OSError):
        found += (folder / "commands").read_text(errors="replace").splitlines()
    where = "" if node is None else f" on node {node}"
    return [line[-_LONGEST:] + where for line in dict.fromkeys(found)]


def _short(words: Sequence[str]) -> str:
    """A command as its user has typed it, as far as that fits into a sentence."""
    return shlex.join([*(os.path.basename(word) for word in words[:2]), *words[2:]])[:80]


#: Begins the reason of a job that has succeeded although an exception was not caught.
PASSED_OVER: Final = "succeeded, with an exception that was not caught"


def success(errors: Sequence[Error], run: str, lack: str) -> str:
    """The reason of a job that has succeeded; "" where its status says it all.

    Args:
        errors: of which the first is named that ended a thread or a process.
        lack: what its files lack, in words.
    """
    passed = [error for error in errors if not error.distance]
    found = min(passed, key=lambda each: each.at).reason(run, PASSED_OVER) if passed else ""
    if not lack:
        return found
    return f"{found}; {lack}" if found else f"succeeded, but {lack}"
