"""Deployments share no name, and a packed function needs nothing that Lambda lacks."""

import json
import subprocess
import sys
from pathlib import Path

from stacks.jobs.infrastructure import KEEPER
from stacks.lambda_functions import stage
from tests.stacks.conftest import Synth, Templates

#: Properties that name something in the account, beside those that CloudFormation names itself.
NAMES = ("Family", "FunctionName", "StateMachineName", "DashboardName", "MetricNamespace")


def test_deployments_of_one_account_share_no_name_but_logical_ids(
    synth: Synth,
) -> None:
    only, named = synth(), synth(deployment="ml")
    # `cdk deploy CoreStack TrainingStack` is typed for each of them.
    assert named.resources.keys() == only.resources.keys()

    def names(templates: Templates) -> set[str]:
        found = {
            str(properties[name])
            for each in templates.resources.values()
            for name in NAMES
            # An attribute, such as an ARN, has the name of the resource that is in the list itself.
            if (properties := each.get("Properties", {})).get(name)
            and "Fn::GetAtt" not in properties[name]
        }
        # Policies of roles belong to them; one of CloudWatch Logs to the account.
        policies = templates.of_type("AWS::Logs::ResourcePolicy").values()
        exports = [
            each["Export"]["Name"]
            for each in templates.core["Outputs"].values()
            if "Export" in each
        ]
        return {*found, *(each["PolicyName"] for each in policies), *exports}

    own = {name for name in names(only) if not name.startswith(("AWS/", "ECS/"))}
    assert len(own) > 10
    assert own & names(named) == set()
    # No dashboard, alarm or right is about the other one's hosts.
    assert "RayTraining" in json.dumps(named.training)
    assert json.dumps(named.training).count("RayTraining") == json.dumps(named.training).count(
        "RayTraining/ml"
    )


def test_what_is_packed_needs_nothing_but_lambdas_own_boto3(tmp_path: Path) -> None:
    stage(KEEPER / "index.py", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.py", "contract", "stacks"}
    (tmp_path / "boto3.py").touch()  # stands for Lambda's
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import index; print(index.BUCKET)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],  # without the packages installed here
        env={"BUCKET": "c"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("c\n", "")
