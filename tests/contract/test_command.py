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
if [ -n "$B" ]; then
    A=2
    torchrun in_if.py
fi
run() {
    torchrun in_function.py
}
mkdir out 2>/dev/null || torchrun alternative.py
torchrun --nnodes $C \\
    "certain file.py" > log.txt
torchrun --nnodes $N argument.py && torchrun --rank $(hostname) output.py
torchrun --nnodes $A branch.py
X=4 LAUNCHER="python -u -m torch.distributed.run --nnodes 3"
$LAUNCHER -m pkg.variable
echo torchrun echo.py
env D=4 timeout 9 torchrun prefix.py &
cat > job.sh <<'EOF' && echo done
torchrun document.py
EOF
cat <<< torchrun
. other.sh
"""


def test_a_script_gives_its_commands_and_which_of_them_are_certain(tmp_path: Path) -> None:
    files = {"src/run.sh": tmp_path / "run.sh", "other.sh": tmp_path / "other.sh"}
    files["src/run.sh"].write_text(SCRIPT)
    files["other.sh"].write_text("bash src/run.sh\ntorchrun other.py\n")
    found = [each for each in command.read(["bash", "run.sh"], files) if each.launcher]
    assert [(each.program, each.is_certain) for each in found] == [
        ("in_if.py", False),
        ("in_function.py", False),
        ("alternative.py", False),
        ("certain file.py", True),
        ("argument.py", False),
        ("output.py", False),
        ("branch.py", False),
        ("-m pkg.variable", True),
        ("prefix.py", True),
        ("other.py", True),
    ]
    certain, prefix = found[3], found[8]
    assert certain.arguments == ("--nnodes", "$C", '"certain file.py"')
    assert certain.assignments[:3] == ("export A=1", 'B="two words"', "C='$A'")
    assert "export D=4" in prefix.assignments
    assert not [each for each in prefix.assignments if "(" in each or "`" in each], "nothing runs"


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
    ],
)
def test_the_program_of_a_command_is_known_where_it_is_certain(
    words: list[str], program: str
) -> None:
    assert command.SimpleCommand.of(words).program == program
