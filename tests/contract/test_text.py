"""Figures are written as people read them."""

import pytest

from contract import text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (-0.5, "0 s"),
        (12, "12 s"),
        (42.13, "42.1 s"),
        (59.96, "1 min 0 s"),
        (185, "3 min 5 s"),
        (3599.7, "1 h 0 min"),
        (7620, "2 h 7 min"),
    ],
)
def test_durations_are_written_for_people(seconds: float, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.51, "0.51"), (7, "7"), (950.2, "950"), (23_450, "23,450"), (11_175_370, "11.18 M")],
)
def test_large_numbers_are_short(value: float, words: str) -> None:
    assert text.compact(value) == words


@pytest.mark.parametrize(
    ("num", "words"), [(1, "0"), (2, "0, 1"), (3, "0, 1, 2"), (1004, "0, 1, 2 and 1,001 more")]
)
def test_many_names_are_cut(num: int, words: str) -> None:
    assert text.listed([str(number) for number in range(num)], most=3) == words


def test_a_program_is_one_word_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/a b/python")
    monkeypatch.setattr("pathlib.Path.exists", lambda _: True)
    assert text.program("python") == "'/a b/python'"
