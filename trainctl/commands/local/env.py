"""``trainctl local env``: the variables that send AWS clients there."""

import shlex

from trainctl.commands.local import loading


def env() -> None:
    """Print the variables that send AWS clients to the local deployment, for eval."""
    with loading.errors():
        variables = loading.load_cycle().Rehearsal.here().environment()
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
