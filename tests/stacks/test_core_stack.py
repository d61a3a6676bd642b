"""CoreStack has the network, bucket, repositories and push role that it promises, and no more."""

import pytest

from tests.stacks.conftest import EXISTING, OPTIONS, OTHERS, Synth, statements, text
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


@pytest.mark.parametrize(
    ("settings", "network", "zone"),
    [({}, "10.0", {"Fn::Select": [0, {"Fn::GetAZs": ""}]}), (OPTIONS, "10.7", "us-west-2b")],
    ids=["default", "options"],
)
def test_one_zone_with_a_subnet_for_the_nat_gateway_and_one_for_training(
    synth: Synth, settings: dict[str, str], network: str, zone: object
) -> None:
    templates = synth(**settings)
    assert templates.only("AWS::EC2::VPC")["CidrBlock"] == f"{network}.0.0/16"
    nat, training = templates.of_type("AWS::EC2::Subnet").values()
    assert nat["CidrBlock"] == f"{network}.0.0/28"
    assert training["CidrBlock"] == f"{network}.128.0/17"
    assert [subnet["AvailabilityZone"] for subnet in (nat, training)] == [zone, zone]


def test_what_an_organization_has_is_used_as_it_is(synth: Synth) -> None:
    templates = synth(**EXISTING)
    # None of its network, whose owner has routes, endpoints and flow logs, and no bucket.
    assert {each["Type"] for each in templates.core["Resources"].values()} == {
        "AWS::ECR::Repository",
        "AWS::ServiceDiscovery::PrivateDnsNamespace",
    }
    assert templates.only("AWS::ServiceDiscovery::PrivateDnsNamespace")["Vpc"] == EXISTING["vpc_id"]
    for group in templates.of_type("AWS::AutoScaling::AutoScalingGroup").values():
        assert group["VPCZoneIdentifier"] == [EXISTING["subnet_id"]]
    assert templates.only("AWS::EC2::SecurityGroup")["VpcId"] == EXISTING["vpc_id"]
    # Jobs read more buckets and write into none of them.
    training = [
        each
        for policy in templates.of_type("AWS::IAM::Policy").values()
        for each in statements(policy["PolicyDocument"])
        if any("acme-images" in text(resource) for resource in each["Resource"])
    ]
    assert {action for each in training for action in each["Action"]} == {
        "s3:GetBucketLocation",
        "s3:GetObject",
        "s3:ListBucket",
    }
    # Only hosts that train have the AMI; all hosts and disks have the tags.
    ami = templates.training["Parameters"]
    (own,) = [name for name, each in ami.items() if each.get("Default") == EXISTING["worker_ami"]]
    for name, template in templates.of_type("AWS::EC2::LaunchTemplate").items():
        data = template["LaunchTemplateData"]
        assert (data["ImageId"] == {"Ref": own}) == ("Worker" in name)
        for tags in data["TagSpecifications"]:
            assert {"Key": "Owner", "Value": "ml team"} in tags["Tags"]


def test_the_training_subnet_reaches_the_outside_through_the_nat_gateway_alone(
    synth: Synth,
) -> None:
    templates = synth()
    routes = {
        text(route["RouteTableId"]): route
        for route in templates.of_type("AWS::EC2::Route").values()
    }
    (nat_gateway,) = templates.of_type("AWS::EC2::NatGateway")
    assert routes["<VpcTrainingSubnet1RouteTable61C2EC54>"] == {
        "RouteTableId": {"Ref": "VpcTrainingSubnet1RouteTable61C2EC54"},
        "DestinationCidrBlock": "0.0.0.0/0",
        "NatGatewayId": {"Ref": nat_gateway},
    }
    associations = templates.of_type("AWS::EC2::SubnetRouteTableAssociation").values()
    assert {
        text(each["SubnetId"]).partition("Subnet1")[0]: text(each["RouteTableId"])
        for each in associations
    }["<VpcTraining"] == "<VpcTrainingSubnet1RouteTable61C2EC54>"


