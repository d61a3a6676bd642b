"""Three people on a bare machine, without an account: `make night` types what they did.

``people/`` has a script of each, in which a line ends with its exit code and what it has to print.
"""

import os
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import pytest
from PIL import Image

from tests.conftest import ROOT, copy_project
from tests.rehearsal.conftest import served
from training.data.catalog import MIRROR_VARIABLE

pytestmark = [pytest.mark.night, pytest.mark.timeout(3600)]
#: Of this machine; its own settings of packages and certificates count, and no others.
KEPT: Final = re.compile(r"PATH|LANG|TORCH_INDEX|(PIP|UV|SSL|NODE|NPM)_\w+")
#: Each of them, and the folder of the lines; the second one looks at runs of the first.
PEOPLE: Final = {"student": ".", "engineer": "examples/ddp", "platform": "."}


class Shell:
    """A bare machine with a checkout, on which lines are typed."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self._home = folder / "checkout", folder / "home"
        copy_project(self.checkout)
        for number in range(6):
            picture = self._home / "pictures" / f"kind-{number % 2}" / f"{number}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (90, 80), (40 * number, 90, 200)).save(picture)
        self.environment = {name: os.environ[name] for name in os.environ if KEPT.fullmatch(name)}
        path = f"{self.checkout}/.venv/bin:{os.environ['PATH']}"
        self.environment |= {"HOME": str(self._home), "PATH": path, "OMP_NUM_THREADS": "1"}

    def types(self, line: str, *, code: int = 0, folder: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.checkout / folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}"
        return done.stdout

    def types_what_is_next(self, printed: str, folder: str) -> None:
        """Type each command that a run has printed, with pictures of one's own."""
        printed = printed.replace("PICTURE", f"{self._home}/pictures/kind-0/0.png")
        use, _, after = printed.partition("Use this model:\n")[2].partition("\n\nNext:")
        commands, _, python = use.partition("# in Python:\n")
        own = re.findall(r"(?m)^ +(\.venv/bin/.*)DIR$", after)
        assert ("Next:" in printed, "Use this model:" in printed) == (bool(own), bool(commands))
        own = [f"{each}{self._home}/pictures" for each in own]
        for line in [*commands.splitlines(), *own]:
            self.types_what_is_next(self.types(line, folder=folder), folder)
        (self._home / "use.py").write_text(python)
        self.types(f"python {self._home}/use.py", folder=folder)
        for path in re.findall(r"(?m)^  \w.*? (\S+\.(?:html|md))$", after):
            assert (self.checkout / path).is_file()


def test_each_line_of_three_people_ends_and_prints_as_then(tmp_path: Path) -> None:
    shell, data = Shell(tmp_path), ROOT.parent / "shared" / "data"
    here = served(data) if data.is_dir() else nullcontext("")  # from its publisher
    with here as shell.environment[MIRROR_VARIABLE]:
        for person, folder in PEOPLE.items():
            script = (ROOT / "tests" / "people" / person).read_text()
            for command, code, words in re.findall(r"(?m)^(\w.*)  # (\d+): (.*)$", script):
                printed = shell.types(command, code=int(code), folder=folder)
                assert words in printed, command
                shell.types_what_is_next(printed, folder)
