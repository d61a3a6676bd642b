"""Proves which tokens of a conversation are learned, token by token, by itself and packed, and that
each conversation comes once an epoch on any number of workers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from contract.errors import InputError
from training.data import vocabulary
from training.data.conversations import ChatWriter, Message, content_of
from training.data.feed import NOTHING, Feed, Packs, best_fit, feed_of
from training.data.text import TokenStore, store_for
from training.loop.losses import IGNORE
from training.models import pretrained, serving

pytestmark = pytest.mark.usefixtures("cache")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As DeepSeek's: it asks with more than it writes before an answer, and takes out its thoughts.
THINKING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>a\n"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>"
    "{% else %}<|im_start|>u\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n<think>\n{% endif %}"
)
#: As Qwen3's: only the last answer has a place for thoughts.
LAST_DIFFERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As gpt-oss's: it writes words of its own between its request and an answer.
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' "
    "}}<|message|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
#: As Qwen3's: thoughts have a line to themselves, whether there are any or not.
LAID_OUT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "<think>\n{{ parts[0].split('<think>')[-1] if parts[1:] }}\n</think>\n{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS_FROM_THE_FIRST = "{{ '(asks)' if add_generation_prompt }}" + CHATML
ANNOTATED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
WITHOUT_END = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def members_of(feed: Feed, sequence: int) -> list[int]:
    """Numbers of the conversations of a sequence."""
    assert isinstance(feed.train, Packs)
    return [*map(int, feed.train.members(sequence))]


def members(feed: Feed, step: int, *, rank: int, world_size: int) -> list[int]:
    """The same of a worker's part of a step."""
    mine = feed.sequences(step)[rank::world_size]
    return [member for each in mine.tolist() for member in members_of(feed, each)]


def tokenizer_folder(folder: Path, template: str = CHATML) -> Path:
    """A tokenizer of bytes with the tokens of ChatML, as a model publishes it."""
    folder.mkdir(exist_ok=True)
    alphabet = {each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("</s>", "<eos>", "<|im_start|>", "<|im_end|>", "<bos>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": {"content": "<bos>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def turns(*texts: str) -> tuple[Message, ...]:
    """Messages of a user and an assistant, by turns."""
    roles = ("user", "assistant")
    return tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(texts))


def learned(folder: Path, *texts: str) -> tuple[str, list[str]]:
    """What is written of a conversation, and the stretches of it that are learned."""
    words = vocabulary.read(folder)
    (encoded,) = ChatWriter(words).encode([turns(*texts)])
    found, stretch = [], []
    for token, is_learned in zip([*encoded.ids, -1], [*encoded.learned, False], strict=True):
        if is_learned:
            stretch.append(token)
        elif stretch:
            found.append(words.tokenizer.decode(stretch, skip_special_tokens=False))
            stretch = []
    return words.tokenizer.decode(encoded.ids, skip_special_tokens=False), found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(CHATML, ["assistant, ü!<|im_end|>", "user<|im_end|>"], id="chatml"),
        pytest.param(ANNOTATED, ["assistant, ü!<|im_end|>", "user<|im_end|>"], id="annotated"),
        pytest.param(THINKING, ["assistant, ü!<|im_end|>", "user<|im_end|>"], id="thinking"),
        pytest.param(
            LAST_DIFFERS,
            ["assistant, ü!<|im_end|>", "<think></think>user<|im_end|>"],
            id="last-differs",
        ),
        # Nothing ends an answer: the last one gets the end of text.
        pytest.param(WITHOUT_END, ["assistant, ü!", "user<eos>"], id="without-end"),
        pytest.param("", ["assistant, ü!<eos>", "user<eos>"], id="plain"),
    ],
)
def test_only_answers_and_what_ends_them_are_learned(
    template: str, expected: list[str], tmp_path: Path
) -> None:
    # The words of the roles are what is said, too.
    folder = tokenizer_folder(tmp_path / "t", template)
    text, found = learned(folder, "user", "assistant, ü!", "user again?", "user")
    assert found == expected
    assert "user again?" in text


