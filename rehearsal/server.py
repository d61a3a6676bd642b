"""The emulator as the rehearsal needs it. Runs inside ``.venv-aws``, usually as a child process.

    PYTHONPATH=. .venv-aws/bin/python -m rehearsal.server

It is MiniStack, configured by the environment that MiniStack itself reads (GATEWAY_PORT, BIND_HOST
...), with more CloudFormation types (``rehearsal.cloudformation_types``), the SSM parameters under
which AWS publishes the images for ECS instances, and the modules that AWS gives Lambda functions.
Where it is told a Docker network, ECS tasks are containers there (``rehearsal.ecs_runtime``).
``rehearsal.local_aws`` starts it; nothing in the project's environment can import it.
"""

import os
import signal
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

#: The one version whose internals this package knows.
MINISTACK_VERSION = "1.5.33"
WATCH_PARENT = "--end-with-parent"
SECONDS_TO_STOP = 10

ECS_IMAGES = "/aws/service/ecs/optimized-ami"
ECS_IMAGE_ID = "ami-0ec50000000000001"
ECS_IMAGE_FAMILIES = (
    "amazon-linux-2",
    "amazon-linux-2/arm64",
    "amazon-linux-2/gpu",
    "amazon-linux-2023",
    "amazon-linux-2023/arm64",
    "amazon-linux-2023/gpu",
    "amazon-linux-2023/neuron",
)


def check_version() -> None:
    """End the process, with code 2, where the installed MiniStack is missing or another one."""
    try:
        found = metadata.version("ministack")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != MINISTACK_VERSION:
        print(
            f"error: rehearsal.server reaches into MiniStack {MINISTACK_VERSION}, and this Python "
            f"has {found}: run `make venv-aws`, or adapt rehearsal/ to the other version",
            file=sys.stderr,
        )
        raise SystemExit(2)


def end_with_parent() -> None:
    """End this process and its children as soon as standard input closes.

    The parent holds the other end of that pipe. The system closes it however the parent ends, so
    a killed test run leaves no server behind.
    """
    own_group = os.getpgrp()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(own_group, signal.SIGTERM)
        time.sleep(SECONDS_TO_STOP)
        os.killpg(own_group, signal.SIGKILL)

    if own_group != os.getpid():
        raise SystemExit(f"error: {WATCH_PARENT} is for a process that leads its own group")
    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main() -> None:
    arguments = sys.argv[1:]
    if arguments not in ([], [WATCH_PARENT]):
        print(f"error: the only argument is {WATCH_PARENT}; see the environment", file=sys.stderr)
        raise SystemExit(2)
    check_version()
    if WATCH_PARENT in arguments:
        end_with_parent()

    # Lambda workers inherit this: they get what AWS has, and not the modules of this project.
    modules = Path(__file__).parent / "lambda_modules"
    os.environ["PYTHONPATH"] = str(modules)
    os.environ["NODE_OPTIONS"] = f'--require "{modules / "aws_sdk.js"}"'
    os.environ["REHEARSAL_PYTHON"] = sys.executable  # for aws_sdk.js
    sys.argv = sys.argv[:1]  # MiniStack parses what is left

    from ministack import app
    from ministack.services import ssm

    from rehearsal import cloudformation_types, events, lambda_logs, step_functions

    cloudformation_types.register()
    events.install()
    lambda_logs.install()
    step_functions.install()
    for family in ECS_IMAGE_FAMILIES:
        ssm._PUBLIC_AMI_PARAMETERS[f"{ECS_IMAGES}/{family}/recommended/image_id"] = ECS_IMAGE_ID
    if os.environ.get("REHEARSAL_NETWORK"):
        from rehearsal import calls
        from rehearsal.ecs_runtime import Runtime, Settings

        settings = Settings.from_environment()
        Runtime(settings).install()
        calls.install(settings.folder / "calls.jsonl")
    app.main()


if __name__ == "__main__":
    main()
