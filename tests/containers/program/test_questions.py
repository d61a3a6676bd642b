"""A program that certainly cannot run on its nodes is refused on the head, by the launcher's own
parser, the shell and Python; what only the nodes can know is left to them."""

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from containers.program.start import ask
from containers.program.start.code import STARTUP
from containers.program.start.on_node import NodePlace, accelerate_config, launcher_environment
from containers.program.start.questions import Questions
from contract.errors import InputError
from contract.nodes import Range
from tests.published.launch_lines import LINES, Line

#: Options of torchrun on two nodes with a GPU each: it can start, and it cannot.
START = (
    "--nnodes 2 train.py",
    "--nnodes 1:4 train.py",
    "train.py --nnodes 1",
    "--master-addr 10.0.0.1 train.py",
    "--nproc-per-node gpu train.py",
    "--rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 train.py",
    "-m pkg.train --node-rank 0",
)
FAIL = (
    "--standalone train.py",
    "--nnodes 1 train.py",
    "--nnodes=1:1 train.py",
    "--nproc_per_node=2 train.py",
    "--node_rank 0 train.py",
    "--master-addr 127.0.0.1 train.py",
    "--rdzv-backend c10d --rdzv-endpoint localhost:29500 train.py",
    # Without an address c10d means this host.
    "--rdzv-backend c10d train.py",
)


@pytest.mark.parametrize(
    ("words", "num_nodes", "gpus", "starts"),
    [
        *((words, 2, 1, True) for words in START),
        *((words, 2, 1, False) for words in FAIL),
        ("--nproc-per-node 4 train.py", 2, 4, True),
        ("--nproc-per-node 8 train.py", 1, 4, False),
        ("--nproc-per-node 8 train.py", 2, 0, True),
        ("--standalone train.py", 1, 1, True),
        ("--rdzv-backend c10d train.py", 1, 1, True),
    ],
)
def test_torchrun_finds_the_nodes_of_a_job_or_does_not(
    monkeypatch: pytest.MonkeyPatch, words: str, num_nodes: int, gpus: int, starts: bool
) -> None:
    last = num_nodes - 1
    addresses = tuple(f"10.0.0.{i}" for i in range(num_nodes))
    place = NodePlace(number=last, rank=last, start=0, addresses=addresses, gpus=gpus)
    for name, value in launcher_environment(place).items():
        monkeypatch.setenv(name, value)
    assert bool([*ask.torchrun(words.split(), num_nodes, gpus)]) is not starts


@pytest.mark.parametrize(
    ("words", "file", "wrong"),
    [
        ("", {}, ""),
        ("--num_machines 4", {}, "num_machines"),
        ("--machine_rank 0", {}, "machine_rank"),
        ("--main_process_ip ::1", {}, "main_process_ip"),
        ("--num_processes 8", {}, ""),
        ("--num_processes 9", {}, "num_processes"),
        ("", {"num_machines": 1}, "num_machines"),
        ("", {"num_processes": 9}, "num_processes"),
        ("", {"main_process_ip": "localhost"}, "main_process_ip"),
    ],
)
def test_accelerate_finds_the_nodes_of_a_job_by_its_words_and_its_file(
    tmp_path: Path, words: str, file: dict[str, object], wrong: str
) -> None:
    place = NodePlace(number=1, rank=1, start=0, addresses=("10.0.0.0", "10.0.0.1"), gpus=4)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(json.loads(accelerate_config(place)) | file))
    given = ["--config_file", str(config), *words.split(), "train.py"]
    found = [*ask.accelerate(given, 2, 4)]
    assert [wrong in each for each in found] == [True] * bool(wrong)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"world_size": 16, "node_rank": 1, "master_addr": "10.0.0.1"}, ""),
        ({"world_size": 8, "node_rank": 1, "master_addr": "10.0.0.1"}, "world_size"),
        ({"world_size": 16, "node_rank": 0, "master_addr": "10.0.0.1"}, "node_rank"),
        ({"world_size": 16, "node_rank": 1, "master_addr": "127.0.0.1"}, "master_addr"),
        (ValueError("node_rank(1) != 0 is not valid."), "not valid: give --world_size"),
    ],
)
def test_composer_finds_the_nodes_of_a_job_or_does_not(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, object] | ValueError, wrong: str
) -> None:
    # Composer's launcher returns such a namespace, or raises (mosaicml 0.32.1).
    def parse() -> Namespace:
        if isinstance(found, ValueError):
            raise found
        return Namespace(nproc=torch.cuda.device_count(), **found)

    launcher = SimpleNamespace(_parse_args=parse)
    for name in ("composer", "composer.cli", "composer.cli.launcher"):
        monkeypatch.setitem(sys.modules, name, launcher)
    monkeypatch.setattr(torch.cuda, "device_count", torch.cuda.device_count)
    monkeypatch.setattr(sys, "argv", ["ask.py"])
    answers = [*ask.composer(["train.py"], 2, 8)]
    assert [wrong in each for each in answers] == [True] * bool(wrong)


