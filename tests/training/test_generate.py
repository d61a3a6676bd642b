"""What a prompt is for the model: which tokens it begins with, and which ones end its answer."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from training import export, generate
from training.data.conversations import ChatWriter
from training.models import language_models, pretrained

END, END_OF_TURN = 2, 7


@pytest.mark.parametrize(
    ("chat", "encoded", "ids", "stops"),
    [
        # Some tokenizers end every text: the model would begin a new one.
        (False, [5, 6, END], [5, 6], [END]),
        (False, [5, END, 6], [5, END, 6], [END]),
        # An answer ends where generation_config.json has it, or it goes on with invented turns.
        (True, [5, 6, END], [5, 6, END], [END_OF_TURN]),
    ],
)
def test_a_text_is_continued_and_an_answer_ends_with_its_turn(
    chat: bool,
    encoded: list[int],
    ids: list[int],
    stops: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = MagicMock()
    tokenizer.encode.side_effect = lambda *_, **__: SimpleNamespace(ids=[*encoded])
    words = SimpleNamespace(tokenizer=tokenizer, end_of_text=END)
    asked: dict[str, Any] = {}

    def drawn(_model: object, prompts: list[list[int]], **given: Any) -> list[list[int]]:
        asked.update(ids=prompts[0], stops=given["stops"])
        return [[1]]

    monkeypatch.setattr(generate, "_vocabulary", lambda _: words)
    monkeypatch.setattr(ChatWriter, "__init__", lambda *_: None)
    monkeypatch.setattr(ChatWriter, "text", lambda *_, **__: "asked")
    monkeypatch.setattr(pretrained, "config_of", lambda _: SimpleNamespace())
    monkeypatch.setattr(export, "recipe_of", MagicMock())
    monkeypatch.setattr(generate, "WithLoss", MagicMock())
    monkeypatch.setattr(language_models, "generate", drawn)
    found = MagicMock()
    found.read.return_value = f'{{"eos_token_id": {END_OF_TURN}}}'.encode()
    generate.continuations(found, "hello", num=3, seed=0, chat=chat)
    assert (asked["ids"], [*asked["stops"]]) == (ids, stops)
