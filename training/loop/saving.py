"""Background saves of checkpoints, which survive a storage that fails for a while."""

import threading
from collections.abc import Callable
from typing import Final

from contract import faults
from contract.errors import InputError
from store import storage
from training.record.events import Event, Saved, Saving, Warned

#: So many saves in a row may fail before the run does: what a crash would cost grows with each.
_MOST_FAILED: Final = 3
#: How often a worker that waits for a save reports how many bytes are written.
_REPORT_EVERY_S: Final = 30.0


class Saves:
    """One rank's saves, one at a time. Where they are collective, they fail on every rank or on
    none, so that every rank counts alike."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        *,
        wait_for_record: Callable[[], None] = lambda: None,
        report_every_s: float = _REPORT_EVERY_S,
    ) -> None:
        """
        Args:
            emit: sends an event; called in the thread that calls this object.
            wait_for_record: waits until what was sent is in the run's record, before each save and
                in its thread: a run that loses its head must not resume from a step that its
                record does not have.
            report_every_s: interval between two events while a save is waited for.
        """
        self._emit, self._report_every_s = emit, report_every_s
        self._wait_for_record = wait_for_record
        self._thread: threading.Thread | None = None
        self._step = 0
        self._write: Callable[[], str] | None = None
        self._error: Exception | None = None
        self._num_failed = 0

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, write: Callable[[], str]) -> None:
        """Begin to save, when the save before has ended.

        Args:
            write: does it; raises where that fails.

        Raises:
            Exception: that of an earlier save, as with ``finish``.
        """
        self._wait()
        self._step, self._write = step, write
        self._report()
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def look(self) -> None:
        """Tell of a save that has failed, without waiting for one that has not ended.

        Raises:
            Exception: as with ``finish``.
        """
        if not self.is_saving:
            self._wait()

    def finish(self, *, retry: bool = False) -> None:
        """Wait until nothing is being saved any more.

        Args:
            retry: nothing will be saved after this, so a save that has failed is tried again.

        Raises:
            InputError: the run has been taken over, say: trying again would not help.
            Exception: of a save that failed, when too many have in a row, or with ``retry``.
        """
        self._wait(is_last=retry)
        if retry and self._num_failed and self._write is not None:
            self._num_failed = _MOST_FAILED - 1  # one more failure is raised
            self.start(self._step, self._write)
            self._wait()

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._wait_for_record()
            self._write()
        except Exception as error:  # raised by the caller's thread
            self._error = error

    def _report(self) -> None:
        self._emit(Saving(step=self._step, written=storage.Written.total))

    def _wait(self, *, is_last: bool = False) -> None:
        if self._thread is None:
            return
        while self._thread.is_alive():
            self._thread.join(self._report_every_s)
            if self._thread.is_alive():
                self._report()
        self._thread, error, self._error = None, self._error, None
        if error is None:
            self._num_failed, self._write = 0, None
            self._emit(Saved(step=self._step))
            return
        self._num_failed += 1
        # A disk that is full is so the next moment too.
        is_final = isinstance(error, InputError) or (
            is_last and isinstance(error, storage.FullError)
        )
        if is_final or self._num_failed >= _MOST_FAILED:
            raise error
        then = "it is tried again" if is_last else "training continues, and the next one is tried"
        self._emit(
            Warned(
                message=f"the checkpoint of step {self._step} could not be saved "
                f"({faults.text(error)}): {then}"
            )
        )
