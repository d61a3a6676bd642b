"""What a laptop reads of the command of ``--code``: where it runs, and what is probably wrong.

The folders have the shape of what people have: a repository with Ray in its tests, a package
that is started with ``-m``, a launcher inside a shell script, a script with optional imports.
"""

import json
import shlex
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from contract.nodes import Range
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.aws.errors import UsageError
from trainctl.jobs.code_folder import CodeFolder
from trainctl.jobs.programs import Program

DIST = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
#: A repository such as axolotl, torchtune or one with a single test for Ray.
FILES = {
    "train.py": DIST,
    "alone.py": "import argparse\nimport pandas\n",
    "tests/test_ray.py": "import ray\n",
    "recipes/dev/grpo.py": "import ray\n",
    "src/pkg/__init__.py": "",
    "src/pkg/cli/__init__.py": "",
    "src/pkg/cli/train.py": "from ..trainer import fit\n",
    "src/pkg/trainer.py": "from .backends import pool\n",
    "src/pkg/backends/__init__.py": "",
    "src/pkg/backends/pool.py": "def make():\n    import ray\n",
    "main.py": "import logic\n",
    "logic.py": "from helpers.deep import x\n",
    "helpers/deep.py": "try:\n    import ray\nexcept ImportError:\n    ray = None\n",
    "run.sh": "# python main.py\ncd .\nexport X=1\ntorchrun --nnodes 2 main.py\n",
    "ray.sh": "echo usage: ray.sh ARGUMENTS\nset -e\npython main.py --x\n",
    "pyproject.toml": "[project]\nname = 'pkg'\n",
}
Made = Callable[[dict[str, str]], Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A code folder with these files."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "code" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "code"

    return make


@pytest.mark.parametrize(
    ("words", "what"),
    [
        # Ray elsewhere in the folder.
        ("python train.py", ""),
        ("python alone.py", ""),
        # The launcher decides, whatever the program imports.
        ("torchrun main.py", ""),
        ("torchrun -m pkg.cli.train config.yml", ""),
        ("accelerate launch -m pkg.cli.train config.yml", ""),
        ("accelerate launch --num_processes 4 main.py", ""),
        ("python -u -m torch.distributed.run main.py", ""),
        ("python3 -m torch.distributed.launch --use-env main.py", ""),
        ("deepspeed --no_ssh --hostfile hosts main.py", ""),
        ("uv run torchrun main.py", ""),
        ("bash run.sh", ""),
        ("sh -c cd src && torchrun -m pkg.cli.train", ""),
        # What is published: axolotl, torchtune, DeepSpeed, Composer, Fabric, their repositories'
        # shell scripts, and what people put before a launcher.
        ("tune run --nproc_per_node 2 main.py", ""),
        ("composer -n 2 main.py", ""),
        ("python -m composer.cli.launcher main.py", ""),
        ("fabric run --devices=2 main.py", ""),
        ("lightning run model main.py", ""),
        ("accelerate-launch main.py", ""),
        ("python -m accelerate.commands.accelerate_cli launch main.py", ""),
        ("python -m deepspeed.launcher.runner main.py", ""),
        ("python -W ignore -X dev -m torch.distributed.run main.py", ""),
        ("uv run -m torch.distributed.run main.py", ""),
        ("coverage run -m torch.distributed.run main.py", ""),
        ("env -u X A=B nohup torchrun main.py", ""),
        ("sh -c pip install x&&(torchrun main.py)", ""),
        ("sh -c bash -lc 'torchrun main.py'", ""),
        ('sh -c export LAUNCHER="python -u -m torch.distributed.run"\n$LAUNCHER main.py', ""),
        ("sh -c torchrun \\\n --nnodes 2 \\\n main.py", ""),
        # The program uses Ray, itself or by a module of the folder.
        ("python main.py", "helpers/deep.py"),
        ("python -u ./main.py tests/test_ray.py", "helpers/deep.py"),
        ("python -m pkg.cli.train", "src/pkg/backends/pool.py"),
        ("python recipes/dev/grpo.py", "recipes/dev/grpo.py"),
        ("uv run main.py", "helpers/deep.py"),
        ("bash ray.sh", "helpers/deep.py"),
        ("sh -c cd recipes/dev && exec python grpo.py", "recipes/dev/grpo.py"),
        ("ray job submit -- x", "its command"),
        ("python3 -m verl.trainer.main_ppo data.train_files=x", "its command"),
        # A launcher that is an argument.
        ("python main.py torchrun x", "helpers/deep.py"),
        ("python main.py -m torch.distributed.run", "helpers/deep.py"),
        ("uv run main.py --launcher torchrun", "helpers/deep.py"),
    ],
)
def test_ray_is_looked_for_in_the_program_and_not_in_the_folder(
    made: Made, words: str, what: str
) -> None:
    first, _, rest = words.partition(" -c ")
    given = [first, "-c", rest] if rest else words.split()
    assert Program(CodeFolder.of(made(FILES)), given).of_ray == what


@pytest.mark.parametrize(
    ("source", "is_ray"),
    [
        ("if True:\n    from ray.train import report", True),
        ("import os, sys, ray, numpy", True),
        ("x = 1; import ray.tune as tune", True),
        ("print 'old'\nimport os, ray", True),
        ('"""\nimport ray\n"""', False),
        ("from .ray import x", False),
        ("import rayleigh", False),
        ("# import ray", False),
    ],
)
def test_a_program_that_imports_ray_uses_it(made: Made, source: str, is_ray: bool) -> None:
    found = Program(CodeFolder.of(made({"a.py": source})), ["python", "a.py"])
    assert bool(found.of_ray) is is_ray


@pytest.mark.parametrize(
    ("text", "words", "option", "nodes"),
    [
        # One process: of the four nodes that are deployed, one.
        ("import pandas\n", "python mine.py data.csv", [], 1),
        ("import torch\n", "python mine.py", [], 1),
        ("import pandas\n", "python mine.py", ["--nodes", "2"], 2),
        ("import pandas\n", "python mine.py", ["--on", "nodes"], 4),
        # Whatever may share the work, or look which part is its own.
        (DIST, "python mine.py", [], 4),
        ("from transformers import Trainer\n", "python mine.py", [], 4),
        ("from lightning import pytorch\n", "python mine.py", [], 4),
        ("import ignite.distributed as idist\n", "python mine.py", [], 4),
        ("from mmengine.runner import Runner\n", "python mine.py", [], 4),
        ("import os\nos.environ['NODE_RANK']\n", "python mine.py", [], 4),
        ("import pandas\n", "torchrun mine.py", [], 4),
        ("import pandas\n", "sh -c ./mine", [], 4),
    ],
)
@pytest.mark.usefixtures("account")
def test_a_script_of_one_process_gets_one_node_or_a_warning(
    code: Path, cli: Cli, text: str, words: str, option: list[str], nodes: int
) -> None:
    (code / "mine.py").write_text(text)
    said = cli("plan --json --code", str(code), *option, "--", *words.split())
    plan = json.loads(said.out)
    assert plan["nodes"]["high"] == nodes
    assert not option or said.err, "a warning"
    assert nodes > 1 or not said.err


def test_a_variable_that_each_node_sets_is_not_sent(account: Account, code: Path, cli: Cli) -> None:
    (code / "mine.py").write_text(DIST)
    own = ("--env", "MASTER_ADDR=localhost", "--env", "A=b", "--code", str(code))
    said = cli("submit --yes --nodes 2", *own, "--", "torchrun", "mine.py")
    assert "MASTER_ADDR" in said.err
    assert said.out.startswith("mine-20"), "the script's name"
    cli("submit --yes --nodes 1 --run other", *own, "--", "torchrun", "mine.py")
    several, one = (order.variables for order in account.orders)
    assert several == {name: one[name] for name in several}
    assert {*one} - {*several} == {"MASTER_ADDR"}


def test_where_the_head_trains_a_script_of_one_process_runs_there_and_nowhere_else(
    account: Account, code: Path, cli: Cli
) -> None:
    account.shape |= {"head_trains": True, "head_instance_type": "g5.12xlarge"}
    (code / "mine.py").write_text("import torch\n")
    words = ("--code", str(code), "--yes", "--", "python", "mine.py")
    cli("submit", *words)
    assert account.orders[0].nodes == Range(0, 0)
    assert "--nodes 0" in cli("submit --nodes 1 --run other", *words).err
    assert account.orders[1].nodes == Range(1, 1)


@pytest.mark.parametrize("words", ["bash run.sh", "sh -c ./run.sh"])
def test_scripts_that_name_themselves_or_each_other_are_read_once(made: Made, words: str) -> None:
    run = "echo 'usage: run.sh N'\nbash setup.sh\npython train.py\n"
    folder = made({"run.sh": run, "setup.sh": "# of run.sh\n. ./run.sh\n", "train.py": DIST})
    found = Program(CodeFolder.of(folder), words.split(maxsplit=2))
    assert [each.name for each in found.entries] == ["train.py"]


RUN = "torchrun train.py"
#: What git ignores, and what is uploaded.
IN_GIT = {
    **{".gitignore": "data\noutputs\n*.pt\n", "init.pt": "", "data/x.txt": ""},
    **{"outputs/last.pt": "", "real.yaml": "", "inner/base.toml": ""},
}
POETRY = {"pyproject.toml": "[tool.poetry.dependencies]\n"}
OF_SETTINGS = {"settings.py": "class A:\n    max_hours: int\n"}


@pytest.mark.parametrize(
    ("text", "files", "words", "warned"),
    [
        # Lists of packages that are not read.
        (DIST, {"environment.yml": "dependencies:\n- einops\n"}, RUN, ["environment.yml"]),
        (DIST, POETRY, RUN, ["[tool.poetry]"]),
        (DIST, {"setup.py": "", "Pipfile": ""}, RUN, ["Pipfile, setup.py"]),
        (DIST, {"requirements-dev.txt": ""}, RUN, ["requirements-dev.txt"]),
        (DIST, {"setup.py": "", "requirements.txt": "einops"}, RUN, []),
        # Options of submit behind the dashes.
        (DIST, {}, f"{RUN} --epochs 90 --follow", ["--follow"]),
        (DIST, {}, "python -u train.py --max-hours=3", ["--max-hours"]),
        (DIST, {}, "accelerate launch --env x train.py a --spot", ["--spot"]),
        (DIST, {}, "torchrun -m train --nodes 2", ["--nodes"]),
        # The program's own, by argparse or by the field of a dataclass.
        (DIST + "parser.add_argument('--follow')\n", {}, f"{RUN} --follow", []),
        ("class A:\n    max_hours: int\n", {}, f"{RUN} --max-hours 3", []),
        (DIST + "from settings import A\n", OF_SETTINGS, f"{RUN} --max-hours 3", []),
        (DIST, {}, "torchrun --nodes 1 train.py --epochs 90", []),
        (DIST, {}, "some-program --follow", []),
        # Paths that no node will have: ignored by git, in the settings, of this machine.
        (DIST, IN_GIT, f"{RUN} --ckpt init.pt --data data/x.txt", ["init.pt", "data/x.txt"]),
        (DIST, IN_GIT, "python train.py --data=data", ["data"]),
        (DIST, IN_GIT, "sh -c 'python train.py --resume outputs/last.pt'", ["outputs/last.pt"]),
        (DIST, IN_GIT, "axolotl train config.yml", ["config.yml"]),
        (DIST, IN_GIT, f"{RUN} --config conf/base.yaml", ["conf/base.yaml"]),
        (DIST, IN_GIT, f"{RUN} --x HOME/data /tmp", ["HOME/data"]),
        (DIST, {}, f"{RUN} --csv ../data", ["outside"]),
        # A path of another system; those that each node has, and what the program writes.
        (DIST, {}, f"{RUN} --data /fsx-shared/ILSVRC --tmp /tmp/x", ["/fsx-shared/ILSVRC"]),
        (DIST, {}, f"{RUN} --data /mnt/shared/a --log-dir /logs", []),
        ("x = = 1\n", {}, RUN, ["train.py, line 1"]),
        # What is uploaded, what the program writes, and what is no path.
        (DIST, IN_GIT, f"{RUN} --config real.yaml --config-name base.toml --dir inner", []),
        (DIST, IN_GIT, f"{RUN} --output_dir outputs --log data --metrics-out m.json", []),
        (DIST, IN_GIT, "sh -c 'python train.py > log.json'", []),
        (DIST, {}, RUN + " --prompt " + "\u8bf7" * 200, []),  # longer than a file's name can be
        (DIST, IN_GIT, RUN + ' https://host/x.json s3://bucket/y.yaml *.json key=1 {"a":1}', []),
    ],
)
def test_what_is_probably_wrong_is_a_warning_that_names_it(
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    files: dict[str, str],
    words: str,
    warned: list[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    folder = made({"train.py": text, **files})
    if ".gitignore" in files:
        subprocess.run(["git", "init", "-q", folder], check=True)
    given = shlex.split(words.replace("HOME", str(tmp_path)))
    options = ("follow", "max-hours", "env", "spot", "nodes")
    found = Program(CodeFolder.of(folder), given).warnings(options)
    for warning, name in zip(found, warned, strict=True):
        assert name.replace("HOME", str(tmp_path)) in warning


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        ("python train.py --strategy deepspeed", True),
        ("torchrun train.py --backend deepspeed", True),
        ("deepspeed --no_ssh --hostfile hosts train.py", True),
        ("deepspeed train.py", False),
        ("/opt/bin/deepspeed train.py", False),
        ("python -m deepspeed.launcher.runner train.py", False),
        ("sh -c 'python prepare.py && deepspeed train.py'", False),
        ("bash run.sh", False),
    ],
)
def test_deepspeeds_launcher_which_finds_no_other_node_is_refused_on_several(
    made: Made, command: str, starts: bool
) -> None:
    folder = made({"train.py": "", "run.sh": "cd src && \\\n  exec deepspeed train.py\n"})
    program = Program(CodeFolder.of(folder), shlex.split(command))
    program.check(Range(1, 1))
    with nullcontext() if starts else pytest.raises(UsageError, match="deepspeed"):
        program.check(Range(2, 2))


def test_a_shell_script_with_the_line_ends_of_windows_is_refused(made: Made) -> None:
    folder = made({"run.sh": "python train.py\n", "train.py": ""})
    Program(CodeFolder.of(folder), ["bash", "run.sh"]).check(Range(1, 1))
    (folder / "run.sh").write_bytes(b"python train.py\r\n")
    with pytest.raises(UsageError, match=r"run\.sh"):
        Program(CodeFolder.of(folder), ["bash", "run.sh"]).check(Range(1, 1))
