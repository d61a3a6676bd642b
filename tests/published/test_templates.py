"""Chat templates as they are published: what the data holds is learned, or the row is refused.

The templates are those of TRL's and axolotl's packages, of which the wheels are fetched. In
``templates.json`` are the outcomes: the rows of each conversation, or what it is refused for. One
of each kind is in tests/training/test_conversations.py, for every change.
"""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InputError
from tests.training.test_conversations import learned_rows, tokenizer_folder

WHEELS = ("trl==1.16.0", "axolotl==0.19.0")
#: What is a token of its own in the tokenizers that belong to the templates.
TOKENS = re.compile(
    r"<[|\uff5c][^<>{}'\"\s]{1,40}[|\uff5c]>|\[\|[a-z]+\|\]|</?s>|\[/?(?:INST|TOOL_CALLS)\]"
    r"|<(?:start_of_turn|end_of_turn|bos|eos|turn\||\|turn)>"
)
QUESTION = '{"role": "user", "content": "question1"}'
CALL = """, {"role": "assistant", "content": "", "reasoning_content": "why1a", "tool_calls":
  [{"id": "123456789", "name": "f", "arguments": {"x": "argument1"}}]},
  {"role": "tool", "name": "f", "tool_call_id": "123456789", "content": "result1"}"""
KEY = '{"role": "assistant", "content": "answer1", "reasoning_content": "why1b"}'
INSIDE = KEY.replace('"answer1", ', r'"<think>\nwhy1b\n</think>\n\nanswer1", ')
NO = ', "reasoning_content": "why1[ab]"'
#: One turn: without thoughts, with thoughts under a key and in the content; the same with a call.
TURNS = {
    f"{name}{' and a call' * bool(call)}": re.sub(taken, "", f"{QUESTION}{call}, {answer}")
    for call in ("", CALL)
    for name, answer, taken in (("none", KEY, NO), ("key", KEY, "-"), ("content", INSIDE, NO))
}
CASES: dict[str, list[dict[str, Any]]] = {
    f"{name}, {num}": json.loads(
        f"[{', '.join([turn, re.sub('1(?=[ab]?[^2])', '2', turn)][:num])}]"
    )
    for name, turn in TURNS.items()
    for num in (1, 2)
}
TOOL = {"name": "f", "description": "Do", "parameters": {"type": "object", "properties": {}}}


def outcome(folder: Path, messages: list[dict[str, Any]]) -> str:
    """Number of rows that teach a conversation, or what it is refused for."""
    tools = [TOOL] if any("tool_calls" in each for each in messages) else []
    try:
        rows = learned_rows(folder, messages, tools=tools)
    except InputError as error:
        lost = re.search(r"leaves out or repeats (\w+)|refuses", str(error))
        return f"refused: {lost[1] or 'by the template'}" if lost else str(error)
    learned = ["".join(found) for _, found, _ in rows]
    for word in re.findall(r"why\d\w|answer\d|argument\d", json.dumps(messages)):
        assert sum(each.count(word) for each in learned) == 1, (word, learned)
    assert not re.search(r"question|result", "".join(learned)), learned
    for _, found, (stop,) in rows:
        assert found[-1].rstrip().endswith(stop)
        assert found[-1].count(stop) == 1
    return f"rows: {len(rows)}"


@pytest.mark.night
@pytest.mark.slow
def test_what_is_published_is_learned_whole_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(tmp_path), *WHEELS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the wheels cannot be fetched here: {done.stderr[-200:]}")
    found: dict[str, dict[str, str]] = {}
    for wheel in tmp_path.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(re.compile(r".*\.jinja$").match, archive.namelist()):
                template = archive.read(name).decode()
                tokenizer_folder(tmp_path / "t", template, special=TOKENS.findall(template))
                found[f"{wheel.name.partition('-')[0]}/{Path(name).stem}"] = {
                    case: outcome(tmp_path / "t", messages) for case, messages in CASES.items()
                }
    table = Path(__file__).with_name("templates.json")
    if not table.exists():  # write it anew: remove it
        table.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(table.read_text())
