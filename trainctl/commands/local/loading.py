"""The rehearsal, loaded only when a ``trainctl local`` command runs: no other command needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from trainctl.errors import CliError


def load_cycle() -> ModuleType:
    """``rehearsal.cycle``. Raises CliError where it is not installed."""
    try:
        from rehearsal import cycle
    except ModuleNotFoundError as error:
        raise CliError(
            f"trainctl local needs the rehearsal, and Python finds no module {error.name!r}: run "
            "make local in a checkout of this project"
        ) from None
    return cycle


@contextmanager
def errors() -> Iterator[None]:
    """The rehearsal's own errors as those of a command."""
    cycle = load_cycle()
    try:
        yield
    except cycle.ERRORS as error:
        raise CliError(str(error)) from None
