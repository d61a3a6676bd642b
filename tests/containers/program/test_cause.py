"""A failed program's cause is the first error of all its nodes, with real torchrun on two nodes,
too."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from containers.program.start import code, on_node
from containers.program.watch.cause import (
    Error,
    LogEnd,
    cause,
    errors_in,
    success,
)
from containers.program.watch.cause import hidden as cause_hidden
from contract import nodes

SHAPES = Error(line="ValueError: shapes do not match (train.py:5)", at=2.0, node=1, rank="1")
FELT = Error(line="RuntimeError: [gloo] Connection closed by peer", at=1.0, node=0, rank="0")


ENDED = Error(line="exit code 1", at=3.0, node=1, rank="1")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([FELT, SHAPES], SHAPES),
        ([replace(SHAPES, at=3.0, rank="2"), SHAPES], SHAPES),
        ([replace(FELT, node=0)], FELT),
        # torchrun has started the processes again: what they failed of before was got over.
        (
            [replace(SHAPES, at=1.0, rank="0", attempt="9"), replace(SHAPES, attempt="10")],
            replace(SHAPES, attempt="10"),
        ),
        ([SHAPES, replace(FELT, attempt="1")], SHAPES),
        # What a launcher tells of a process without an exception.
        ([FELT, ENDED], ENDED),
        ([FELT, ENDED, replace(SHAPES, at=4.0)], replace(SHAPES, at=4.0)),
    ],
)
def test_the_first_error_of_the_last_start_is_the_cause(
    errors: list[Error], expected: Error
) -> None:
    assert cause(errors, code=1, node=0) == expected


def test_where_no_process_tells_the_log_does_or_the_exit_code() -> None:
    log = LogEnd()
    log.error, log.line = "KeyError: 'x' (train.py:3)", "no data"
    found = cause([FELT], code=1, node=1, log=log)
    assert found.reason("r1") == (
        "failed on node 1: KeyError: 'x' (train.py:3); trainctl logs r1 --node 1"
    )
    assert cause([SHAPES], code=1, node=0, log=log) == SHAPES
    assert cause([], code=7).reason("r1") == "failed: exit code 7; trainctl logs r1"
    log.error = ""
    assert cause([], code=2, log=log).line == "exit code 2 after 'no data'"
    for errors in ([], [replace(FELT, node=1)]):
        assert "(killed, perhaps out of memory)" in cause(errors, code=137, node=0).line


def test_the_last_traceback_of_a_log_that_is_not_felt_is_found() -> None:
    log = LogEnd()
    for line in (
        "KeyError: not in a traceback",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/tmp/train/work/train.py", line 5, in <module>',
        "[rank1]:     step()",
        '[rank1]:   File "/usr/lib/site-packages/torch/nn.py", line 9, in step',
        "[rank1]: ValueError: no such shape",
        "Traceback (most recent call last):",
        '  File "/bin/torchrun", line 8, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ):
        log.hear(line)
    assert log.error == "ValueError: no such shape (train.py:5)"
    log.hear("[rank1]: no data")
    log.hear("")
    assert log.line == "no data"


OF_RANK: Final = Error(line="exit code 2", at=3.0, node=0, rank="0")
TORCHRUN: Final = (
    "E1127 03:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:882] failed "
    "(exitcode: 2) local_rank: 0 (pid: 9) of binary: python",
    "Traceback (most recent call last):",
    '  File "/bin/torchrun", line 8, in <module>',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "=====",
    "  error_file: <N/A>",
    "  traceback : To enable traceback see: https://pytorch.org",
)


@pytest.mark.parametrize(
    ("lines", "errors", "expected"),
    [
        # argparse, click, fire, a recipe, with and without torchrun
        (["usage: t", "t.py: error: unrecognized arguments: --follow"], [], "t.py: error: unrec"),
        (["t.py: error: no --x", "usage: t [-h]", *TORCHRUN], [OF_RANK], "t.py: error: no --x"),
        (["[rank1]: Error: No such option: --x"], [], "Error: No such option: --x"),
        (["ERROR: Could not consume arg: --x", "Usage: t"], [], "ERROR: Could not consume arg"),
        (["reading", "error: the text has 1 documents: give more"], [], "the text has 1 documents"),
        # sys.exit(text)
        (["no data here"], [], "exit code 2 after 'no data here'"),
        (
            ["W1127 03:00 torch/distributed/elastic/agent.py:1] x", "no data", *TORCHRUN],
            [OF_RANK],
            "exit code 2 after 'no data'",
        ),
        # an exception tells more
        (["t.py: error: no --x"], [SHAPES], "ValueError: shapes"),
    ],
)
def test_a_program_that_ends_without_a_traceback_has_its_last_words_as_the_reason(
    lines: list[str], errors: list[Error], expected: str
) -> None:
    log = LogEnd()
    for line in lines:
        log.hear(line)
    found = cause(errors, code=2, node=0, log=log)
    assert found.line.startswith(expected)
    assert found.rank == (errors[0].rank if errors else "")
    assert "out of memory" in cause([], code=137, node=0, log=log).line, "it was killed"


def test_an_exception_of_a_program_that_succeeds_is_a_warning() -> None:
    assert success([FELT, ENDED], "r1", "") == ""
    assert success([FELT], "r1", "no file was saved") == "succeeded, but no file was saved"
    found = success([FELT, replace(SHAPES, at=3.0), SHAPES], "r1", "its newest file is old")
    assert found == (
        "succeeded, with an exception that was not caught on node 1, rank 1: ValueError: shapes do "
        "not match (train.py:5); trainctl logs r1 --node 1; its newest file is old"
    )


def test_the_error_of_a_process_that_its_parent_got_over_is_left_out(tmp_path: Path) -> None:
    def note(pid: int, parent: int, line: str) -> None:
        noted = {"at": pid, "parent": parent, "rank": "0", "attempt": "", "line": line}
        (tmp_path / f"{pid}.json").write_text(json.dumps(noted))

    note(3, 4, "ImportError: no flash_attn")  # tried by process 4
    note(4, 5, "ValueError: no such shape")
    note(5, 1, "ChildFailedError: rank 0")  # the launcher
    note(6, 5, "KeyError: 'x'")
    lines = {error.line.partition(":")[0] for error in errors_in(tmp_path)}
    assert lines == {"ValueError", "ChildFailedError", "KeyError"}


def test_what_is_no_note_is_left_out(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", "{}", '{"line": 1, "at": "x"}', "\xff")):
        (tmp_path / f"{number}.json").write_text(text)
    assert errors_in(tmp_path) == ()


# --- what processes note --------------------------------------------------------------------------
def environment(errors: Path, **more: str) -> dict[str, str]:
    """Of a program, as the launcher gives it."""
    errors.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {nodes.ENV_ERRORS: str(errors), "PYTHONPATH": str(code.STARTUP), "PATH": path}
    return {**os.environ, **own, **more}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def f():\n    raise ValueError('no\\nsecond line')\nf()", "ValueError: no (train.py:2)"),
        ("assert 1 == 2", "AssertionError (train.py:1)"),
        (
            # As a worker of a DataLoader brings its error to the process that reads from it.
            "raise RuntimeError('Caught\\n  File \"/a/data.py\", line 3, in f\\nOSError: x')",
            "OSError: x (data.py:3)",
        ),
        (
            # As torchrun does, of a rank that has ended with sys.exit().
            "import os; del os.environ['RANK']\n"
            "class Failed(Exception):\n"
            "    exitcode, pid = 3, 0\n"
            "    def get_first_failure(self): return 4, self\n"
            "raise Failed('=====')",
            "exit code 3",
        ),
        ("raise SystemExit(3)", None),
        (
            "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
            "ZeroDivisionError: division by zero (train.py:2)",
        ),
        ("import sys, threading\nthreading.Thread(target=sys.exit, args=(3,)).start()", None),
        ("import sys; sys.excepthook = lambda *_: None; 1 / 0", None),
    ],
)
def test_an_exception_that_nothing_catches_is_noted(
    tmp_path: Path, program: str, expected: str | None
) -> None:
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment(tmp_path / "errors", RANK="4", TORCHELASTIC_RESTART_COUNT="2"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0 or expected is None or "thread" in program
    found = errors_in(tmp_path / "errors", node=1)
    assert [(error.line, error.node, error.rank, error.attempt) for error in found] == (
        [(expected, 1, "4", "2")] if expected else []
    )
    assert expected is None or "Traceback" in done.stderr, "it is printed as ever"


#: Ends as its argument says.
ENDS = """
import os, signal, subprocess, sys
how = sys.argv[1]
if how == "fork":
    os.fork() or os._exit(0)
    os.wait()
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "child":
    subprocess.run([sys.executable, "x.py", "3"])