def test_thoughts_that_a_template_takes_out_are_no_mistake(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", THINKING)
    _, found = learned(folder, "What?", "<think>Hm.</think>That.", "And?", "<b>Bold.")
    assert found == ["That.<|im_end|>", "<b>Bold.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        pytest.param(CHANNELS, "a", "<|channel|>final<|message|>a<|im_end|>", id="words-before-it"),
        pytest.param(
            LAID_OUT,
            "think",
            "<think>\n\n</think>\nthink<|im_end|>",
            id="place-for-thoughts",
        ),
        pytest.param(
            LAID_OUT,
            "<think>So.</think>So.",
            "<think>\nSo.\n</think>\nSo.<|im_end|>",
            id="thoughts",
        ),
        pytest.param(
            THINKING, "<think>\nSo.", "<think>\nSo.<|im_end|>", id="begins-with-the-request"
        ),
        # Of a request that is written in another way, nothing can be left out.
        pytest.param(
            ASKS_FROM_THE_FIRST,
            "So.",
            "<|im_start|>assistant\nSo.<|im_end|>",
            id="asks-from-the-first",
        ),
    ],
)
def test_an_answer_is_found_where_its_words_stand_elsewhere_too(
    template: str, answer: str, expected: str, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path / "t", template)
    text, found = learned(folder, f"Is it {answer}?", answer, f"Again: {answer}", answer)
    assert found == [expected, expected]
    assert text.count(expected) == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses .*: roles must alternate"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", r"leaves out, .* answer \('there'\)"),
        (CHATML.replace("{{ m.content }}", "{{ m.content }}" * 2), r"repeats .* \('there'\)"),
        # "there" stands before the answer.
        ("{% for m in messages %}there {{ m.content | upper }}{% endfor %}", r"changes .* answer"),
        ("{{ messages | length }}{{ messages[-1].content }}", "writes earlier messages in another"),
    ],
)
def test_a_template_that_cannot_be_learned_from_is_refused(
    template: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        learned(tokenizer_folder(tmp_path / "t", template), "Hi", "there")


PAIR = turns("Why?", "So.")


BRIEF = Message(role="system", content="Be brief.")
ROWS: dict[str, tuple[dict[str, Any], object]] = {
    "messages": (
        {"messages": [{"role": each.role, "content": each.content} for each in PAIR]},
        PAIR,
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        PAIR,
    ),
    "completion": ({"prompt": "Why?", "completion": "So."}, PAIR),
    "alpaca": ({"instruction": "Why?", "input": "", "output": "So.", "id": 7}, PAIR),
    "dolly": (
        {"instruction": "Why?", "context": "It is.", "response": "So."},
        turns("Why?\n\nIt is.", "So."),
    ),
    "system": ({"question": "Why?", "answer": "So.", "system": "Be brief."}, (BRIEF, *PAIR)),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in ("Wh", "y?")]},
                {"role": "assistant", "content": "So."},
            ]
        },
        PAIR,
    ),
    "no-answer": ({"question": "Why?", "answer": None}, None),
    "text": ({"text": "Once.", "messages": []}, "Once."),
    "nothing": ({"messages": []}, None),
}


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS)
def test_rows_are_text_conversations_or_pairs(row: dict[str, Any], expected: object) -> None:
    assert content_of(row, "text") == expected
    assert content_of({**row, "messages": "a text"}, "messages") == "a text"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, 'no text under "text"'),
        ({"messages": "[]", "prompt": 1, "completion": "y"}, "messages are written as text"),
        ({"text": "half \ud83d"}, "surrogates not allowed"),
        ({"prompt": "half \ud83d", "completion": "y"}, "surrogates not allowed"),
        ({"prompt": 1, "completion": "y"}, 'under "prompt" is no text'),
        ({"messages": [{"role": "user"}]}, "a message is no object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a part that is no text",
        ),
        ({"text": 5}, 'under "text" is neither text nor messages'),
    ],
)
def test_a_row_that_is_none_of_them_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        content_of(row, "text")


# --- stores ---------------------------------------------------------------------------------------
def chats(folder: Path, name: str) -> Path:
    """Sixty conversations of different lengths, each with its number in it."""
    rows = []
    for number in range(60):
        texts = (
            f"What is {number}?",
            "N" * (number % 23) + f"{number}.",
            "Sure?",
            f"Yes, {number}",
        )
        messages = [{"role": each.role, "content": each.content} for each in turns(*texts)]
        rows.append({"messages": messages[: 2 + 2 * (number % 2)], "id": number})
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def opened(folder: Path, name: str = "chats.jsonl") -> TokenStore:
    tokenizer = tokenizer_folder(folder / "t")
    return store_for(str(chats(folder, name)), tokenizer, held_out_every=10)


