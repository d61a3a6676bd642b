"""Doctor's checks before the first deploy: ``python -m trainctl.commands.first_deploy ARGUMENTS``.

``make deploy`` runs it with the arguments that the CDK is given. Once TrainingStack is there,
nothing is checked; see ``trainctl doctor`` for that.
"""

import argparse
import sys
from collections.abc import Sequence

from contract import exits, faults
from trainctl import checkout_settings, output
from trainctl.aws.errors import explained
from trainctl.commands import doctor
from trainctl.options import Where


@faults.command(say=output.say, explain=explained)
def main(argv: Sequence[str] | None = None) -> int:
    """Check; return 1, with the commands that fix it, if the deploy would fail."""
    parser = argparse.ArgumentParser(prog="trainctl.commands.first_deploy", allow_abbrev=False)
    parser.add_argument("-c", "--context", action="append", default=[])
    parser.add_argument("--profile")
    options, _of_the_cdk_only = parser.parse_known_args(argv)
    # Here, because the CDK adds a line of its own to an error.
    given = checkout_settings.given_settings(options.context)
    planned = checkout_settings.read(checkout_settings.project(), given)

    # Where the CDK deploys to, whatever the profile says.
    found = planned.settings
    where = Where(
        profile=options.profile, region=found.region or None, deployment=found.deployment or None
    )
    made = doctor.look(given, where, only_first_deploy=True)
    problems = [check for check in made if check.state == "bad" and check.what != "stacks"]
    for check in problems:
        output.say(f"{check.what}: {check.found}")
        if check.fix:
            output.say(f"  {check.fix}")
    if not problems:
        return exits.OK
    output.say(
        "Nothing was deployed: fix this first, or deploy without these checks: "
        "make deploy SKIP_DOCTOR=1"
    )
    return exits.FAILED


if __name__ == "__main__":
    sys.exit(main())
