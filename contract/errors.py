"""Errors for users, apart from faults of the program and of what it runs on."""

import errno
import os

from contract import exits


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, and what to do about it.

    The command line prints only the message and exits with ``exits.BAD_INPUT``. Every other
    exception is a fault of the program or the machine and keeps its traceback.
    """


class UnreachableError(Exception):
    """S3 or another service does not answer, or a disk is full: another attempt may help.

    Commands print only the message and exit with ``exits.STORAGE``.
    """


class AdvisedError(UnreachableError):
    """The same, with a message that already tells what to do about it."""


def is_full(error: BaseException) -> bool:
    """True if a disk or a quota is full; uv and ``copytree`` report it in words only."""
    said = str(error)
    return any(os.strerror(number) in said for number in (errno.ENOSPC, errno.EDQUOT))


def exit_code(error: BaseException) -> int:
    """Exit code of a command that ended with an error."""
    if isinstance(error, UnreachableError) or is_full(error):
        return exits.STORAGE
    return exits.BAD_INPUT if isinstance(error, InputError) else exits.FAILED
