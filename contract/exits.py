"""Exit codes of the commands and containers of this project."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Final

# Codes of ``python -m training.launch``.
OK: Final = 0
FAILED: Final = 1  # something broke that the user could not have typed differently
BAD_INPUT: Final = 2  # a wrong option, bad data, a loss that is not a number
INTERRUPTED: Final = 130  # Ctrl-C; the run resumes when its command is given again
TERMINATED: Final = 143  # SIGTERM; the same

# Further codes of a node's container.
NO_HEAD: Final = 3  # the head did not answer in time, or was lost
REFUSED: Final = 4  # the head does not accept this node's token
BAD_HOST: Final = 76  # the host's GPUs or EFA are not as they should be; no command's code

# Further codes of a job's head; otherwise it returns its command's.
FILES_LOST: Final = 74  # the program succeeded, and not all of its last files were saved
NO_CAPACITY: Final = 75  # the workers that it needs at least did not come in time
RAY_FAILED: Final = 77  # Ray did not start on a node, or ended by itself on the head
ASKS_TOO_MUCH: Final = 78  # the program asks Ray for more than the job can ever have
STORAGE: Final = 79  # S3 does not answer, or a disk is full; ``python -m training.launch`` too
HUNG: Final = 80  # the program has given no sign of life for too long
DEADLINE: Final = 124  # it was ended at its deadline; timeout(1) has the same
#: A program that ends with one of these has failed: its code would be taken for the system's.
OF_THE_SYSTEM: Final = (
    FILES_LOST,
    BAD_HOST,
    NO_CAPACITY,
    RAY_FAILED,
    ASKS_TOO_MUCH,
    STORAGE,
    HUNG,
    DEADLINE,
    INTERRUPTED,
    TERMINATED,
)
#: Codes after which the head is started again. The hosts of its workers stay for the next one.
TRIED_AGAIN: Final = (BAD_HOST, RAY_FAILED, STORAGE)
#: Codes after which the hosts of a job are not held: it has not failed, or not by its command.
NOT_HELD: Final = (OK, INTERRUPTED, TERMINATED, NO_CAPACITY, DEADLINE, *TRIED_AGAIN)
KILLED: Final = 137  # SIGKILL, by hand or out of memory; a shell reports the same
CLOSED_PIPE: Final = 141  # reader closed the pipe (``| head``); same code as SIGPIPE


@contextlib.contextmanager
def on_closed_pipe() -> Iterator[None]:
    """End the command quietly if stdout is a pipe whose reader has ended, and with a sentence if a
    disk is full. Only for what is printed: a socket may break as well."""
    try:
        try:
            yield
        finally:
            if sys.stdout:  # None if the command was started without one (>&-)
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise SystemExit(CLOSED_PIPE) from None
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(FAILED) from None
