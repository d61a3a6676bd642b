"""The next deploy beside what is deployed: what needs a destroy first.

python -m trainctl.setup.updates    # after `cdk diff`, whose templates are in cdk.out
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from contract.errors import InputError
from contract.outputs import CORE_STACK, TRAINING_STACK
from trainctl.aws.account import Account
from trainctl.aws.clients import Clients
from trainctl.aws.deployment import open_session
from trainctl.setup import checkout_settings
from trainctl.setup.checks import Finding, Place, bad, ok


def update(account: Account, assembly: Path, *, fix: str = "") -> Finding:
    """Compare the templates of a synth with those that are deployed."""
    from stacks.updates import losses

    artifacts = json.loads((assembly / "manifest.json").read_text())["artifacts"]
    both = {name: artifacts[name]["properties"] for name in (CORE_STACK, TRAINING_STACK)}
    after = [json.loads((assembly / each["templateFile"]).read_text()) for each in both.values()]
    names = [each.get("stackName", name) for name, each in both.items()]
    before = [found for found in map(account.template, names) if found]
    # What is not there yet loses nothing.
    if len(before) == 2 and (found := [*losses(before, after, account.create_only)]):
        return bad(f"destroy first: {'; '.join(found)}", fix)
    return ok("in place")


def planned(place: Place) -> Finding:
    """The same for the settings of cdk.json and of ``-c``."""
    fix = f"{place.make('destroy')} && {place.deploy()}"
    with TemporaryDirectory() as folder:
        synthesize(place, Path(folder))
        return update(place.account, Path(folder), fix=fix)


def synthesize(place: Place, folder: Path) -> None:
    """Run the app as the CDK command line does. Raises InputError."""
    project = checkout_settings.project()
    context = json.loads((project / "cdk.json").read_text())["context"]
    variables = {
        "CDK_CONTEXT_JSON": json.dumps(context | place.context),
        "CDK_OUTDIR": str(folder),
        "CDK_DEFAULT_REGION": place.region,
    }
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=project,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputError(f"the app cannot be synthesized: {done.stderr.strip()[-200:]}")


if __name__ == "__main__":
    session = open_session(profile=None, region=None)
    print(f"update: {update(Account(Clients(session)), Path('cdk.out')).found}")