def feed(store: TokenStore, *, seq_len: int = 160, global_batch: int = 4) -> Feed:
    return feed_of(store, seq_len=seq_len, global_batch=global_batch, seed=1)


def test_a_table_and_lines_give_the_same_store_of_whole_conversations(tmp_path: Path) -> None:
    stores = []
    for name in ("chats.jsonl", "chats.parquet"):
        folder = tmp_path / name
        folder.mkdir()
        stores.append(opened(folder, name=name))
    one, other = stores
    part = one.conversations(held_out=False)
    assert (part.tokens == other.conversations(held_out=False).tokens).all()
    assert (part.learned == other.conversations(held_out=False).learned).all()
    assert one.info.num_train_conversations == 54
    assert one.info.num_held_out_conversations == 6
    end = Tokenizer.from_file(str(tmp_path / "chats.jsonl" / "t" / "tokenizer.json"))
    assert one.info.stops == (end.token_to_id("<|im_end|>"),)
    assert one.info.end_of_text == end.token_to_id("<eos>")  # by the model's own configuration
    first = part.tokens[: part.starts[1]].tolist()
    assert end.decode(first, skip_special_tokens=False).startswith("<|im_start|>user\nWhat is 0?")


def test_packed_conversations_are_learned_token_by_token_and_see_only_themselves(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    part = store.conversations(held_out=False)
    fed = feed(store)
    for step in range(fed.steps_per_epoch):
        batch = fed.step(step, rank=0, world_size=1)
        assert batch.positions is not None
        assert batch.num_labels == (batch.labels != IGNORE).sum() == fed.num_labels(step)
        for row, sequence in enumerate(fed.sequences(step)):
            at = 0
            for member in members_of(fed, int(sequence)):
                own = slice(part.starts[member], part.starts[member + 1])
                size = own.stop - own.start
                assert (batch.tokens[row, at : at + size] == part.tokens[own]).all()
                assert (batch.positions[row, at : at + size] == np.arange(size)[: 160 - at]).all()
                # Position p predicts token p + 1: of the answers, and of nothing else.
                ids = part.tokens[own].astype(np.int64)
                expected = np.where(part.learned[own], ids, IGNORE)[1:]
                assert (batch.labels[row, at : at + size - 1] == expected).all()
                at += size
                # The last token of one is never asked for the first of the next.
                assert (batch.labels[row, at - 1 : at] == IGNORE).all()
            assert (batch.labels[row, max(0, at - 1) :] == IGNORE).all()
            assert at >= 100 or sequence == NOTHING or step == fed.steps_per_epoch - 1
    # Also where its first token is to be learned.
    whole = replace(part, learned=np.ones_like(part.learned))
    packs = Packs(whole, seq_len=160, padding=0, isolates=True)
    sequences = np.arange(packs.num_sequences)
    assert packs.batch(sequences).num_labels == packs.num_labels(sequences)
    assert packs.num_labels(sequences) == len(part.tokens) - len(part.starts) + 1


@pytest.mark.parametrize("changes", [(2, 1, 4), (1, 4, 2)])
def test_every_conversation_comes_once_an_epoch_however_the_workers_change(
    changes: tuple[int, ...], tmp_path: Path
) -> None:
    store = opened(tmp_path)
    fed = feed(store)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        labels = 0
        for step in range(fed.steps_per_epoch):
            world_size = changes[step * len(changes) // fed.steps_per_epoch]
            number = epoch * fed.steps_per_epoch + step
            for rank in range(world_size):
                seen.update(members(fed, number, rank=rank, world_size=world_size))
                labels += fed.step(number, rank=rank, world_size=world_size).num_labels
        assert seen == Counter(range(54))
        assert labels == store.conversations(held_out=False).learned.sum()
    orders = [fed.sequences(step).tolist() for step in (0, fed.steps_per_epoch)]
    assert orders[0] != orders[1]


def test_what_is_too_long_loses_its_end_and_what_has_no_answer_left_is_out(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fed = feed(store, seq_len=48)
    lengths = np.diff(store.conversations(held_out=False).starts)
    cut = int((lengths > 49).sum()) + int(
        (np.diff(store.conversations(held_out=True).starts) > 49).sum()
    )
    assert fed.notes == [f"cut off at --seq-len 48: {cut} of 60 conversations"]
    # Just enough for one token of the answers to questions of one figure.
    (note,) = feed(store, seq_len=29).notes
    assert note.endswith("; left out, because no answer is left: 50")
    with pytest.raises(InputError, match=r"54 conversations in .* fewer than the 64 of one step"):
        feed(store, global_batch=64)


def test_without_packing_each_conversation_has_a_sequence_and_needs_no_positions(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    fed = feed_of(store, seq_len=160, global_batch=4, seed=1, packs=False)
    assert not fed.isolates
    assert fed.steps_per_epoch == -(-54 // 4)
    batch = fed.step(0, rank=0, world_size=1)
    assert batch.positions is None
    assert [len(members_of(fed, each)) for each in fed.sequences(0)] == [1, 1, 1, 1]
    assert batch.num_labels == (batch.labels != IGNORE).sum() == fed.num_labels(0)


def test_packing_is_tight_and_within_its_limit() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    packs = best_fit(lengths, 1024)
    filled = np.bincount(packs, weights=lengths)
    assert filled.max() <= 1024
    assert len(filled) <= 1.01 * -(-lengths.sum() // 1024)
    assert best_fit([1024, 1024, 1], 1024).tolist() == [0, 1, 2]


def test_mixed_rows_and_sets_without_answers_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "t")
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "Why?", "completion": "So."}\n{"text": "Once."}\n')
    with pytest.raises(InputError, match="some lines or rows hold text, and others conversations"):
        store_for(str(mixed), tokenizer)
    silent = tmp_path / "silent.jsonl"
    silent.write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n' * 30)
    with pytest.raises(InputError, match="has 0 conversations with an answer"):
        store_for(str(silent), tokenizer)


def test_another_template_is_another_store_and_is_read_from_a_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text(CHATML.replace("<|im_end|>", "</s>"))
    other = store_for(
        str(tmp_path / "chats.jsonl"), tmp_path / "t", held_out_every=10, template=str(template)
    )
    assert other.info.key != store.info.key
    assert other.info.stops != store.info.stops
    with pytest.raises(InputError, match=r"--chat-template .*none.jinja cannot be read"):
        vocabulary.read(tmp_path / "t", template=str(tmp_path / "none.jinja"))


def test_the_end_of_text_is_what_the_models_files_say(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    words = vocabulary.read(folder)
    assert words.tokenizer.id_to_token(words.end_of_text) == "<eos>"
    assert words.named["bos_token"] == "<bos>"
    (folder / "tokenizer_config.json").unlink()
    assert vocabulary.read(folder).end_of_text == words.tokenizer.token_to_id("</s>")  # by its name
    (folder / "config.json").write_text('{"eos_token_id": [5, 259]}')
    assert vocabulary.read(folder).end_of_text == 259
    assert vocabulary.read(pretrained.tokenizer_file("bytes", "", runs="")).end_of_text == 256


def test_what_serves_a_model_names_the_end_of_its_answers_first(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    words = vocabulary.read(folder)
    end, stop = words.end_of_text, words.tokenizer.token_to_id("<|im_end|>")
    given = {"eos_token_id": end, "temperature": 0.6, "_from_model_config": True}
    (folder / "generation_config.json").write_text(json.dumps(given))
    files = serving.files(folder / "tokenizer.json", template="", stops=[stop])
    generation = json.loads(files["generation_config.json"])
    assert generation["eos_token_id"] == [stop, end]
    assert serving.stops_of(files["generation_config.json"]) == [stop, end]
    assert generation["temperature"] == 0.6
    assert "_from_model_config" not in generation
    config = json.loads(files["tokenizer_config.json"])
    assert config["chat_template"] == CHATML == files["chat_template.jinja"].decode()
    assert config["bos_token"] == "<bos>"
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    # A run on text with a tokenizer that has no template makes none up.
    plain = pretrained.tokenizer_file("bytes", "", runs="")
    files = serving.files(plain, template="", stops=[])
    assert sorted(files) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 256
