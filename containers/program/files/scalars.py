"""Scalars of the event files of TensorBoard that a program writes, as the record of its run.

The image's TensorBoard reads them, so that no laptop has to: what is new every half minute, and
once more at the program's end.
"""

import contextlib
import json
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from containers.host.machine import in_background
from containers.program.files.s3_files import ERRORS
from contract import times
from contract.runs import CONFIG_FILE, METRICS_FILE
from store.bucket import Bucket
from training.record.events import Evaluation, to_json

#: The last round may take so long: a node that goes has little more.
_LAST_S: Final = 5.0
#: Points of a curve, a sample of all; curves, which are an eighth of a page each.
_POINTS: Final = 300
_MOST_CURVES: Final = 100
#: Beyond this, as of pictures, reading would take minutes of a processor.
_MOST_BYTES: Final = 2**28


def start(folder: Path, record: Bucket | None, say: Callable[[str], None]) -> Callable[[], None]:
    """Start to write the scalars of a program's event files into its run's record.

    Args:
        folder: in which the program writes.
        record: the run's folder; None: nothing is read.
        say: shows a warning.

    Returns:
        A function that reads what was written last, and ends it.
    """
    is_over = threading.Event()
    warned = set[str]()

    def warn(kind: str, text: str) -> None:
        if kind not in warned:
            warned.add(kind)
            say(f"warning: TensorBoard: {text}")

    def hear(line: logging.LogRecord) -> bool:
        # Until the end, half a record is one that is being written.
        if is_over.is_set() and "Truncated" in line.msg:
            warn(line.msg, line.getMessage())
        return False

    def sizes() -> Iterator[tuple[Path, int]]:
        for file in sorted(folder.rglob("*tfevents*")):
            try:
                str(file).encode()  # TensorBoard's paths are UTF-8
                yield file, file.stat().st_size
            except (OSError, UnicodeEncodeError) as error:
                warn("skipped", f"{str(file)!a} is skipped: {error!r}")

    def read() -> None:
        events: Any = None
        has_ended = False
        while record and not has_ended:
            has_ended = is_over.wait(times.FILES_EVERY_S)
            with contextlib.suppress(*ERRORS):  # such as a folder that is gone: tried again
                files = dict(sizes())
                if sum(files.values()) > _MOST_BYTES:
                    warn("size", f"files of {_MOST_BYTES >> 20} MiB or more are not read")
                elif files:
                    events = events or _multiplexer(hear)
                    for file in files:
                        events.AddRun(str(file), file.relative_to(folder).as_posix())
                    events.Reload()
                    curves = _curves(events)
                    if left_out := [*curves][_MOST_CURVES:]:
                        warn("curves", f"{len(left_out):,} of {len(curves):,} curves are left out")
                        curves = {each: curves[each] for each in [*curves][:_MOST_CURVES]}
                    if record.get(CONFIG_FILE) is None:  # a recipe keeps its record itself
                        record.put(METRICS_FILE, "".join(_lines(curves)).encode())
        logging.getLogger("tensorboard").removeFilter(hear)

    reader = in_background(read)

    def end() -> None:
        is_over.set()
        reader.join(_LAST_S)

    return end


def _multiplexer(hear: Callable[[logging.LogRecord], bool]) -> Any:
    """TensorBoard's reader of event files, whose log goes to ``hear``."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    logger = logging.getLogger("tensorboard")
    logger.setLevel(logging.DEBUG)
    logger.addFilter(hear)
    return EventMultiplexer(size_guidance={"scalars": _POINTS})


def _curves(events: Any) -> dict[str, dict[int, float]]:
    """Values of each scalar by their steps, from TensorBoard's multiplexer."""
    found = defaultdict[str, dict[int, float]](dict)
    for file, tags in sorted(events.Runs().items()):
        # The program's folders, below its own or the output.
        whose = "/".join(Path(file).parts[1:-1])
        for tag in tags["scalars"]:
            # A program that has resumed writes steps again, in a later file or the same one.
            values = {each.step: each.value for each in events.Scalars(file, tag)}
            found[f"{tag} {whose}"] |= values
    return found


def _lines(curves: dict[str, dict[int, float]]) -> Iterator[str]:
    """Lines of ``metrics.jsonl``."""
    for name, values in curves.items():
        every = math.ceil(len(values) / _POINTS)
        for step, value in sorted(values.items(), reverse=True)[::every][::-1]:
            found = Evaluation(step=step, epoch=0.0, measures={name: value})
            yield f"{json.dumps(to_json(found))}\n"