@pytest.mark.parametrize(
    ("words", "own", "refused"),
    [
        # Each node by itself, which may be meant.
        ("--nnodes 1 --node-rank 0 --master_addr localhost main.py", {}, False),
        # A program has a variable of this name of its own.
        (
            "--nnodes 1 --node-rank 0 --master_addr localhost main.py",
            {"NUM_NODES": "auto"},
            False,
        ),
        ("--standalone main.py", {}, True),
        ("--master_addr localhost main.py", {}, True),
        ("--node-rank 1 main.py", {}, True),
        ("--rdzv-backend c10d main.py", {}, True),
    ],
)
def test_a_torchrun_that_would_wait_for_other_nodes_in_vain_ends_on_its_node(
    tmp_path: Path, words: str, own: dict[str, str], refused: bool
) -> None:
    place = NodePlace(number=0, rank=0, start=0, addresses=("10.0.0.1", "10.0.0.2"), gpus=0)
    (tmp_path / "main.py").write_text("print('ran')")
    # A program that starts it in its turn: no reader of commands sees that.
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words.split()],
        cwd=tmp_path,
        env={**os.environ, **launcher_environment(place), "PYTHONPATH": str(STARTUP), **own},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0, "ran" in done.stdout) == (refused, not refused)
    assert ("error: torchrun: --" in done.stderr) is refused


#: A script such as torchtitan's, with the default of a variable.
NGPU = 'NGPU=${NGPU:-"8"}\ntorchrun --nproc_per_node=${NGPU} train.py\n'
OPTIONAL = """\
import os, json
import helpers
from . import sibling
try:
    import apex
except ImportError:
    apex = None
def log():
    import comet_ml
if os.environ.get("X"):
    import neptune
"""


@pytest.mark.parametrize(
    ("command", "files", "nodes", "reason"),
    [
        ("torchrun train.py", {}, Range(1, 2), ""),
        ("torchrun --nnodes 3 train.py", {}, Range(1, 2), "--nnodes is 3"),
        ("torchrun --nnodes 2 train.py", {}, Range(1, 2), ""),  # it may get two
        ("python -m torch.distributed.launch --use_env train.py", {}, Range(1, 1), ""),
        ("sh -c 'accelerate launch --machine_rank $NODE_RANK train.py'", {}, Range(2, 2), ""),
        ("torchrun --node_rank $NODE_RANK train.py", {}, Range(2, 2), "invalid int value"),
        # The shell gives variables their values, and only a certain command is asked.
        ("bash run.sh", {"run.sh": NGPU}, Range(1, 1), "--nproc-per-node is 8"),
        ("bash run.sh 1", {"run.sh": "N=$1\ntorchrun --nnodes ${N:-4} train.py"}, Range(2, 2), ""),
        (
            "sh -c 'export PET_NNODES=1; torchrun train.py'",
            {},
            Range(2, 2),
            "--nnodes is 1",
        ),
        (
            "sh -c 'test -f x; if false; then torchrun --nnodes 1 train.py; fi;'",
            {"test/readme": ""},
            Range(2, 2),
            "",
        ),
        # Programs and modules.
        ("litgptx pretrain", {}, Range(1, 1), "litgptx cannot be run"),
        ("source run.sh", {"run.sh": ""}, Range(1, 1), "source cannot be run"),
        ("nvidia-smi", {}, Range(1, 1), ""),
        ("torchrun -m trian", {}, Range(1, 1), "trian"),
        ("python -m pkg.train", {"pkg/train.py": ""}, Range(1, 1), ""),
        ("python train.py", {"train.py": OPTIONAL, "helpers.py": ""}, Range(1, 1), ""),
        ("python train.py", {"train.py": "import no_such, triton"}, Range(1, 1), "no_such"),
        (
            "python src/train.py",
            {"src/train.py": "import near", "src/near.py": ""},
            Range(1, 1),
            "",
        ),
        (
            "python train.py",
            {
                "train.py": "import paths\nimport no_such",
                "paths.py": "",
                "sitecustomize.py": "print(1)",
            },
            Range(1, 1),
            "",
        ),
        ("python train.py", {"train.py": "x = f()\nimport no_such"}, Range(1, 1), ""),
        ("python train.py", {"train.py": "x = = 1"}, Range(1, 1), r"train\.py, line 1"),
        (
            "sh -c 'pip install no_such && python train.py'",
            {"train.py": "import no_such"},
            Range(1, 1),
            "",
        ),
    ],
)
def test_only_a_certain_no_ends_a_job_before_its_workers_come(
    tmp_path: Path, command: str, files: dict[str, str], nodes: Range, reason: str
) -> None:
    ask_about(tmp_path, shlex.split(command), files, nodes, reason)


@pytest.mark.parametrize(
    "line", [each for each in LINES if not each.on_laptop], ids=lambda line: line.source
)
def test_launch_lines_of_other_systems_end_a_job_before_its_workers_come(
    tmp_path: Path, line: Line
) -> None:
    words = ["bash", "run.sh"] if line.is_script else line.text.split()
    files = {"run.sh": line.text} if line.is_script else {}
    ask_about(tmp_path, words, files, Range(2, 2), line.refusal)


def ask_about(
    folder: Path, words: list[str], files: dict[str, str], nodes: Range, reason: str
) -> None:
    for name, text in {"train.py": "", "main.py": "", **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    questions = Questions(
        words=words,
        work=folder,
        variables={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        nodes=nodes,
        gpus=1,
        python=Path(sys.executable),
    )
    with pytest.raises(InputError, match=reason) if reason else nullcontext():
        questions.check()
