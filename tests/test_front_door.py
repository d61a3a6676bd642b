"""What the project is for can be found from its first page, by the words that people use for it."""

import json
import re

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")

#: Words of README, the file that a line with them names, and what that file has for them.
PARTS = [
    ("CoreStack", "stacks/core_stack.py", r"class CoreStack\(cdk\.Stack\)"),
    ("VPC with NAT gateway", "stacks/network/vpc.py", r"ec2\.Vpc\("),
    ("single training subnet", "stacks/network/vpc.py", r"SubnetType\.PRIVATE_WITH_EGRESS"),
    ("S3 bucket", "stacks/storage/bucket.py", r"s3\.Bucket\("),
    ("TrainingStack", "stacks/training_stack.py", r"class TrainingStack\(cdk\.Stack\)"),
    ("ECS GPU cluster", "stacks/cluster/gpu_cluster.py", r"ecs\.Cluster\("),
    ("Auto Scaling groups", "stacks/cluster/gpu_cluster.py", r"autoscaling\.AutoScalingGroup\("),
    ("cluster placement", "stacks/cluster/gpu_cluster.py", r"PlacementGroupStrategy\.CLUSTER"),
    ("CloudWatch GPU dashboard", "stacks/dashboard/dashboard.py", r"cloudwatch\.Dashboard\("),
    ("images of Ray head", "containers/Dockerfile", r" AS head\n"),
    ("and workers", "containers/Dockerfile", r" AS worker\n"),
    ("which contain the training scripts", "containers/Dockerfile", r"source=training,"),
    ("DDP", "training/ddp/train.py", r"\ndef train\("),
    ("FSDP", "training/fsdp/train.py", r"\ndef train\("),
    ("CI that builds, scans and pushes", ".github/workflows/images.yml", r"containers\.publish"),
    ("settings and presets", "cdk.json", r'"presets": \{'),
    ("the app", "app.py", r"TrainingStack\(app"),
    ("packages", "requirements.txt", r"-r requirements/laptop\.txt"),
]


@pytest.mark.parametrize(("words", "file", "has"), PARTS)
def test_readme_names_the_file_of_each_part(words: str, file: str, has: str) -> None:
    assert [line for line in README.splitlines() if words in line and f"`{file}`" in line]
    assert re.search(has, (ROOT / file).read_text("utf-8"))


def test_readme_begins_with_the_commands_of_the_system_and_then_has_those_of_one_machine() -> None:
    first, second, *_ = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    system = ["pip install -r requirements/laptop.txt", "npm ci"]
    system += ["npx cdk deploy CoreStack TrainingStack", "make images"]
    system += ["trainctl submit ddp", "trainctl submit fsdp", "npx cdk destroy --all"]
    places = [first.find(command) for command in system]
    assert -1 not in places
    assert places == sorted(places)
    assert second.split("\n")[:2] == ["make demo", "make test"]


def test_the_cdk_starts_the_app_itself() -> None:
    assert json.loads((ROOT / "cdk.json").read_text())["app"] == "python3 app.py"


def test_readme_can_be_read_in_five_minutes() -> None:
    assert len(README.split()) <= 1300
