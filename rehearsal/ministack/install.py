"""Install all changes of the rehearsal in MiniStack, in one call. Imported inside ``.venv-aws``
only."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from rehearsal.ministack import (
    calls,
    cloudformation,
    ecs_hosts,
    logs,
    step_functions,
    validation,
)
from rehearsal.ministack.internals import s3, ssm

ECS_IMAGES = "/aws/service/ecs/optimized-ami"
ECS_IMAGE_ID = "ami-0ec50000000000001"
ECS_IMAGE_FAMILIES = ("amazon-linux-2023", "amazon-linux-2023/gpu")


def install() -> None:
    """Give the emulator what it lacks; ECS tasks as containers only where it is told a network."""
    # Arrow sends the first with each upload, and the emulator's own takes 0.4 s for a MB.
    checksums: Any = import_module("awscrt.checksums")
    s3._crc64nvme, s3._crc32c = checksums.crc64nvme, checksums.crc32c
    cloudformation.install()
    logs.install_targets()
    logs.install_function_logs()
    logs.install_filters()
    step_functions.install()
    # The parameters under which AWS publishes the images for ECS instances.
    for family in ECS_IMAGE_FAMILIES:
        ssm._PUBLIC_AMI_PARAMETERS[f"{ECS_IMAGES}/{family}/recommended/image_id"] = ECS_IMAGE_ID
    if os.environ.get("REHEARSAL_NETWORK"):
        # Docker's library is not needed where tasks are only records.
        from rehearsal.ministack import ecs_runtime
        from rehearsal.ministack.ecs_runtime import RuntimeSettings

        ecs_runtime.install(RuntimeSettings.from_environment())
    else:
        ecs_hosts.install(ecs_hosts.Records())
    validation.install()
    # After Step Functions' own fix: it asks before the calls that this one makes.
    calls.install(Path(os.environ["REHEARSAL_FOLDER"]) / "calls.jsonl")
