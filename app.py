"""CDK app: read the settings, make CoreStack and TrainingStack.

The CDK command line runs this; see ``cdk.json``. It looks nothing up, so that ``cdk synth`` needs
no account, no network and no Docker.
"""

import os
import subprocess
import sys

if __name__ == "__main__":
    # cdk.json says `python3 app.py`, and python3 is seldom the Python that has the CDK. Find the
    # first one that has it, and start this file again there. Each prints which one it is, so that
    # nothing is started twice. Any Python 3 can read these lines.
    _SELF = "sys.prefix + sys.version.split()[0]"
    _PROBE = f"import importlib.util as u, sys; print({_SELF} if u.find_spec('aws_cdk') else '')"
    for _python in (".venv/bin/python", sys.executable, "python"):
        try:
            _answer = subprocess.check_output([_python, "-c", _PROBE], stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            continue
        _found = _answer.decode().strip()
        if _found == sys.prefix + sys.version.split()[0]:
            break
        if _found:
            os.execlp(_python, _python, *sys.argv)
    else:
        sys.exit("error: no Python here can import aws_cdk: pip install -r requirements/laptop.txt")

# Node 20 is past its support and still works. jsii prints a banner of eleven lines about it, which
# hides what matters; ``main`` prints one line instead.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "20")

import aws_cdk as cdk

from contract import exits, faults
from contract.outputs import CORE_STACK, TRAINING_STACK, stacks
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
    # The ids, by which `cdk deploy` knows them, are the same in each deployment.
    names = stacks(settings.deployment)
    pairs = [tag.partition("=") for tag in settings.tags.split(",") if tag]
    tags = {"project": "ecs-train", **{name: value for name, _, value in pairs}}
    # CloudFormation puts those of a stack on what CDK tags nothing of, such as roles that it adds.
    core = CoreStack(app, CORE_STACK, stack_name=names[0], settings=settings, env=env, tags=tags)
    TrainingStack(
        app,
        TRAINING_STACK,
        stack_name=names[1],
        settings=settings,
        core=core,
        env=env,
        tags=tags,
    )
    accept(app, AUDIT)
    for name, value in tags.items():
        # A change of its tags would replace a placement group, beside hosts that run in it.
        cdk.Tags.of(app).add(name, value, exclude_resource_types=["AWS::EC2::PlacementGroup"])
    return app


def note_on_node() -> str:
    """Warning about an unsupported Node.js; empty if it is supported."""
    found = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
    version = found.stdout.strip()
    if not version.startswith("v20."):
        return ""
    return f"note: Node.js {version} is past its support; it still works, but install 22 or 24"


@faults.command()
def main() -> int:
    build(cdk.App()).synth()
    note = note_on_node()
    if note:
        print(note, file=sys.stderr)
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
