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


def start(folder: Path, record: Bucket, say: Callable[[str], None]) -> Callable[[], None]:
    """Start to write the scalars of a program's event files into its run's record.

    Args:
        folder: in which the program writes.
        record: the run's folder.
        say: shows a warning.

    Returns:
        A function that reads what was written last, and ends it.
    """
    scalars, is_over = _Scalars(folder, record, say), threading.Event()

    def read() -> None:
        logger = logging.getLogger("tensorboard")
        logger.setLevel(logging.DEBUG)
        logger.addFilter(scalars.hear)
        while not scalars.is_last:
            scalars.is_last = is_over.wait(times.FILES_EVERY_S)
            with contextlib.suppress(*ERRORS):  # such as a folder that is gone: tried again
                scalars.read()
        logger.removeFilter(scalars.hear)

    reader = in_background(read)

    def end() -> None:
        is_over.set()
        reader.join(_LAST_S)

    return end


class _Scalars:
    """Scalars of a program's event files, and their record."""

    def __init__(self, folder: Path, record: Bucket, say: Callable[[str], None]) -> None:
        self._folder, self._record, self._say = folder, record, say
        self._readers: dict[Path, Any] = {}
        self._warned = set[str]()
        self.is_last = False
        """True in the last round. Before, half a record is one that is being written."""

    def read(self) -> None:
        """Read what is new in the files, and write the record."""
        size = 0
        for file in sorted(self._folder.rglob("*tfevents*")):
            try:
                size += file.stat().st_size
                if file.is_file() and size < _MOST_BYTES:
                    self._reader(file).Reload()
            except Exception as error:  # any program may have written it, under any name
                self._warn("skipped", f"{str(file)!a} is skipped: {error!r}")
        if size >= _MOST_BYTES:
            self._warn("size", f"no more than {_MOST_BYTES >> 20} MiB are read")

        curves = self._curves()
        names = [*curves][:_MOST_CURVES]
        if num_left := len(curves) - len(names):
            self._warn("curves", f"{num_left:,} of {len(curves):,} curves are left out")
        if names and self._record.get(CONFIG_FILE) is None:  # a recipe keeps its record itself
            lines = (line for name in names for line in _lines(name, curves[name]))
            self._record.put(METRICS_FILE, "".join(lines).encode())

    def _reader(self, file: Path) -> Any:
        if file not in self._readers:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            self._readers[file] = EventAccumulator(str(file), {"scalars": _POINTS})
        return self._readers[file]

    def hear(self, line: logging.LogRecord) -> bool:
        """A line of TensorBoard's log, none of which is shown as it is."""
        if self.is_last and "Truncated" in line.msg:
            self._warn(line.msg, line.getMessage())
        return False

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(f"warning: TensorBoard: {text}")

    def _curves(self) -> dict[str, dict[int, float]]:
        """Values of each scalar by their steps."""
        found = defaultdict[str, dict[int, float]](dict)
        for file, reader in sorted(self._readers.items()):
            # The program's folders, below its own or the output.
            whose = "/".join(file.relative_to(self._folder).parts[1:-1])
            for tag in reader.Tags()["scalars"]:
                # A program that has resumed writes steps again, in a later file or the same one.
                values = {each.step: each.value for each in reader.Scalars(tag)}
                found[f"{tag} {whose}"] |= values
        return found


def _lines(name: str, values: dict[int, float]) -> Iterator[str]:
    """Lines of ``metrics.jsonl`` of a curve: its last value, and evenly spaced ones before."""
    every = math.ceil(len(values) / _POINTS)
    for step, value in sorted(values.items(), reverse=True)[::every][::-1]:
        found = Evaluation(step=step, epoch=0.0, measures={name: value})
        yield f"{json.dumps(to_json(found))}\n"
