"""Other programs, run so that an interruption leaves none of them behind."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

#: What an interrupted program gets to clean up after itself, before it is killed.
PATIENCE_S: Final = 20


class CommandError(RuntimeError):
    """A program failed; the message has the end of what it printed."""


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path | None = None,
    timeout_s: float | None = None,
    streams_together: bool = False,
) -> str:
    """Run a program to its end and return what it prints on stdout.

    It leads a process group of its own: Ctrl-C reaches only this process, which then ends the
    whole group.

    Args:
        log: receives the command and all that it prints.
        streams_together: return what it prints on stderr, too, in the order of printing.

    Raises:
        CommandError: it failed, or took longer than ``timeout_s``.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if streams_together else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    name = " ".join([Path(command[0]).name, *command[1:4]])
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        raise CommandError(f"{name} took longer than {timeout_s:.0f} s") from None
    except BaseException:
        end_group(process)
        raise
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n{errors or ''}{output}\n")
    if process.returncode:
        said = ((errors or "").strip() or output.strip())[-4000:]
        raise CommandError(f"{name} failed with exit code {process.returncode}:\n{said}")
    return output


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads a group, politely and then not, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=PATIENCE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
