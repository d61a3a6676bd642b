"""Scalars of the event files of TensorBoard that a program writes, as the record of its run.

The image's TensorBoard reads them, so that no laptop has to: what is new every half minute, and
once more at the program's end.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from containers.host.machine import in_background
from containers.program.files.s3_files import ERRORS, open_bucket
from contract import times
from contract.runs import CONFIG_FILE, METRICS_FILE
from training.record.events import Evaluation, to_json

#: The last round may take so long: a node that goes has little more.
_LAST_S: Final = 5.0
#: Points of a curve, a sample of all; of all curves.
_POINTS: Final = 300
_MOST_POINTS: Final = 30_000
#: Beyond this, as of pictures, reading would take minutes of a processor.
_MOST_BYTES: Final = 2**28


def start(folder: Path, record: str, say: Callable[[str], None]) -> Callable[[], None]:
    """Start to write the scalars of a program's event files into its run's record.

    Args:
        folder: in which the program writes.
        record: address of the run's folder; empty: nothing is read.
        say: shows a warning.

    Returns:
        A function that reads what was written last, and ends it.
    """
    is_over = threading.Event()

    def hear(line: logging.LogRecord) -> bool:
        # Until the end, half a record is one that is being written.
        if is_over.is_set() and "Truncated" in line.msg:
            say(f"warning: TensorBoard: {line.getMessage()}")
        return False

    def read() -> None:
        if not record:
            return
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

        logger = logging.getLogger("tensorboard")
        logger.setLevel(logging.DEBUG)
        logger.addFilter(hear)
        events, has_ended = EventMultiplexer(size_guidance={"scalars": _POINTS}), False
        while not has_ended:
            has_ended = is_over.wait(times.FILES_EVERY_S)
            with contextlib.suppress(*ERRORS):  # such as a folder that is gone: tried again
                files = [*folder.rglob("*tfevents*")]
                if files and sum(each.stat().st_size for each in files) < _MOST_BYTES:
                    events.AddRunsFromDirectory(str(folder))
                    events.Reload()
                    content = "".join(islice(_lines(events), _MOST_POINTS))
                    bucket = open_bucket(record)
                    if bucket.get(CONFIG_FILE) is None:  # a recipe keeps its record itself
                        bucket.put(METRICS_FILE, content.encode())
        logger.removeFilter(hear)

    reader = in_background(read)

    def end() -> None:
        is_over.set()
        reader.join(_LAST_S)

    return end


def _lines(events: Any) -> Iterator[str]:
    """Lines of ``metrics.jsonl``, from TensorBoard's multiplexer."""
    for run, tags in sorted(events.Runs().items()):
        for tag in tags["scalars"]:
            whose = run.partition("/")[2]  # of the program's folders, below its own or the output
            # A program that has resumed writes steps again.
            values = {each.step: each.value for each in events.Scalars(run, tag)}
            for step, value in sorted(values.items()):
                found = Evaluation(step=step, epoch=0.0, measures={f"{tag} {whose}": value})
                yield f"{json.dumps(to_json(found))}\n"
