"""The CDK app: settings in, CoreStack and TrainingStack out.

The CDK command line runs this; see ``cdk.json``. It looks nothing up, so that ``cdk synth`` needs
no account, no network and no Docker.
"""

import os
import sys

# On Node 20 jsii prints a banner at every synth, under which the one line that matters is lost.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "20")

import aws_cdk as cdk

from stacks import settings as deployment
from stacks.core_stack import CoreStack
from stacks.training_stack import TrainingStack
from training.contract import CORE_STACK, EXIT_BAD_INPUT, TRAINING_STACK, InputError


def main() -> int:
    app = cdk.App()
    try:
        settings = deployment.load(
            app.node.get_all_context(), region=os.environ.get("CDK_DEFAULT_REGION", "")
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    # The account stays open, and with it the zones: a concrete one would be looked up at synth.
    env = cdk.Environment(region=settings.region or None)
    core = CoreStack(app, CORE_STACK, settings=settings, env=env)
    TrainingStack(app, TRAINING_STACK, settings=settings, core=core, env=env)
    cdk.Tags.of(app).add("project", "ecs-train")
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
