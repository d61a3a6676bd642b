"""Proves that rows are read from the kinds of files that data sets come as, and what is none of
them is refused with the place."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InputError
from training.data import documents
from training.data.conversations import Conversation, Message

ROWS = [{"text": f'number {i}: [a], {{b}} and "c\\"\n', "more": {"é": [i]}} for i in range(40)]
TEXTS = [str(each["text"]) for each in ROWS]


def read(file: Path, field: str = "text") -> list[Any]:
    rows = documents.Rows(text_field=field)
    found = [*documents.documents(documents.text_files(str(file)), rows, None)]
    rows.check()
    return found


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n",
        "\n".join(map(json.dumps, ROWS)),
        "\ufeff" + json.dumps(ROWS),
    ],
    ids=["a list over lines", "a row per line", "with a byte-order mark"],
)
def test_json_is_a_list_of_rows_or_a_row_per_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert read(tmp_path / "a.json") == TEXTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": b}]', "a.json .*Expecting value"),
        ('[{"text": "a"}, 5]', "a.json, row 2"),
        ('{"text": "a"}\n{', "a.json, line 2"),
        ('{"text": "a"}\n"{\\"text\\": \\"b\\"}"', "a.json, line 2"),
        ('{"data": [{"text": "a"}]}', 'a.json, row 1: .*"text"'),
        ("[" * 100_000, "a.json "),
        ("id,words\n1,a\n", "a.csv .*'text' .*id, words.* --text-field"),
        ("id,text\n1,a\n2,b, c\n", "a.csv, line 3: 3 .* 2 "),
        ('id,text\n1,"a\n', "a.csv, line 2"),
        ("", "a.csv "),
        (
            'messages\n"[{""role"": ""user""}]"\n',
            r"a.csv, line 2: message 1 \(user\)",
        ),
    ],
)
def test_what_is_no_list_and_no_table_is_refused_with_its_place(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / message.partition(" ")[0].strip(",")
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        read(file)


def test_a_table_is_read_with_what_its_first_row_names(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"one, ""two""\r\nthree"\r\n\r\n2,\r\n3,four\r\n')
    assert read(file) == ['one, "two"\nthree', "four"]
    assert read(file, "id") == ["1", "2", "3"]
    file.write_text("instruction,input,output\nAdd,1 and 2,3\n")
    asked = Message(role="user", content="Add\n\n1 and 2")
    assert read(file) == [Conversation(messages=(asked, Message(role="assistant", content="3")))]


def test_files_that_only_describe_a_data_set_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps([{"text": "about it"}]))
    assert read(tmp_path) == ["about it"]
    (tmp_path / "A.CSV").write_text("text\nitself\n")
    assert read(tmp_path) == ["itself"]
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a.jsonl").write_text('{"text": "a copy"}\n')
    assert read(tmp_path) == ["itself"]
    (tmp_path / "a.jsonl").write_text('{"text": "first of all"}\n')
    assert read(tmp_path) == ["first of all"]


@pytest.mark.parametrize(
    ("trained", "others"),
    [
        # Files and folders (the Hub's docs, datasets-file-names-and-splits).
        ("train-00000-of-00002|train-00001-of-00002", "validation|test-00000-of-00001"),
        ("train/part", "test/part|validation/part"),
        ("my_train", "my_test"),
        ("alpaca-train", "alpaca-val|alpaca-test"),
        ("training", "validation"),
        ("data.train", "data.test"),
        ("2024 training", "2024 testing"),
        ("sft_train_v2", "sft_evaluation_v2|sft.eval.1"),
        ("train_sft|train_gen", "test_sft|test_gen"),
        # Words of more letters are none, and one name may have both kinds.
        ("trained|contest|devices", ""),
        ("train_test_split", ""),
        ("test-1|test-2", ""),
    ],
)
def test_splits_are_words_between_any_separators(trained: str, others: str, tmp_path: Path) -> None:
    wanted, rest = (
        {f"{name}.jsonl" for name in each.split("|") if name} for each in (trained, others)
    )
    for name in wanted | rest:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    unread: list[str] = []
    found = documents.text_files(str(tmp_path), unread=unread)
    assert {str(each.relative_to(tmp_path)) for each in found} == wanted
    assert sorted(unread) == sorted(Path(name).name for name in rest)


def test_rows_win_over_plain_text_beside_them_and_kinds_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    (tmp_path / "README.txt").write_text("\ufeffabout it")
    unread: list[str] = []
    assert [each.name for each in documents.text_files(str(tmp_path), unread=unread)] == ["a.jsonl"]
    assert unread == ["README.txt"]
    assert read(tmp_path / "README.txt") == ["about it"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "Why?", "completion": "So."}')
    with pytest.raises(InputError, match=r"a\.jsonl has text, .*b\.jsonl conversations"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.ndjson", "a.jsonlines", "a.jl", "a.md.gz", "rows"])
def test_a_kind_that_is_not_known_is_named(name: str, tmp_path: Path) -> None:
    content = b' {"text": "x"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(InputError, match=f"{re.escape(name)} is of a kind that is not known"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "source", "named"),
    [
        # datasets.Dataset.save_to_disk
        (("data-00000-of-00001.arrow", "state.json"), "", "write it as .parquet"),
        (("a.jsonl.zst",), "", "files must end in"),
        (("a.parquet/",), "a.parquet", "a.parquet"),
        (("a.txt/",), "a.txt", "a.txt"),
        (("a.xlsx",), "a.xlsx", "of a kind that is not known"),
    ],
)
def test_what_cannot_be_read_says_why(
    files: tuple[str, ...], source: str, named: str, tmp_path: Path
) -> None:
    for name in files:
        file = tmp_path / name
        file.mkdir() if name.endswith("/") else file.write_text("{}")
    with pytest.raises(InputError, match=named):
        read(tmp_path / source)


def test_a_folder_of_parts_may_be_named_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "all.csv").mkdir()
    (tmp_path / "all.csv" / "part-0.csv").write_text("text\none\n")
    (tmp_path / "all.csv" / "part-1.csv").write_text("text\ntwo\n")
    assert read(tmp_path) == read(tmp_path / "all.csv") == ["one", "two"]