def test_s3_is_reached_without_the_nat_gateway(synth: Synth) -> None:
    endpoint = synth().only("AWS::EC2::VPCEndpoint")
    assert text(endpoint["ServiceName"]) == "com.amazonaws.<AWS::Region>.s3"
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert {"Ref": "VpcTrainingSubnet1RouteTable61C2EC54"} in endpoint["RouteTableIds"]


def test_nothing_is_written_into_a_bucket_of_others_by_the_endpoint(synth: Synth) -> None:
    """With keys of its own, say: what the role may do is not what the endpoint lets through."""
    allowed = statements(synth().only("AWS::EC2::VPCEndpoint")["PolicyDocument"])
    assert {each["Effect"] for each in allowed} == {"Allow"}
    (anywhere,) = [each for each in allowed if "*" in each["Resource"]]
    assert anywhere["Action"] == ["s3:Get*", "s3:List*"], "layers of images, packages"
    (own,) = [each for each in allowed if each is not anywhere]
    assert own["Resource"] == ["<Bucket.Arn>", "<Bucket.Arn>/*"]


def test_interface_endpoints_are_optional_and_open_to_the_vpc_alone(synth: Synth) -> None:
    templates = synth(**OPTIONS)
    interfaces = [
        endpoint
        for endpoint in templates.of_type("AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Interface"
    ]
    services = {text(each["ServiceName"]).rpartition("us-west-2.")[2] for each in interfaces}
    assert services == {"ecr.api", "ecr.dkr", "logs", "ssmmessages"}
    assert all(each["PrivateDnsEnabled"] for each in interfaces)
    (group,) = {text(each["SecurityGroupIds"][0]) for each in interfaces}
    rules = templates.resources[group.strip("<>").partition(".")[0]]["Properties"]
    assert [
        (rule["CidrIp"], rule["IpProtocol"], rule["FromPort"], rule["ToPort"])
        for rule in rules["SecurityGroupIngress"]
    ] == [("10.7.0.0/16", "tcp", 443, 443)]


def test_the_bucket_is_private_and_encrypted(synth: Synth) -> None:
    """``test_roles`` asks it without TLS."""
    bucket = synth().only("AWS::S3::Bucket")
    assert bucket["PublicAccessBlockConfiguration"] == dict.fromkeys(
        ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
    )
    (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    assert bucket["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    assert "VersioningConfiguration" not in bucket


def test_the_bucket_is_kept_unless_asked_otherwise_and_then_emptied(synth: Synth) -> None:
    kept, removed = synth(), synth(**OPTIONS)
    assert kept.core["Resources"]["Bucket"]["DeletionPolicy"] == "Retain"
    assert kept.core["Resources"]["Bucket"]["UpdateReplacePolicy"] == "Retain"
    assert kept.of_type("Custom::S3AutoDeleteObjects") == {}
    assert removed.core["Resources"]["Bucket"]["DeletionPolicy"] == "Delete"
    assert removed.only("Custom::S3AutoDeleteObjects")["BucketName"] == {"Ref": "Bucket"}


def test_old_checkpoints_get_cheaper_and_are_only_deleted_if_asked(synth: Synth) -> None:
    def rules(**settings: str) -> dict[str, dict[str, object]]:
        bucket = synth(**settings).only("AWS::S3::Bucket")
        return {rule["Id"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}

    default = rules()
    assert [*default] == ["stale-uploads", "old-checkpoints"]
    assert default["stale-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    archive = default["old-checkpoints"]
    assert archive["Prefix"] == "runs/"
    assert archive["ObjectSizeGreaterThan"] == "1048576"  # records stay as they are
    assert archive["Transitions"] == [{"StorageClass": "GLACIER_IR", "TransitionInDays": 30}]
    assert "ExpirationInDays" not in archive

    assert rules(**OPTIONS)["old-checkpoints"]["ExpirationInDays"] == 90
    assert [*rules(**OTHERS)] == ["stale-uploads"]


def test_repositories_are_immutable_scanned_and_go_with_the_stack(synth: Synth) -> None:
    templates = synth()
    for name in ("HeadRepository", "WorkerRepository"):
        repository = templates.core["Resources"][name]
        assert repository["DeletionPolicy"] == "Delete"
        properties = repository["Properties"]
        assert properties["ImageTagMutability"] == "IMMUTABLE"
        assert properties["ImageScanningConfiguration"] == {"ScanOnPush": True}
        assert properties["EmptyOnDelete"] is True
        policy = properties["LifecyclePolicy"]["LifecyclePolicyText"]
        assert '"countNumber":7,"countUnit":"days"' in policy
        # The image that is deployed may be the oldest one.
        assert "imageCountMoreThan" not in policy
        assert '"tagStatus":"untagged"' in policy
        assert policy.count("rulePriority") == 1


def test_nobody_may_push_images_unless_a_repository_is_named(synth: Synth) -> None:
    templates = synth()
    assert templates.of_type("AWS::IAM::OIDCProvider") == {}
    assert not {"ImagePushRoleArn", "GitHubRepository"} & templates.core["Outputs"].keys()


def test_one_branch_of_one_repository_may_push_to_the_two_repositories(synth: Synth) -> None:
    templates = synth(**OPTIONS)
    provider = templates.only("AWS::IAM::OIDCProvider")
    assert provider["Url"] == "https://token.actions.githubusercontent.com"
    assert provider["ClientIdList"] == ["sts.amazonaws.com"]
    ((name, role),) = [
        item for item in templates.of_type("AWS::IAM::Role").items() if "ImagePush" in item[0]
    ]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Action"] == "sts:AssumeRoleWithWebIdentity"
    assert trust["Condition"] == {
        "StringEquals": {"token.actions.githubusercontent.com:aud": "sts.amazonaws.com"},
        "StringLike": {
            "token.actions.githubusercontent.com:sub": [
                "repo:acme/train:ref:refs/heads/release",
                "repo:acme@*/train@*:ref:refs/heads/release",
            ]
        },
    }
    outputs = templates.core["Outputs"]
    assert outputs["ImagePushRoleArn"]["Value"] == {"Fn::GetAtt": [name, "Arn"]}
    assert outputs["GitHubRepository"]["Value"] == "acme/train"


def test_a_repository_with_its_ids_is_trusted_and_no_other_of_its_name(synth: Synth) -> None:
    roles = synth(**OTHERS).of_type("AWS::IAM::Role")
    (role,) = [role for name, role in roles.items() if "ImagePush" in name]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    (subject,) = trust["Condition"]["StringLike"].values()
    assert subject in (
        "repo:acme@12/train@345:ref:refs/heads/main",
        ["repo:acme@12/train@345:ref:refs/heads/main"],
    )


def test_a_provider_that_the_deploy_has_made_outlives_it(synth: Synth) -> None:
    resources = synth(**OPTIONS).resources.values()
    (provider,) = [each for each in resources if each["Type"] == "AWS::IAM::OIDCProvider"]
    assert provider["DeletionPolicy"] == "Retain", "an account has one, and others may use it"


def test_an_accounts_own_provider_is_used_as_it_is(synth: Synth) -> None:
    templates = synth(**OTHERS)
    assert templates.of_type("AWS::IAM::OIDCProvider") == {}
    assert any(
        statement["Principal"].get("Federated") == OTHERS["github_oidc_provider_arn"]
        for role in templates.of_type("AWS::IAM::Role").values()
        for statement in role["AssumeRolePolicyDocument"]["Statement"]
    )


def test_the_default_security_group_is_emptied(synth: Synth) -> None:
    restricted = synth().only("Custom::VpcRestrictDefaultSG")
    assert restricted["DefaultSecurityGroupId"] == {"Fn::GetAtt": ["Vpc", "DefaultSecurityGroup"]}


def test_log_groups_have_a_retention_and_go_with_their_stack(synth: Synth) -> None:
    templates = synth(**OPTIONS)
    groups = {
        name: resource
        for name, resource in templates.resources.items()
        if resource["Type"] == "AWS::Logs::LogGroup"
    }
    assert len(groups) == 8
    for resource in groups.values():
        assert resource["Properties"]["RetentionInDays"] == 7
        assert resource["DeletionPolicy"] == "Delete"
        assert "LogGroupName" not in resource["Properties"]


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
