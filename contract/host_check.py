"""Check of a host after a failure: the request and the answer, two files on that node.

What restarts the work asks every node. The first process of each container, which knows what its
host should have, checks it and answers; a node whose host is not fit leaves by itself.
"""

import os
import time
from pathlib import Path
from typing import Final

from contract.nodes import ENV_HOST_CHECK
from contract.times import HOST_CHECK_S

_POLL_S: Final = 0.1


def ask(within_s: float = HOST_CHECK_S) -> list[str]:
    """Have this node's host checked; return its faults, one line each.

    Empty where the host is fit, where no container checks it (a laptop), and where the answer does
    not come in time: the node still leaves when its check finds a fault later.
    """
    path = os.environ.get(ENV_HOST_CHECK)
    if not path:
        return []
    request, answer = Path(path), _answer_to(Path(path))
    answer.unlink(missing_ok=True)
    request.touch()
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if answer.exists():
            return answer.read_text().splitlines()
        time.sleep(_POLL_S)
    return []


def answer(request: Path, faults: list[str]) -> None:
    """Answer a request."""
    request.unlink(missing_ok=True)
    new = request.with_suffix(".new")
    new.write_text("\n".join(faults))
    new.replace(_answer_to(request))


def _answer_to(request: Path) -> Path:
    return request.with_suffix(".answer")
