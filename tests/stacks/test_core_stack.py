"""CoreStack has the network, bucket, repositories and push role that it promises, and no more."""

from tests.stacks.conftest import OPTIONS, Synth, statements, text
from trainctl import checks

RENAMED = "CloudFormation would replace the resource, and lose what is in it"


def test_stateful_resources_keep_their_logical_ids(synth: Synth) -> None:
    ids = {
        "AWS::S3::Bucket": ["Bucket"],
        "AWS::EC2::VPC": ["Vpc"],
        "AWS::ECR::Repository": ["HeadRepository", "WorkerRepository"],
    }
    for kind, names in ids.items():
        assert [*synth().of_type(kind)] == names, RENAMED


def test_the_bootstrap_that_doctor_asks_for_is_what_the_templates_need(synth: Synth) -> None:
    rule = synth().core["Rules"]["CheckBootstrapVersion"]["Assertions"][0]["Assert"]
    too_old = rule["Fn::Not"][0]["Fn::Contains"][0]
    assert [int(each) for each in too_old] == [*range(1, checks.MIN_BOOTSTRAP)]


def test_the_role_that_pushes_images_is_an_output_where_a_repository_is_named(
    synth: Synth,
) -> None:
    assert not {"ImagePushRoleArn", "GitHubRepository"} & synth().core["Outputs"].keys()
    outputs = synth(**OPTIONS).core["Outputs"]
    assert text(outputs["ImagePushRoleArn"]["Value"]) == "<ImagePushRoleD191AFB1.Arn>"
    assert outputs["GitHubRepository"]["Value"] == "acme/train"


def test_functions_of_cdk_write_to_a_log_group_of_the_stack_and_to_no_other(synth: Synth) -> None:
    templates = synth(**OPTIONS)
    functions = {
        name: each
        for name, each in templates.core["Resources"].items()
        if each["Type"] == "AWS::Lambda::Function"
    }
    assert len(functions) == 2
    for function in functions.values():
        group = function["Properties"]["LoggingConfig"]["LogGroup"]["Ref"]
        assert templates.core["Resources"][group]["Type"] == "AWS::Logs::LogGroup"
        role = function["Properties"]["Role"]["Fn::GetAtt"][0]
        assert "ManagedPolicyArns" not in templates.core["Resources"][role]["Properties"]
        (policy,) = [
            policy
            for policy in templates.of_type("AWS::IAM::Policy").values()
            if policy["Roles"] == [{"Ref": role}]
        ]
        assert [each["Resource"] for each in statements(policy["PolicyDocument"])] == [
            [f"<{group}.Arn>"]
        ]
