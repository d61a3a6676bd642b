"""How programs whose nodes were killed are judged; they run with ``make abuse``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rehearsal import abuse
from rehearsal.abuse import Ended, Program
from rehearsal.watch import Line

PROGRAM = Program(
    name="p",
    words=("torchrun", "p.py"),
    ends_with={"steps": 90},
    saves=r"^step (\d+) saved",
)
#: When it was killed, and what it had said by then, at second 100 and before.
KILL = 100.0
BEFORE = ((0, "rank 0 of 2 starts at step 0"), (0, "rank 1 of 2 starts at step 0"))
SAVES = ((40, "step 10 saved"), (59, "step 20 saved"), (90, "step 30 saved"))
AFTER = ((110, "rank 1 of 2 starts at step 20"), (110, "rank 0 of 2 starts at step 20"))
RESULT = ((150, 'result {"steps": 90, "loss": 0.5}'),)


def ended(*lines: tuple[float, str], exit_code: int = 0) -> Ended:
    found = [Line(at=at, text=text) for at, text in lines]
    return Ended(exit_code=exit_code, lines=found, kills=(KILL,))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((*BEFORE, *SAVES, *AFTER, *RESULT), []),
        ((*BEFORE, *SAVES, AFTER[0], AFTER[0], *RESULT), ["ranks [1, 1] in the last start"]),
        ((*BEFORE, *SAVES, *AFTER), ["no result"]),
        (
            (*BEFORE, *SAVES, *AFTER, (150, 'result {"steps": 80, "loss": 0.6}')),
            ["steps is 80, not 90", "loss is 0.6, undisturbed 0.5"],
        ),
        (
            (*BEFORE, *SAVES, AFTER[0], (110, "rank 0 of 2 starts at step 10"), *RESULT),
            ["resumed at 10, although 20 had been saved long before"],
        ),
        (
            (*BEFORE, *SAVES, AFTER[0], (110, "rank 0 of 2 starts at out/checkpoint-30"), *RESULT),
            [],
        ),
    ],
)
def test_what_must_not_be_is_named(lines: Sequence[tuple[float, str]], expected: list[str]) -> None:
    assert ended(*lines).faults(PROGRAM, {"loss": 0.5}) == expected


def test_an_exit_code_and_a_missing_end_are_named_where_a_program_prints_no_result() -> None:
    program = replace(PROGRAM, has_ranks=False, ends_saying="all done")
    assert ended((1, "all done")).faults(program, {}) == []
    assert ended((1, "begun"), exit_code=7).faults(program, {}) == [
        "exit code 7",
        "it has not printed 'all done'",
    ]


def test_the_table_has_a_line_for_each_run() -> None:
    good = ended(*BEFORE, *SAVES, *AFTER, *RESULT)
    rows = [
        abuse.Row(program="p", seed=seed, ended=good, faults=faults)
        for seed, faults in ((0, []), (1, ["exit code 7", "no result"]))
    ]
    assert abuse.table(rows).splitlines() == [
        "program  seed  kills  rank 0 starts at  took  ended",
        "p        0     1      0, 20             0 s   as it should be",
        "p        1     1      0, 20             0 s   exit code 7; no result",
    ]


def test_each_program_is_there(tmp_path: Path) -> None:
    for program in abuse.PROGRAMS:
        script = next(word for word in " ".join(program.words).split() if word.endswith(".py"))
        assert (program.bring(tmp_path) / script).is_file()
