"""When a node of a program is killed, and how the program's end is judged.

``test_programs`` kills nodes of two of them.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from contract.nodes import HEAD, WORKER
from rehearsal import abuse, programs
from rehearsal.abuse import Ended, Kill, Moment
from rehearsal.programs import Program
from rehearsal.watch import Line, Node

PROGRAM = Program(
    name="p",
    words=("torchrun", "p.py"),
    ends_with={"steps": 90},
    progress=r"^step (\d+) saved",
    length=90,
    prints_saves=True,
    file="p.pt",
)
SILENT = replace(PROGRAM, progress="", length=8, has_ranks=False, ends_saying="all done")
#: When it was killed, and what it had said by then, at second 100 and before.
KILL = Kill(at=100.0, node=HEAD, progress=30, is_saved=True)
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
            (*BEFORE, SAVES[-1], AFTER[0], (110, "rank 0 of 2 starts at step 0"), *RESULT),
            ["it began anew, although the bucket had something to resume from"],
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
    assert ended((1, "all done")).faults(SILENT, {}) == []
    assert ended((1, "begun"), exit_code=7).faults(SILENT, {}) == [
        "exit code 7",
        "it has not printed 'all done'",
    ]


def due_after(
    program: Program, *texts: str, saved: bool = True, in_training: bool = True, part: float = 0.5
) -> bool:
    """Whether a kill is due when a job has printed these lines, at a part of the way."""
    moment = Moment(program, random.Random(0), in_training=in_training)
    moment._part = part
    return moment.is_due([Line(at=1, text=text) for text in texts], is_saved=lambda: saved)


def test_a_kill_hits_a_program_that_trains_and_could_resume() -> None:
    starts = ["node: running torchrun p.py on 2 nodes", *(text for _, text in BEFORE)]
    assert not due_after(PROGRAM, *starts)
    assert not due_after(PROGRAM, *starts, "step 40 saved")
    assert due_after(PROGRAM, *starts, "step 40 saved", "step 50 saved")
    assert not due_after(PROGRAM, *starts, "step 50 saved", saved=False)
    assert not due_after(PROGRAM, *starts[:2], "step 50 saved"), "one rank is missing"
    resumed = ["node: running torchrun p.py on 2 nodes", *(text for _, text in AFTER)]
    assert not due_after(PROGRAM, *starts, "step 50 saved", *resumed, "step 50 saved")
    assert due_after(PROGRAM, *starts, "step 50 saved", *resumed, "step 55 saved")
    assert not due_after(PROGRAM, *starts, part=0.0), "it has saved nothing since its start"
    by_epoch = replace(PROGRAM, progress=r"'epoch': '([\d.]+)'", steps=10)
    assert not due_after(by_epoch, *resumed, "{'epoch': '5.4'}")
    assert due_after(by_epoch, *resumed, "{'epoch': '5.5'}")


def test_other_kills_come_while_it_starts_or_after_some_of_its_lines() -> None:
    start = "node: running torchrun p.py on 2 nodes"
    assert not due_after(PROGRAM, "node: job p", in_training=False, part=0.0)
    assert due_after(PROGRAM, start, in_training=False, part=0.0)
    assert not due_after(PROGRAM, start, "one", in_training=False)
    assert due_after(PROGRAM, start, "one", "two", in_training=False)
    assert due_after(SILENT, start, "one", "two"), "it does not say when it trains"


def test_only_a_node_that_has_ranks_is_killed() -> None:
    nodes = [
        Node(began=at, kind=WORKER, task=f"t{at}", container=f"c{at}", address=f"10.0.0.{at}")
        for at in range(3)
    ]
    running = Line(at=1, text="node: running python train.py", task="head")
    ray = "(RayTrainWorker pid=96, ip=10.0.0.{})\x1b[0m rank {} of 2 starts at epoch 5"

    def start(*places: int) -> list[Line]:
        texts = (ray.format(place, rank) for rank, place in enumerate(places))
        return [running, *(Line(at=1, text=text, task="head") for text in texts)]

    def found(lines: Sequence[Line], spared: int | None = None) -> list[str]:
        return [each.container for each in abuse.with_ranks(nodes, lines, spared=spared)]

    assert found(start(0, 1)) == ["c0", "c1"]
    assert found([*start(0, 1), *start(2, 2)]) == ["c2"], "where they are now"
    assert found([running]) == ["c0", "c1", "c2"], "not known yet"
    own = [Line(at=1, text=BEFORE[rank][1], task=f"t{rank + 1}") for rank in range(2)]
    assert found([running, *own]) == ["c1", "c2"]
    assert found([running, *own], spared=0) == ["c2"]


def test_the_table_has_a_line_for_each_run() -> None:
    good = ended(*BEFORE, *SAVES, *AFTER, *RESULT)
    rows = [
        abuse.Row(program="p", seed=seed, ended=good, faults=faults)
        for seed, faults in ((0, []), (1, ["exit code 7", "no result"]))
    ]
    assert abuse.table(rows).splitlines() == [
        "program  seed  killed      rank 0 starts at  took  ended",
        "p        0     head at 30  0, 20             0 s   as it should be",
        "p        1     head at 30  0, 20             0 s   exit code 7; no result",
    ]


def test_each_program_is_there(tmp_path: Path) -> None:
    for program in programs.PROGRAMS:
        script = next(word for word in " ".join(program.words).split() if word.endswith(".py"))
        assert (program.bring(tmp_path) / script).is_file()
