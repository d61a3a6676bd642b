"""Shell in the place of a job's program: its folder, its variables and packages.

    python -m containers.program.start.shell [COMMAND ...]

``trainctl shell JOB`` runs this in a node's container. The place is noted when the program starts,
and stays after its end.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from containers.host import machine
from contract import faults
from contract.errors import InputError
from contract.nodes import ENV_ERRORS, ENV_WATCH

PLACE: Final = Path(tempfile.gettempdir()) / "train-shell.json"
#: What runs in a shell neither counts as the program's steps nor explains its end.
_NOT_ITS_OWN: Final = (ENV_ERRORS, ENV_WATCH)
#: Variable of a shell and of what is run there, while which no program is ended for its silence.
_MARK: Final = ("TRAIN_SHELL", "1")


def is_open() -> bool:
    """True while a person has a shell on this node; ECS ends one that is idle for 20 minutes."""
    return bool(machine.marked(*_MARK))


def note(folder: Path, environment: Mapping[str, str], *, place: Path = PLACE) -> None:
    """Note where a program runs."""
    kept = {name: value for name, value in environment.items() if name not in _NOT_ITS_OWN}
    new = place.with_name(f"{place.name}.{os.getpid()}")
    new.touch(mode=0o600)  # variables may be confidential
    new.write_text(json.dumps([str(folder), kept]))
    new.replace(place)


@faults.command()
def main(words: Sequence[str], *, place: Path = PLACE) -> int:
    """Become the command, or a shell, in the place of the program."""
    words = [*words] or ["bash"]
    try:
        folder, variables = json.loads(place.read_text())
        os.chdir(folder)
        os.environ.update(variables)
    except (OSError, ValueError):
        print("no program of the job has begun on this node", file=sys.stderr)
    os.environ.update([_MARK])
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise InputError(f"{words[0]} cannot be run: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
