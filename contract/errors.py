"""Mistakes of users, as against faults of the program."""


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, and what to do about it.

    The command line prints only the message and exits with ``exits.BAD_INPUT``. Every other
    exception is a fault of the program or the machine and keeps its traceback.
    """
