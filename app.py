"""CDK app: read the settings, make CoreStack and TrainingStack.

The CDK command line runs this; see ``cdk.json``. It looks nothing up, so that ``cdk synth`` needs
no account, no network and no Docker.
"""

import os
import subprocess
import sys

# Node 20 is past its support and still works. jsii prints a banner of eleven lines about it, which
# hides what matters; ``main`` prints one line instead.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "20")

import aws_cdk as cdk

from contract.errors import InputError
from contract.exits import BAD_INPUT as EXIT_BAD_INPUT
from contract.exits import OK as EXIT_OK
from contract.outputs import CORE_STACK, TRAINING_STACK
from stacks import settings as deployment
from stacks.core_stack import CoreStack
from stacks.findings import AUDIT, accept
from stacks.training_stack import TrainingStack


def build(app: cdk.App) -> cdk.App:
    """Add both stacks to ``app``, as its context wants them. Raises InputError."""
    settings = deployment.load(
        app.node.get_all_context(), region=os.environ.get("CDK_DEFAULT_REGION", "")
    )
    # The account stays open, and with it the zones: a concrete one would be looked up at synth.
    env = cdk.Environment(region=settings.region or None)
    core = CoreStack(app, CORE_STACK, settings=settings, env=env)
    TrainingStack(app, TRAINING_STACK, settings=settings, core=core, env=env)
    accept(app, AUDIT)
    cdk.Tags.of(app).add("project", "ecs-train")
    return app


def note_on_node() -> str:
    """What to say about the Node.js that runs the CDK; empty where it is supported."""
    found = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
    version = found.stdout.strip()
    if not version.startswith("v20."):
        return ""
    return f"note: Node.js {version} is past its support; it still works, but install 22 or 24"


def main() -> int:
    try:
        build(cdk.App()).synth()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if note := note_on_node():
        print(note, file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
