"""Proves, with real processes, that a run on conversations learns to answer, and that what it
exports answers elsewhere as it does here."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from contract.runs import RunPaths
from tests import forks
from tests.training.local_runs import trained
from tests.training.test_conversations import CHATML, LAID_OUT, tokenizer_folder, turns
from training import export, generate
from training.checkpoint import sharded_checkpoints
from training.fsdp import inputs
from training.fsdp.settings import FsdpConfig
from training.record.events import Sample, Step

pytestmark = [pytest.mark.slow, pytest.mark.long]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}
NUM = 200


def dialogue(data_dir: Path) -> list[tuple[str, str]]:
    """Speeches of Shakespeare, each with an answer of two or three words."""
    text = (data_dir / "tiny-shakespeare" / "input.txt").read_text()
    speeches = [each.partition(":\n")[2] for each in text.split("\n\n")]
    pairs = pairwise(speeches)
    return [pair for pair in pairs if 0 < len(pair[0]) <= 160 and 0 < len(pair[1]) <= 20][:NUM]


def config(folder: Path, data_dir: Path) -> FsdpConfig:
    rows = [
        {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}
        for said, answer in dialogue(data_dir)
    ]
    assert len(rows) == NUM
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    return FsdpConfig(
        recipe="fsdp",
        run="chat",
        storage=str(folder),
        data=str(folder / "chats.jsonl"),
        model=f"new:{folder / 'model'}",
        tokenizer=str(tokenizer_folder(folder / "tokenizer")),
        seq_len=256,
        global_batch=4,
        microbatch=1,
        epochs=12,
        lr=5e-3,
        report_every=1,
        checkpoint_every=1000,
        evaluate_every=1000,
        sample_tokens=4,
    )


def test_a_model_learns_answers_and_gives_the_same_ones_wherever_it_is_served(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, data_dir)
    monkeypatch.setenv("TRAINING_CACHE_DIR", f"{settings.storage}/cache")
    settings = inputs.prepare(settings)
    events, _ = forks.run(2, trained, settings)
    losses = [each.loss for each in events if isinstance(each, Step)]
    assert losses[-1] < losses[0] / 2
    asked = next(each for each in events if isinstance(each, Sample))
    assert asked.prompt.startswith("user\n")
    assert asked.prompt.endswith("assistant\n")

    found = sharded_checkpoints.newest_of(RunPaths.of(settings.storage, settings.run).uri)
    place = Path(export.export(found, str(tmp_path / "served")))
    check_served(place, found, inputs.store_of(settings).info.stops[0])


def check_served(place: Path, found: sharded_checkpoints.ShardedCheckpoint, stop: int) -> None:
    """Ask transformers' pipeline and ``training.generate`` the same."""
    from transformers import pipeline

    served: Any = pipeline("text-generation", model=str(place))
    num_ended = 0
    for said in ("What news?", "Who calls?", "My lord?"):
        question = [{"role": "user", "content": said}]
        ids = served.tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        tokens = served.model.generate(ids, max_new_tokens=80, do_sample=False)[0, ids.shape[1] :]
        answer = served(question, max_new_tokens=80, do_sample=False)[0]["generated_text"][-1]
        _, here = generate.continuations(found, said, num=80, seed=0, chat=True, greedy=True)
        assert answer == {"role": "assistant", "content": here}
        assert (tokens[:-1] != stop).all(), "an answer ends with its turn"
        num_ended += tokens[-1] == stop
    assert num_ended > 0


#: As gpt-oss's: thoughts end as an earlier answer does.
_HARMONY = (
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}<|start|>{{ m.role }}"
    "{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_WORDS = ["ab", "rumor", "kite", "plum", "oak", "seven", "grain", "tulip", "moss", "dune"]


@pytest.mark.parametrize("template", [CHATML, LAID_OUT, _HARMONY], ids=["none", "inside", "key"])
def test_an_export_that_was_overfitted_answers_with_its_thoughts_and_ends_as_the_data(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the texts that transformers makes of the data."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    special = [f"<|{each}|>" for each in ("start", "end", "return", "channel", "message")]
    data = []
    for number, word in enumerate(_WORDS):
        messages: list[dict[str, str]] = turns(word, f"{word}!", "More?", f"No {word}")[
            : 2 + number % 2 * 2
        ]
        for each in messages[1::2]:
            if template is _HARMONY:
                each["reasoning_content"] = f"Hm {word}."
            elif template is LAID_OUT:
                each["content"] = f"<think>Hm {word}.</think>{each['content']}"
        data.append(messages)
    file, folder = tmp_path / "chats.jsonl", tmp_path / "model"
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in data))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 272}))
    tokens = tokenizer_folder(tmp_path / "tokenizer", template, special=special)
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "cache"))
    values: dict[str, Any] = {
        **{"recipe": "fsdp", "run": "chat", "storage": str(tmp_path), "data": str(file)},
        **{"validation": str(file), "model": f"new:{folder}", "tokenizer": str(tokens)},
        **{"seq_len": 128, "global_batch": 4, "microbatch": 4, "max_steps": 120, "lr": 5e-3},
        **{"checkpoint_every": 1000, "evaluate_every": 1000, "sample_tokens": 0},
    }
    settings = inputs.prepare(FsdpConfig(**values))
    forks.run(1, trained, settings)
    found = export.newest_checkpoint("chat", str(tmp_path))
    place = export.export(found, str(tmp_path / "served"))
    model: Any = AutoModelForCausalLM.from_pretrained(place)
    written: Any = AutoTokenizer.from_pretrained(place)
    for messages in data:
        for num in range(1, len(messages), 2):
            asked, whole = (
                written.apply_chat_template(
                    messages[:end], tokenize=False, add_generation_prompt=end == num
                )
                for end in (num, num + 1)
            )
            ids = written(asked, return_tensors="pt", add_special_tokens=False)["input_ids"]
            answer = model.generate(ids, max_new_tokens=100, do_sample=False)[0]
            assert written.decode(answer) == whole.rstrip()
