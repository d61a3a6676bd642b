"""References to MiniStack's modules that this package changes and calls; nothing else imports them.

The fixes replace functions of these modules, private ones too. Their names and shapes are those of
one version: another one is refused here, before it would fail in the middle of a deployment.
"""

from importlib import import_module, metadata
from typing import Any

#: The version whose internals these are.
MINISTACK_VERSION = "1.5.33"


class InternalsError(ImportError):
    """The installed MiniStack is not the one that this package was written for."""


def check_version() -> None:
    """Raises InternalsError: MiniStack is not installed, or in another version."""
    try:
        found = metadata.version("ministack")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != MINISTACK_VERSION:
        raise InternalsError(
            f"rehearsal/ministack reaches into MiniStack {MINISTACK_VERSION}, and this Python "
            f"has {found}: run `make venv-aws`, or adapt rehearsal/ministack to the other version"
        )


check_version()

# The server first: it imports the services in the order that they need.
app: Any = import_module("ministack.app")
concurrency: Any = import_module("ministack.core.concurrency")
iam_actions: Any = import_module("ministack.core.iam_actions")
iam_evaluator: Any = import_module("ministack.core.iam_evaluator")
lambda_runtime: Any = import_module("ministack.core.lambda_runtime")
responses: Any = import_module("ministack.core.responses")
router: Any = import_module("ministack.core.router")
autoscaling: Any = import_module("ministack.services.autoscaling")
cloudwatch_logs: Any = import_module("ministack.services.cloudwatch_logs")
ec2: Any = import_module("ministack.services.ec2")
ecs: Any = import_module("ministack.services.ecs")
eventbridge: Any = import_module("ministack.services.eventbridge")
iam: Any = import_module("ministack.services.iam")
lambda_svc: Any = import_module("ministack.services.lambda_svc")
s3: Any = import_module("ministack.services.s3")
secretsmanager: Any = import_module("ministack.services.secretsmanager")
servicediscovery: Any = import_module("ministack.services.servicediscovery")
ssm: Any = import_module("ministack.services.ssm")
stepfunctions: Any = import_module("ministack.services.stepfunctions")
cloudformation: Any = import_module("ministack.services.cloudformation")
custom_resource: Any = import_module("ministack.services.cloudformation.custom_resource")
provisioners: Any = import_module("ministack.services.cloudformation.provisioners")
stacks: Any = import_module("ministack.services.cloudformation.stacks")
