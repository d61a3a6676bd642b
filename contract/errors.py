"""User-facing errors, as opposed to bugs and infrastructure failures."""

from contract import exits


class ReportedError(Exception):
    """An error whose message tells a user all that there is: commands print it, and no traceback,
    and end with its exit code."""

    exit_code: int = exits.FAILED
    then: str = ""
    """Next step for the user, if the message does not name it."""


class InputError(ReportedError, ValueError):
    """Something the user gave is wrong; the message says what, and what to do about it."""

    exit_code = exits.BAD_INPUT


class UnreachableError(ReportedError):
    """S3 or another service does not answer, or a disk is full: another attempt may help."""

    exit_code = exits.STORAGE
    then = "; check the address, or try again later"


class AdvisedError(UnreachableError):
    """The same, with a message that already tells what to do about it."""

    then = ""
