"""Words of other systems in a command are refused on the laptop where they certainly cannot run,
and warned of where a program may mean them."""

import re
import shlex
from pathlib import Path

import pytest

from contract.nodes import Range
from tests.published.launch_lines import LINES, Line
from tests.trainctl.conftest import Cli
from trainctl.aws.errors import UsageError
from trainctl.jobs import other_systems
from trainctl.jobs.code_folder import CodeFolder
from trainctl.jobs.programs import Program


def program(folder: Path, words: list[str], **files: str) -> Program:
    """The program of a folder with ``main.py`` and these files, whose ``_`` is a dot."""
    for name, text in {"main_py": "", **files}.items():
        (folder / name.replace("_", ".")).write_text(text)
    return Program(CodeFolder.of(folder), words)


def words_of(line: Line) -> list[str]:
    return ["bash", "run.sh"] if line.is_script else line.text.split()


@pytest.mark.parametrize("line", LINES, ids=[line.source for line in LINES])
def test_launch_lines_of_other_systems_are_refused_here_or_left_to_the_head(
    tmp_path: Path, line: Line
) -> None:
    run = {"run_sh": line.text} if line.is_script else {}
    found = program(tmp_path, words_of(line), **run)
    if not line.on_laptop:
        found.check(Range(2, 2))
        assert found.foreign((), has_own_base=False) == []
        return
    with pytest.raises(UsageError, match=line.refusal):
        found.foreign((), has_own_base=False)


@pytest.mark.parametrize(
    ("command", "files", "warned"),
    [
        # A shell reads them, or gives a default.
        ("sh -c 'torchrun --nnodes $NUM_NODES main.py'", {}, ""),
        ("bash run.sh", {"run_sh": "torchrun --nnodes ${SLURM_NNODES:-1} main.py"}, ""),
        ("bash run.sh", {"run_sh": "SLURM_NNODES=2\ntorchrun --nnodes $SLURM_NNODES main.py"}, ""),
        ("python -c 'print(\"$HOME is text\")'", {}, ""),
        # Hydra's and OmegaConf's own; the program expands them itself; a branch decides.
        ("python main.py dir=${now:%Y-%m-%d} x=${oc.env:HOME} y=${model.dim}", {}, ""),
        ("python main.py name=${model}", {}, "model"),
        ("python main.py --template $INPUT", {}, "INPUT"),
        ("python main.py $DATA", {"main_py": "import os\nos.path.expandvars('x')"}, "DATA"),
        ("bash run.sh", {"run_sh": "if true; then\npython main.py $SM_MODEL_DIR\nfi"}, "SM_MODEL"),
        # A test may do without a value, and so may a name; a script has names of its own.
        (
            "bash run.sh",
            {"run_sh": '[ -n "$SLURM_NNODES" ] && module load x\ntorchrun main.py'},
            "SLURM_NNODES",
        ),
        ("bash run.sh", {"run_sh": "torchrun main.py run-$SLURM_JOB_ID"}, "SLURM_JOB_ID"),
        ("bash run.sh", {"run_sh": "app_id=$(date)\npython main.py $app_id"}, ""),
        ("sleep infinity", {}, "hang-minutes"),
        ("jupyter lab", {"requirements_txt": "jupyterlab"}, "trainctl open RUN --port"),
        # Programs: of the images, of the folder, or perhaps of its packages.
        ("nvidia-smi", {}, ""),
        ("litgpt finetune", {"pyproject_toml": "[project.scripts]\nlitgpt = 'main:run'"}, ""),
        ("litgpt finetune", {"requirements_txt": "litgpt"}, ""),
        ("./own.sh", {"own_sh": "true"}, ""),
    ],
)
def test_what_a_program_may_mean_is_a_warning_at_most(
    tmp_path: Path, command: str, files: dict[str, str], warned: str
) -> None:
    found = program(tmp_path, shlex.split(command), **files).foreign((), has_own_base=False)
    assert [warned in each for each in found] == [True] * bool(warned)


def test_variables_and_base_of_a_job_excuse_its_words(tmp_path: Path) -> None:
    named = program(tmp_path, ["python", "main.py", "$DATA"])
    assert len(named.foreign(["DATA"], has_own_base=False)) == 1  # no shell reads it
    assert program(tmp_path, ["mpirun", "main.py"]).foreign((), has_own_base=True) == []
    assert program(tmp_path, ["mpirun", "main.py"]).foreign(["PATH"], has_own_base=False) == []


def test_the_page_prints_the_names_that_the_messages_have() -> None:
    page = Path("docs/other-systems.md").read_text()
    for system, names in other_systems.NAMES.items():
        assert system in page
        for name, ours in names.items():
            row = next(line for line in page.splitlines() if f"`{ours}`" in line)
            assert f"`{name}`" in row
    for theirs, ours in other_systems.COMMANDS.items():
        assert re.search(rf"`{ours}`\s\([^)]*`{theirs}`", page)


def test_a_first_word_of_another_system_gets_ours(cli: Cli) -> None:
    for theirs, ours in other_systems.COMMANDS.items():
        assert f"here it is trainctl {ours}\n" in cli.refuses(f"{theirs} first")
