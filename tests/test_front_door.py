"""What the project is for can be found from its first page, by the words that people use for it."""

import json
import re

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_readme_begins_with_the_commands_of_the_system_and_of_one_machine() -> None:
    second, first, *_ = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    system = ["pip install -r requirements/laptop.txt", "npm ci"]
    system += ["trainctl doctor", "npx cdk deploy CoreStack TrainingStack", "make images"]
    system += ["trainctl submit ddp", "trainctl submit fsdp", "npx cdk destroy --all"]
    places = [first.find(command) for command in system]
    assert -1 not in places
    assert places == sorted(places)
    assert [line.partition("  ")[0] for line in second.split("\n")] == [
        "make demo",
        "make test",
        "",
    ]


def test_the_cdk_starts_the_app_itself() -> None:
    assert json.loads((ROOT / "cdk.json").read_text())["app"] == "python3 app.py"


def test_readme_can_be_read_in_five_minutes() -> None:
    assert len(README.split()) <= 1250
