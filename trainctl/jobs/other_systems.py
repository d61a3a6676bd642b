"""Words of other systems in a command: variables that nothing sets, and programs that no image has.

``NAMES``, which docs/other-systems.md prints, and a node's own variables are refused where nothing
gives them a value; another name may be the program's own, and is a warning.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from typing import Final

from contract.command import SHELL, SimpleCommand
from trainctl.aws.errors import UsageError

#: First word of another system's command -> ours. docs/other-systems.md prints it.
COMMANDS: Final[Mapping[str, str]] = {
    theirs: ours
    for ours, words in {
        "ls": ("ps", "jobs", "queue", "squeue"),
        "show": ("status",),
        "stop": ("cancel", "kill", "scancel"),
        "submit": ("launch", "apply", "sbatch"),
        "shell": ("exec", "ssh", "attach"),
    }.items()
    for theirs in words
}
#: Variable or macro of another system -> the variable of a node.
NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "SkyPilot": {
        "SKYPILOT_NODE_RANK": "NODE_RANK",
        "SKYPILOT_NUM_NODES": "NUM_NODES",
        "SKYPILOT_NUM_GPUS_PER_NODE": "GPUS_PER_NODE",
        "SKYPILOT_NODE_IPS": "MASTER_ADDR",
        "SKYPILOT_TASK_ID": "TRAIN_RUN",
    },
    "dstack": {
        "DSTACK_NODE_RANK": "NODE_RANK",
        "DSTACK_NODES_NUM": "NUM_NODES",
        "DSTACK_GPUS_PER_NODE": "GPUS_PER_NODE",
        "DSTACK_MASTER_NODE_IP": "MASTER_ADDR",
        "DSTACK_RUN_NAME": "TRAIN_RUN",
    },
    "SageMaker": {
        "SM_CURRENT_HOST": "NODE_RANK",
        "SM_HOSTS": "NUM_NODES",
        "SM_NUM_GPUS": "GPUS_PER_NODE",
        "SM_MODEL_DIR": "TRAIN_OUTPUT",
        "SM_OUTPUT_DATA_DIR": "TRAIN_OUTPUT",
        "TRAINING_JOB_NAME": "TRAIN_RUN",
    },
    "Slurm": {
        "SLURM_NODEID": "NODE_RANK",
        "SLURM_PROCID": "RANK",
        "SLURM_NNODES": "NUM_NODES",
        "SLURM_JOB_NUM_NODES": "NUM_NODES",
        "SLURM_GPUS_ON_NODE": "GPUS_PER_NODE",
        "SLURM_GPUS_PER_NODE": "GPUS_PER_NODE",
        "SLURM_NTASKS": "WORLD_SIZE",
        "SLURM_LOCALID": "LOCAL_RANK",
        "SLURM_JOB_ID": "TRAIN_RUN",
        "SLURM_JOB_NODELIST": "MASTER_ADDR",
    },
    "KubeRay": {
        "RAY_CLUSTER_NAME": "TRAIN_RUN",
        "FQ_RAY_IP": "MASTER_ADDR",
        "JOB_COMPLETION_INDEX": "NODE_RANK",
    },
    "AWS Batch": {
        "AWS_BATCH_JOB_NODE_INDEX": "NODE_RANK",
        "AWS_BATCH_JOB_NUM_NODES": "NUM_NODES",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "MASTER_ADDR",
        "AWS_BATCH_JOB_ID": "TRAIN_RUN",
    },
    "torchx": {
        "replica_id": "NODE_RANK",
        "rank0_env": "MASTER_ADDR",
        "app_id": "TRAIN_RUN",
        "TORCHX_RANK0_HOST": "MASTER_ADDR",
        "TORCHX_REPLICA_ID": "NODE_RANK",
    },
}
_OURS: Final = {name: ours for names in NAMES.values() for name, ours in names.items()}
#: Launchers of other systems, which start a command on each of their nodes.
_LAUNCHERS: Final = {"srun", "mpirun", "mpiexec", "horovodrun", "sbatch", "torchx"}
#: ``$NAME`` and ``${NAME}``: with a default, a dot or a colon it is a program's own or its shell's.
_NAME: Final = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
#: Programs that train nothing, and wait.
_WAITING: Final = re.compile(r"sleep|tail|jupyter(-\w+)?|tensorboard|mlflow|code-server|sshd")


def check(
    commands: Sequence[SimpleCommand],
    *,
    known: Collection[str],
    own_programs: Collection[str] | None,
    expands: bool,
) -> list[str]:
    """Refuse a command that certainly is another system's; return warnings about what may be.

    Args:
        commands: what the words of a job start, the first of them without a shell.
        known: variables of the job.
        own_programs: programs that the job brings along; None: it may bring any.
        expands: True if the program may expand variables itself.

    Raises:
        UsageError: no shell reads a variable, nothing sets it, or no image has the program.
    """
    first, warnings = commands[0], list[str]()
    for each in commands:
        has_shell = each is not first
        for name in _names(each, has_shell=has_shell):
            text = _unset(name, has_shell=has_shell)
            is_needed = _is_needed(each, name) if has_shell else _is_variable(name)
            if is_needed and each.is_certain and not expands and name not in known:
                raise UsageError(text)
            if not (has_shell and name in known):
                warnings.append(text)
    name = first.words[0]
    if _WAITING.fullmatch(name):
        warnings.append(
            f"{name} shows no sign of life while it waits, and is ended for that: a page that is "
            "open (trainctl open RUN --port PORT) is one, and --hang-minutes 0 leaves it until the "
            "deadline; its hosts cost the price per hour"
        )
    if own_programs is not None and not {name} & {*own_programs, *programs()} and "/" not in name:
        raise UsageError(
            f"{name} is neither in the images nor a program of the folder: {_hint(name)}"
        )
    return [*dict.fromkeys(warnings)]


def _names(each: SimpleCommand, *, has_shell: bool) -> Iterator[str]:
    """Variables in the words of a command that nothing gives a value, as far as they tell."""
    if not has_shell and any(map(SHELL.fullmatch, each.words)):
        return  # that shell may read them
    own = {text.removeprefix("export ").partition("=")[0] for text in each.assignments}
    for word in (*each.assignments, *each.raw) if has_shell else each.words:
        # Code in quotes has names of its own.
        found = [] if len(word.split()) > 1 and not has_shell else _NAME.findall(word)
        for name in (a or b for a, b in found):
            # A script has names in lower case of its own.
            is_meant = name in _OURS and name.isupper() if has_shell else not name.isdecimal()
            if name not in own and is_meant:
                yield name


def _is_needed(each: SimpleCommand, name: str) -> bool:
    """False for a test or mkdir, and for a run's name: they may do without a value."""
    return bool(each.launcher or each.program) and _OURS[name] != "TRAIN_RUN"


def _is_variable(name: str) -> bool:
    """False for what may be a program's own, as Hydra's ``${model}`` or a prompt's ``$INPUT``."""
    return name in {*_OURS, *_OURS.values()}


def _unset(name: str, *, has_shell: bool) -> str:
    lack = "nothing sets ${} on a node" if has_shell else "no shell reads ${} in this command"
    way = "give its value" if has_shell else "give its value, or the command in sh -c '...'"
    if ours := _OURS.get(name):
        way += f"; here its name is {ours}"
        if not ours.startswith("TRAIN_"):
            way += ", and torchrun and accelerate find the other nodes without it"
    return f"{lack.format(name)}: {way}"


def _hint(name: str) -> str:
    if name in _LAUNCHERS:
        return "each node of a job starts the command by itself, so leave it out"
    return "list a package that has it, or leave it out"


@functools.cache
def programs() -> frozenset[str]:
    """Programs of the images; a test in containers holds what an image has against this list."""
    text = resources.files("contract").joinpath("image_programs.txt").read_text("utf-8")
    return frozenset(text.split())