elif how == "twice":
    done = os.path.exists("first")
    open("first", "w").close()
    sys.exit(not done)
elif how == "_exit":
    os._exit(4)
elif how == "text":
    raise SystemExit("no data")
elif how == "raise":
    raise ValueError(how)
elif how == "SIGSEGV":
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "exec":
    os.execv(sys.executable, ["python", "x.py", "5"])
raise SystemExit(int(how) if how.isdecimal() else 0)
"""
EACH, BASH = ("sh", "bash"), ("bash",)


@pytest.mark.parametrize(
    ("script", "shells", "hidden"),
    [
        ("python x.py 3", EACH, "python x.py 3 ended with exit code 3"),
        ("python x.py text | tee log", EACH, "python x.py text ended with exit code 1"),
        ("f() { python -u x.py 3; true; }; f", EACH, "python -u x.py 3 ended with exit code 3"),
        ("(python x.py _exit) && ls", EACH, "python x.py _exit ended with exit code 4"),
        ("python x.py SIGSEGV", EACH, "python x.py SIGSEGV was killed"),
        ("python x.py fork", EACH, "python x.py fork was killed"),
        ("python x.py exec", EACH, "python x.py 5 ended with exit code 5"),
        ("python y.py", EACH, "python y.py ended with exit code 2"),
        ("python -m x 3", EACH, "python -m x 3 ended with exit code 3"),
        ("python - <<E\nraise SystemExit(3)\nE", EACH, "python - ended with exit code 3"),
        ("timeout 9 python x.py 3", EACH, "python x.py 3 ended with exit code 3"),
        ("cd sub; python ../x.py 3", EACH, "python x.py 3 ended with exit code 3"),
        (
            "A=3; python x.py $A; python x.py 0 || true",
            EACH,
            "python x.py 3 ended with exit code 3",
        ),
        ("python x.py 3; echo $?", EACH, "python x.py 3 ended with exit code 3"),
        ("bash -c 'python x.py 3; true'", EACH, "python x.py 3 ended with exit code 3"),
        # Other commands, which only bash tells of.
        ("cp none here", BASH, "cp none here ended with exit code 1"),
        ("./fails --lr 1", BASH, "./fails --lr 1 ended with exit code 9"),
        ("cd none", BASH, "cd none ended with exit code 1"),
        # It is dealt with.
        *(
            (script, EACH, "")
            for script in (
                "python x.py 3 || true",
                "python x.py 3 | tee log || echo failed",
                "if ! python x.py 3; then echo; fi",
                "if test -f x.py && python x.py 3; then echo; fi",
                "while ! python x.py twice; do true; done",
                "for i in 1 2 3; do python x.py twice && break; done",
                "python x.py twice; python x.py twice",
                "python x.py 3\n[ $? -ne 0 ] && exit 0",
                "python x.py 3 \\\n  --lr 1 ||\n  true",
                "python x.py 3; code=$?; echo",
                "python -c 'import nothing' || echo",
                "python -c 'import nothing' 2>/dev/null && A=1; true",
                "{ python x.py 3; } || true",
                "python -c \"raise SystemExit('; a/b')\" || echo",
                "python x.py raise || true",
                "! python x.py 3",
                "python x.py SIGSEGV & kill -9 $!",
                "timeout 9 python x.py SIGSEGV",
                "python x.py child",
                "python x.py 0; python x.py 0 1",
                "grep -q none x.py; test -f none; [ -f none ]; diff x.py y; A=$(grep none x.py)",
                "cp none here || true; ./fails && ls; if ./fails; then ls; fi",
                "python x.py raise",  # its exception is known
            )
        ),
    ],
)
def test_a_shell_that_goes_on_hides_no_failure_and_none_that_it_deals_with_is_reported(
    tmp_path: Path, script: str, shells: tuple[str, ...], hidden: str
) -> None:
    for shell in shells:
        place = tmp_path / shell
        (place / "sub").mkdir(parents=True)
        (place / "x.py").write_text(ENDS)
        (place / "run.sh").write_text(f"{script}\ntrue\n")
        (place / "fails").write_text("#!/bin/sh\nexit 9\n")
        (place / "fails").chmod(0o755)
        given = environment(place / "errors", BASH_ENV=str(on_node.BASH_ENV))
        # As a launcher does, which is no shell.
        done = subprocess.run([shell, "run.sh"], cwd=place, env=given, check=False, timeout=60)
        assert done.returncode == 0
        found = cause_hidden(place / "errors", {}, 0)
        assert found == ([f"{hidden} on node 0"] if hidden else []), shell
        assert bool(errors_in(place / "errors")) == (script == "python x.py raise")


def test_what_a_process_writes_beside_the_notes_harms_nothing(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]\n", "{}", '["x"]\n\1', "\xff")):
        (tmp_path / f"{number}.end").write_text(text)
    assert cause_hidden(tmp_path, {}) == []


PROGRAM = """
import os, signal, sys
import torch.distributed as dist

dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
dist.barrier()
if dist.get_rank() == 1:
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("shapes do not match")
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raises", "ValueError: shapes do not match (train.py:11)"),
        ("killed", "killed by SIGKILL"),
    ],
)
def test_torchruns_of_two_nodes_meet_and_tell_which_rank_has_failed(
    tmp_path: Path, end: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = []
    for rank in (0, 1):
        place = on_node.NodePlace(
            number=rank, rank=rank, start=0, addresses=("127.0.0.1", "127.0.0.2"), gpus=0
        )
        given = on_node.launcher_environment(place) | {"PET_MASTER_PORT": port}
        env = environment(
            tmp_path / str(rank), **given, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
        )
        running.append(
            subprocess.Popen(
                ["torchrun", "train.py", end],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [each.communicate(timeout=120)[0] for each in running]
    assert [each.returncode for each in running] == [1, 1], said
    assert all(f"rank {rank} of 2" in said[rank] for rank in (0, 1)), said
    errors = [error for rank in (0, 1) for error in errors_in(tmp_path / str(rank), rank)]
    expected = f"failed on node 1, rank 1: {reason}; trainctl logs r1 --node 1"
    assert cause(errors, code=1, node=0).reason("r1") == expected, errors
