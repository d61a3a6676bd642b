"""Coding agents can follow AGENTS.md to the letter: its commands work, and print the keys."""

import json
import re
import shlex
from pathlib import Path

from contract import exits
from tests.conftest import ROOT
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli

PAGE = (ROOT / "AGENTS.md").read_text("utf-8")


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", " ".join(text.split()))


def test_each_step_works_and_prints_the_keys_that_it_names(
    account: Account, cli: Cli, code: Path
) -> None:
    (code / "train.py").touch()
    values = {"RECIPE": "ddp", "N": "1", "DOLLARS": "9", "DIR": str(code), "...": "--yes"}
    done, num_keys = [], 0
    for step in re.findall(r"(?ms)^\d\. .+?(?=^\d\. |^$)", PAGE):
        said: dict[str, object] = {}
        for command in quoted(step):
            # "the same words: --code DIR ... -- torchrun train.py"
            words = shlex.split(re.sub("^--code ", "trainctl submit --code ", command))
            if words[0] != "trainctl":
                continue
            if words[1] == "wait":
                end = {"status": "SUCCEEDED", "output": '{"status": "succeeded"}'}
                account.executions[values["JOB"]].update(end, stopDate=account.now)
            out = cli(*(values.get(word, word) for word in words[1:])).out
            if "--json" in words and isinstance(found := json.loads(out), dict):
                said |= found
                values["JOB"] = found.get("job", values.get("JOB", ""))
            done.append(words[1])
        keys = {each for each in quoted(step) if re.fullmatch("[a-z_]+", each)}
        assert keys - said.keys() == set(), step
        num_keys += len(keys)
    assert done == ["plan", "submit", "submit", "cost", "top", "logs", "wait", "stop", "show"]
    assert num_keys == 8


def test_its_exit_codes_are_those_of_jobs() -> None:
    named = re.findall(r"(\d+) (done|no capacity|deadline|stopped)", PAGE)
    codes = (exits.OK, exits.NO_CAPACITY, exits.DEADLINE, exits.TERMINATED)
    assert tuple(int(number) for number, _ in named) == codes
    assert f"codes {exits.BAD_INPUT}\n   and {exits.ASKS_TOO_MUCH} do not pass" in PAGE


def test_a_skill_has_the_form_that_agents_read() -> None:
    (file,) = (ROOT / ".claude" / "skills").glob("*/SKILL.md")
    front = re.match(r"---\nname: ([a-z-]+)\ndescription: (.{1,1024})\n---\n", file.read_text())
    assert front
    assert front[1] == file.parent.name
