"""Questions about a program that only its environment can answer, asked on a job's head before a
worker node is requested.

The head has the code and its packages by then. A shell gives the words of the command their values,
the launcher's own parser reads them, and Python looks for the modules. Only a certain answer ends
the job; a question without an answer is left to the nodes.
"""

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from containers.host.machine import say
from containers.program.start.ask import MARK
from containers.program.start.code import PACKAGES
from containers.program.start.on_node import (
    NodePlace,
    accelerate_config,
    base_environment,
    launcher_environment,
)
from contract import command
from contract.errors import InputError
from contract.nodes import Range
from contract.text import listed

#: For all questions together: more would delay the start of a job that is right.
_ANSWERS_S: Final = 60.0
_ASK: Final = Path(__file__).with_name("ask.py")
#: Modules that only a CUDA build of torch brings along (``Requires-Dist`` of its wheels); the head
#: has the CPU's.
_OF_CUDA: Final = {"triton", "nvidia", "cuda", "pynvml"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Questions about the program of one job."""

    words: Sequence[str]
    """The program's command."""
    work: Path
    """Folder with its code."""
    variables: Mapping[str, str]
    """Variables of the job, with the paths of its packages."""
    nodes: Range
    """Number of nodes that start it."""
    gpus: int
    """GPUs of each node."""
    python: Path = PACKAGES / "bin" / "python"
    """Python of the job's packages."""

    def check(self) -> None:
        """Fail if the program certainly cannot run on the nodes of its job.

        Raises:
            InputError: it cannot; the message has the reason.
        """
        until = time.monotonic() + _ANSWERS_S
        with tempfile.TemporaryDirectory(prefix="questions-") as home:
            refusals = []
            for number in sorted({self.nodes.low, self.nodes.high} - {0}):
                shell = _Shell(self.work, self._environment(Path(home), number), until)
                try:
                    self._refuse(shell, number)
                    return
                except InputError as error:
                    refusals.append(error)
                except Exception as error:  # a question without an answer ends no job
                    say(f"WARNING: not known if the program can start: {error}")
                    return
        if refusals:  # with any number of nodes
            raise refusals[-1]

    def _environment(self, home: Path, number: int) -> dict[str, str]:
        """Environment of the last of a number of nodes."""
        place = NodePlace(
            number=number - 1,
            rank=number - 1,
            start=0,
            addresses=tuple(f"192.0.2.{i}" for i in range(number)),  # of no host
            gpus=self.gpus,
            most=self.nodes.high,
        )
        config = home / "accelerate" / "default_config.yaml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(accelerate_config(place), encoding="utf-8")
        return {
            **base_environment(os.environ),
            **launcher_environment(place),
            "HOME": str(home),
            "HF_HOME": str(home),
            **self.variables,
            "BASH_ENV": "",
        }

    def _refuse(self, shell: "_Shell", number: int) -> None:
        first = self.words[0]
        of_driver = self.gpus and first.startswith("nvidia-")  # which the head may lack
        if not of_driver and not shell.answer(
            f"type -P {shlex.quote(first)} >/dev/null && echo '{MARK}'"
        ):
            raise InputError(
                f"{first} cannot be run: neither the images nor the job's packages have a program "
                "of this name"
            )
        paths = filter(Path.is_file, self.work.rglob("*"))
        files = {path.relative_to(self.work).as_posix(): path for path in paths}
        commands = [*command.read(self.words, files)]
        for each in filter(lambda each: each.is_certain, commands):
            # One that names its rank may be meant to run on each node by itself.
            is_own = "--standalone" in each.words and "RANK" in " ".join(each.raw)
            if each.launcher in ("torchrun", "accelerate", "composer") and not is_own:
                asked = self._asked(each.launcher, str(number), str(self.gpus), *each.arguments)
                if found := shell.answer("\n".join([*each.assignments, asked])):
                    raise InputError(f"{each.launcher}: {found[0]}")
        # Of what runs without a shell: a script may prepare more.
        program = commands[0].program
        if program.startswith("-m "):
            found = shell.answer(self._asked("module", shlex.quote(program.removeprefix("-m "))))
            self._refuse_imports("the command", found)
        elif program.endswith(".py") and (self.work / program).is_file():
            found = shell.answer(self._asked("imports", shlex.quote(program)))
            self._refuse_imports(program, found)

    def _refuse_imports(self, program: str, found: Sequence[str]) -> None:
        missing = [name for name in found if not (self.gpus and name in _OF_CUDA)]
        if missing and " " in missing[0]:
            raise InputError(missing[0])
        if missing:
            raise InputError(
                f"{program} needs {listed(missing)}, which neither the images nor the job's list "
                "of packages have: add the package to the list"
            )

    def _asked(self, *words: str) -> str:
        """Text for a shell: a question to the program's own Python."""
        return " ".join([shlex.quote(str(self.python)), "-I", shlex.quote(str(_ASK)), *words])


@dataclass(frozen=True, slots=True)
class _Shell:
    """Shell in the place of a program."""

    folder: Path
    environment: Mapping[str, str]
    until: float
    """End of the time for answers, by the monotonic clock."""

    def answer(self, text: str) -> list[str]:
        """Lines that a text prints; none if it fails.

        Raises:
            OSError, SubprocessError: no shell, or no time is left.
        """
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(0.1, self.until - time.monotonic()),
            check=False,
        )
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
