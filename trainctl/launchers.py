"""Check of launchers that would not find a job's other nodes, or would wait for them forever.

Each node has in its environment what torchrun and accelerate need to find the others. Options of
the command that undo this are found here, before hosts are paid for.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from contract.nodes import Range
from contract.text import counted
from trainctl.aws.errors import UsageError

#: Options of torchrun, accelerate, deepspeed, fabric and composer that say how many nodes there
#: are, how many processes all of them have, and where they meet; and variables for that.
_NUM_NODES: Final = ("nnodes", "num-machines", "num-nodes")
_NUM_RANKS: Final = ("num-processes", "world-size")
_PLACES: Final = ("rdzv-endpoint", "master-addr", "main-process-ip", "main-address")
_OWN_RANKS: Final = ("node-rank", "machine-rank")
_HERE: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|::1|\[::1\])(:\d+)?")
#: deepspeed's own launcher, and those that start one program on all nodes, by command or module.
_DEEPSPEED: Final = r"(?:deepspeed|-m deepspeed\.launcher\.\w+)"
_LAUNCHERS: Final = (
    rf"(?:torchrun|accelerate[ -]launch|fabric run|lightning run|composer|tune run|{_DEEPSPEED}"
    r"|-m (?:torch\.distributed\.\w+|composer\.cli\.launcher"
    r"|accelerate\.commands\.(?:launch|accelerate_cli launch)|lightning\.fabric\.cli run))"
)


def check(text: str, *, nodes: Range, gpus: int) -> None:
    """Fail if a command's launcher cannot start it on its nodes.

    Args:
        text: the command, and the shell scripts that it starts.
        gpus: of each node.

    Raises:
        UsageError: it cannot.
    """
    text = _resolved(text)
    parts = _parts(text)
    if nodes.high > 1 and "--standalone" in parts:
        raise UsageError(
            "--standalone keeps torchrun from finding the other nodes: leave it out, and "
            "--nproc-per-node too, which is set to the GPUs of a node; or give --nodes 1"
        )
    if nodes.high > 1 and _starts(_DEEPSPEED, parts) and "--no_ssh" not in parts:
        raise UsageError(
            "deepspeed finds no other nodes here, and would train on each by itself: start the "
            "script with torchrun, which deepspeed.init_distributed() understands, or give "
            "--nodes 1"
        )
    if not starts_on_nodes(text):
        return
    # What follows its script is the program's own.
    lines = re.split(r"[;&|\n]", text)
    parts = [part for line in lines for part in re.split(r"\S\.py\b", line)[0].split()]
    for name in _NUM_NODES:
        asked = _value(parts, name)
        least, _, most = asked.partition(":")
        if least.isdecimal() and not int(least) <= nodes.low <= nodes.high <= int(most or least):
            raise UsageError(
                f"--{name} is {asked}, and the job has {_words(nodes)}: leave it out, it is set to "
                f"the job's nodes; or give --nodes {asked}"
            )
    for name in _OWN_RANKS:
        if nodes.high > 1 and _value(parts, name).isdecimal():
            raise UsageError(
                f"--{name} is {_value(parts, name)} on every node: leave it out, each node has its "
                "own; or give --nodes 1"
            )
    variables = [part.partition("=") for part in parts if part.startswith("MASTER_ADDR=")]
    places = {f"--{name}": _value(parts, name) for name in _PLACES}
    places |= {name: value for name, _, value in variables}
    for name, place in places.items():
        if nodes.high > 1 and _HERE.fullmatch(place):
            raise UsageError(
                f"{name} is {place}, at which each node finds only itself: leave it out, it is set "
                "to the address of the first node; or give --nodes 1"
            )
    asked = _value(parts, "nproc-per-node")
    if gpus and asked.isdecimal() and int(asked) > gpus:
        raise UsageError(
            f"--nproc-per-node is {asked}, and a node has {counted(gpus, 'GPU')}: "
            "leave it out; it is set to the GPUs of a node"
        )
    for name in _NUM_RANKS:
        asked = _value(parts, name)
        if gpus and asked.isdecimal() and int(asked) > gpus * nodes.high:
            raise UsageError(
                f"--{name} is {asked}, and {_words(nodes)} of {counted(gpus, 'GPU')} have fewer: "
                "leave it out, it is set to the GPUs of all nodes"
            )


def _words(nodes: Range) -> str:
    if nodes.low == nodes.high:
        return counted(nodes.high, "node")
    return f"{nodes.low} to {nodes.high} nodes"


def starts_on_nodes(text: str) -> bool:
    """True if a command, or a line of a shell script, launches one program on all nodes."""
    return _starts(_LAUNCHERS, _parts(text))


def _resolved(text: str) -> str:
    """A command, with the values of variables that its shell scripts set to one word only."""
    found = re.findall(r"(?m)(?:^|[\s;])(\w+)=[\"']?([\w.:-]+)[\"']?(?=[\s;]|$)", text)
    for name, value in {*found}:
        if [each for each, _ in found].count(name) == 1:
            text = re.sub(rf"\$(?:{name}\b|{{{name}}})", value, text)
    return text


def _parts(text: str) -> list[str]:
    """Words of a command; ``;`` precedes each one that a shell starts, also one that is quoted for
    another shell or kept in a variable."""
    text = re.sub(r"(?<= -)(\w*c) +\\*[\"']|(?<=\w)=[\"'](?=\w+ )", r"\1 ; ", text)
    return re.sub(r"[\n;&|()]+", " ; ", text.replace("\\\n", " ")).split()


def _starts(launcher: str, parts: Sequence[str]) -> bool:
    """True if a command, or one of those of ``sh -c``, starts its program with this launcher.

    What precedes it may set variables, as ``OMP_NUM_THREADS=1 torchrun`` and ``uv run torchrun``
    do; what follows another launcher, or the program of Python, is an argument of that program.
    """
    other = r"(?:\S*/)?(?:accelerate|deepspeed|python[\d.]*|torchrun) "
    python = r"(?:(?:\S*/)?python[\d.]* (?:-[WX] \S+ |-(?!m )\S+ )*)?"
    begins = rf"(?:^|; )(?:(?!{other}|-m )[^\s;]+ )*{python}(?:\S*/)?{launcher}[\"']? "
    return re.search(begins, " ".join(parts)) is not None


def _value(parts: Sequence[str], option: str) -> str:
    """The value of an option, with dashes or underscores and one dash or two; "" without it."""
    for part, after in pairwise([*parts, ""]):
        name, is_there, value = part.partition("=")
        if name.startswith("-") and name.lstrip("-").replace("_", "-") == option:
            return (value if is_there else after).strip("\"'")
    return ""
