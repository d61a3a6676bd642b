"""``make synth`` validates what it synthesizes, and a deploy does not do it again; deployments
share no name."""

import json

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
