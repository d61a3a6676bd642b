"""The command line of a deployment, and the same from Python: ``from trainctl import submit, Job``.

``trainctl.__main__`` is where the command line begins, ``trainctl.api`` has what Python gets. It is
imported when it is asked for: ``trainctl --help`` has no use for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainctl.api import CliError, Job, UsageError, plan, submit

__all__ = ["CliError", "Job", "UsageError", "plan", "submit"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainctl import api

    return getattr(api, name)
