"""Chat templates as they are published: what the data holds is learned, or the row is refused.

The templates are those of TRL's and axolotl's packages, of which the wheels are fetched. In
``templates.json`` are the outcomes: the rows of each conversation, or what it is refused for. One
of each kind is in tests/training/test_conversations.py, for every change.

    python -m tests.published.test_templates WHEELS    writes templates.json
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

pytestmark = [pytest.mark.night, pytest.mark.slow]

WHEELS = ("trl==1.16.0", "axolotl==0.19.0")
TABLE = Path(__file__).with_name("templates.json")
#: What is a token of its own in the tokenizers that belong to the templates.
TOKENS = re.compile(
    r"<[|\uff5c][^<>{}'\"\s]{1,40}[|\uff5c]>|\[\|[a-z]+\|\]|</?s>|\[/?(?:INST|TOOL_CALLS)\]"
    r"|<(?:start_of_turn|end_of_turn|bos|eos|turn\||\|turn)>"
)
TOOL = {"name": "f", "description": "Do", "parameters": {"type": "object", "properties": {}}}


def conversations() -> dict[str, dict[str, Any]]:
    """One or two turns with thoughts nowhere, under a key or in the content; with calls or not."""
    found = {}
    for thoughts in ("no", "key", "content"):
        for num, calls in ((1, False), (2, False), (2, True)):
            messages: list[dict[str, Any]] = []
            for turn in range(1, num + 1):
                messages.append({"role": "user", "content": f"question{turn}"})
                parts = [("call", f"why{turn}a")] * calls + [("answer", f"why{turn}b")]
                for kind, why in parts:
                    message: dict[str, Any] = {"role": "assistant", "content": f"answer{turn}"}
                    if kind == "call":
                        call = {"name": "f", "arguments": {"x": f"argument{turn}"}}
                        message |= {"content": "", "tool_calls": [{"id": "123456789", **call}]}
                    if thoughts == "key":
                        message["reasoning_content"] = why
                    elif thoughts == "content" and kind == "answer":
                        message["content"] = f"<think>\n{why}\n</think>\n\nanswer{turn}"
                    messages.append(message)
                    if kind == "call":
                        result = {"content": f"result{turn}", "tool_call_id": "123456789"}
                        messages.append({"role": "tool", "name": "f", **result})
            name = f"{thoughts} thoughts, {num} turns{', calls' * calls}"
            found[name] = {"messages": messages, **({"tools": [TOOL]} if calls else {})}
    return found


def outcome(folder: Path, template: str, row: dict[str, Any]) -> str:
    """Number of rows that teach a conversation, or what it is refused for."""
    tokenizer_folder(folder, template, special=TOKENS.findall(template))
    try:
        rows = learned_rows(folder, **row)
    except InputError as error:
        reason = re.search(
            r"leaves out or repeats (.*?)(?: of message .*| \(.*)?:|refuses", str(error)
        )
        return f"refused: {(reason[1] or 'by the template') if reason else error}"
    learned = ["".join(found) for _, found, _ in rows]
    words = re.findall(r"(?:why|answer|argument)\d\w?", json.dumps(row))
    assert all(sum(each.count(word) for each in learned) == 1 for word in words), learned
    assert not re.search(r"question|result", "".join(learned)), learned
    for (text, found, stops), whole in zip(rows, learned, strict=True):
        (stop,) = stops
        assert found[-1].rstrip().endswith(stop)
        assert found[-1].count(stop) == 1, (text, whole)
    return f"{len(rows)} rows"


def outcomes(wheels: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Outcomes of all templates in some wheels."""
    found = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".jinja"):
                    template = archive.read(name).decode()
                    short = f"{wheel.name.partition('-')[0]}/{Path(name).stem}"
                    found[short] = {
                        case: outcome(folder, template, row)
                        for case, row in conversations().items()
                    }
    return found


def test_what_is_published_is_learned_whole_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(tmp_path), *WHEELS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the wheels cannot be fetched here: {done.stderr[-200:]}")
    found = outcomes(tmp_path, tmp_path / "t")
    assert len(found) > 80
    assert found == json.loads(TABLE.read_text())


if __name__ == "__main__":
    made = outcomes(Path(sys.argv[1]), Path(sys.argv[1]) / "t")
    TABLE.write_text(json.dumps(made, indent=1) + "\n")
