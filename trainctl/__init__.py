"""The command line of a deployment, and the same from Python: ``from trainctl import submit, Job``.

``trainctl.__main__`` is where the command line begins, ``trainctl.api`` has what Python gets. It is
imported when it is asked for: ``trainctl --help`` has no use for it.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainctl.api import CliError, Job, UsageError, plan, submit

__all__ = ["CliError", "Job", "UsageError", "plan", "submit"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainctl import api

    return getattr(api, name)


def _refuse_hidden() -> None:
    """End if a folder of the user's own hides a package that comes with this one.

    A script's folder, and PYTHONPATH, precede installed packages.
    """
    for name in ("contract", "store", "training"):
        spec = find_spec(name)
        found = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        if Path(__file__).parents[1] / name not in found:
            place = found[0] if found else name
            print(
                f"error: {place} hides the package {name!r} that trainctl needs: run Python with "
                "-P, or the command trainctl without PYTHONPATH, or rename that folder",
                file=sys.stderr,
            )
            sys.exit(2)


_refuse_hidden()
