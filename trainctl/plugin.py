"""The Session Manager plug-in, through which shells and tunnels on AWS go."""

import os
import shutil
import subprocess
from typing import Final

from trainctl.aws.sessions import Session
from trainctl.errors import CliError

PLUGIN: Final = "session-manager-plugin"


def require_plugin() -> str:
    """Path of the plug-in. Raises CliError where it is not installed."""
    plugin = shutil.which(PLUGIN)
    if plugin is None:
        raise CliError(
            f"{PLUGIN} is not installed, and shells and tunnels on AWS go through it: see 'Install "
            "the Session Manager plugin' in the documentation of AWS Systems Manager"
        )
    return plugin


def run_plugin(plugin: str, session: Session, *, region: str, profile: str | None) -> int:
    """Hand a session to the plug-in, as the AWS CLI does; return its exit code."""
    endpoint = f"https://ssm.{region}.amazonaws.com"
    arguments = [plugin, session.answer, region, "StartSession", profile or ""]
    return subprocess.run(
        [*arguments, session.request, endpoint], env=os.environ, check=False
    ).returncode
