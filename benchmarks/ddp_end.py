"""Whether ``examples/ddp`` ends every time, as it is and without its release of DDP.

    python -m benchmarks.ddp_end [--starts 1000] [--json]

Both are started in turn, with two ranks and few steps. DDP that outlives its process group can
deadlock: a start whose ranks use next to nothing of the processors for a minute is killed and
counted. Linux only.
"""

import argparse
import multiprocessing
import os
import re
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.output import report, say

_EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "ddp" / "train.py"
_RELEASE: Final = re.compile(r"^    del model, .*\n", re.MULTILINE)
_IDLE_S: Final = 60.0
#: Processor time of ranks that work. Those that hang wake up from time to time: gloo's threads use
#: half a second in a minute.
_WORKS_TICKS: Final = os.sysconf("SC_CLK_TCK")
#: A rank of a fork server that has imported torch starts in a fraction of a second.
_FORKS: Final = multiprocessing.get_context("forkserver")


def train(script: str, rank: int, port: int) -> None:
    """Run the example as one of two ranks, in a folder of this start."""
    os.chdir(Path(script).parent)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = ["train.py", "--steps", "20"]
    runpy.run_path(script, run_name="__main__")


def ticks(pid: int | None) -> int:
    """Processor time that a process has used, in clock ticks; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[11]) + int(fields[12])


def start(source: str, folder: Path) -> bool:
    """Start a program with two ranks.

    Returns:
        Whether both have ended, and without an error.
    """
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(source)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [_FORKS.Process(target=train, args=(str(script), rank, port)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    used, changed_at = 0, time.monotonic()
    while any(each.is_alive() for each in ranks) and time.monotonic() - changed_at < _IDLE_S:
        ranks[0].join(0.2)
        ranks[1].join(0.2)
        now_used = sum(ticks(each.pid) for each in ranks)
        if now_used - used >= _WORKS_TICKS:
            used, changed_at = now_used, time.monotonic()
    has_ended = all(each.exitcode == 0 for each in ranks)
    for each in ranks:
        each.kill()
        each.join()
    shutil.rmtree(folder)
    return has_ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp_end", description=__doc__)
    parser.add_argument("--starts", type=int, default=1000, help="of each kind (default: 1000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)

    example = _EXAMPLE.read_text()
    without, num_removed = _RELEASE.subn("", example)
    assert num_removed == 1, "the example does not release DDP in one line"
    programs = {"as it is": example, "without the release": without}
    hung = dict.fromkeys(programs, 0)
    _FORKS.set_forkserver_preload(["torch.distributed", "torch._dynamo", "sklearn.datasets"])
    with tempfile.TemporaryDirectory(prefix="ddp-end-") as folder:
        for number in range(options.starts):
            for name, source in programs.items():
                if not start(source, Path(folder) / "start"):
                    hung[name] += 1
                    say(f"start {number + 1}, {name}: hung or failed, {hung[name]} in all")
            if (number + 1) % 50 == 0:
                say(f"{number + 1} of {options.starts} starts: {hung}")
    result = {
        "benchmark": "ddp_end",
        "ratio": 1.0 - hung["as it is"] / max(options.starts, 1),
        "starts": options.starts,
        "hung": hung,
    }
    report(result, as_json=options.json)
    return 1 if hung["as it is"] else 0


if __name__ == "__main__":
    sys.exit(main())
