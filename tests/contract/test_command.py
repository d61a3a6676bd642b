"""Shell text is read as a shell would: its commands, and which of them run in any case."""

from pathlib import Path

import pytest

from contract import command

SCRIPT = """\
#!/bin/bash
set -e  # it's a comment with a quote
export A=1
B="two words" C='$A'
N=${1:-8}
DATA=$(python download.py) ROOT=`pwd`
mkdir -p out && cd out
torchrun --nnodes $C \\
    "certain file.py" > log.txt
torchrun --nnodes $N argument.py && torchrun --rank $(hostname) output.py
X=4 LAUNCHER="python -u -m torch.distributed.run --nnodes 3"
$LAUNCHER -m pkg.variable
echo torchrun echo.py
env D=4 timeout 9 torchrun prefix.py &
. other.sh
"""


def test_a_script_gives_its_commands_and_which_of_them_are_certain(tmp_path: Path) -> None:
    files = {"src/run.sh": tmp_path / "run.sh", "other.sh": tmp_path / "other.sh"}
    files["src/run.sh"].write_text(SCRIPT)
    files["other.sh"].write_text("bash src/run.sh\ntorchrun other.py\n")
    found = [each for each in command.read(["bash", "run.sh"], files) if each.launcher]
    assert [(each.program, each.is_certain) for each in found] == [
        ("certain file.py", True),
        ("argument.py", False),
        ("output.py", False),
        ("-m pkg.variable", True),
        ("prefix.py", True),
        ("other.py", True),
    ]
    certain, prefix = found[0], found[4]
    assert certain.arguments == ("--nnodes", "$C", '"certain file.py"')
    assert certain.assignments[:3] == ("export A=1", 'B="two words"', "C='$A'")
    assert "export D=4" in prefix.assignments
    assert not [each for each in prefix.assignments if "(" in each or "`" in each], "nothing runs"


@pytest.mark.parametrize(
    "text",
    [
        '[ "$N" = 1 ] && torchrun x.py',
        "mkdir out 2>/dev/null || torchrun x.py",
        "if true; then exec torchrun y.py; fi\ntorchrun x.py",
        "run() {\ntorchrun x.py\n}\nrun",
        "function run {\ntorchrun x.py\n}",
        "for i in 1 2; do torchrun x.py; done",
        "N=1; read -r N; torchrun --nnodes $N x.py",
        "A='--nnodes 1'\nA+=':8'\ntorchrun $A x.py",
        "N=1\nunset N\ntorchrun --nnodes ${N:-2} x.py",
        ': "${N:=2}"\ntorchrun --nnodes $N x.py',
        "source /mnt/env.sh\ntorchrun --nnodes $N x.py",
        'A=(--nnodes 1)\ntorchrun "${A[@]}" x.py',
        "cat <<END-X\ntorchrun x.py\nEND-X",
        "exit 0; torchrun x.py",
        "exec torchrun y.py\ntorchrun x.py",
        "pip install deepspeed x.py",
        'CMD="cd x && ${CMD}"\n${CMD}\n(torchrun x.py)',
    ],
)
def test_what_may_not_be_run_as_it_stands_is_in_doubt(tmp_path: Path, text: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    found = [*command.read(["bash", "run.sh"], {"run.sh": script})]
    launched = [each for each in found if each.launcher and each.program == "x.py"]
    assert not any(each.is_certain for each in launched)
    assert bool(launched) is ("pip" not in text)


def test_large_files_are_no_scripts_and_long_words_no_names(tmp_path: Path) -> None:
    data = tmp_path / "test"
    data.write_text("torchrun x.py\n" * 100_000)
    words = ["sh", "-c", f"test -f y; ./test; {'a' * 200_000} --x"]
    assert not [each for each in command.read(words, {"test": data}) if each.launcher]
    assert not [name for each in command.read(words, {}) for name in each.named]


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["python", "-u", "train.py", "x.py"], "train.py"),
        (["python3.12", "-m", "pkg.train"], "-m pkg.train"),
        (["python", "-c", "import x.py"], ""),
        (["bash", "-lc", "python train.py"], ""),
        (["torchrun", "--no-python", "run.sh"], ""),
        (["./run.sh"], "./run.sh"),
        (["some-program", "train.py"], ""),
        (["python", "it's.py"], "it's.py"),
        (["python", "-mpkg.train", "conf.py"], ""),
        (["python", "convert", "out.py"], ""),
        (["python", "-", "out.py"], ""),
        (["bash", "-o", "pipefail", "run.sh"], "run.sh"),
        (["tune", "run", "full_finetune.py"], ""),
    ],
)
def test_the_program_of_a_command_is_known_where_it_is_certain(
    words: list[str], program: str
) -> None:
    assert command.SimpleCommand.of(words).program == program
