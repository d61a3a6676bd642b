"""Questions to a program's own Python: its launcher's parser, and the modules that it finds.

    python ask.py torchrun|accelerate NODES GPUS ARGUMENTS...
    python ask.py imports FILE

Run by its path with the environment of the last node of a job, on a host without a
GPU (``containers.program.start.questions``): it imports nothing of this project. It prints what
certainly keeps the program from running, one reason a line. An error means that there is no answer.
"""

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: Begins each answer: the user's modules may print, too.
MARK = "asked: "
_HERE = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|::1|\[::1\])?(:\d+)?")
_LEAVE = "leave it out, this job's nodes have it in their environment"


def torchrun(words: Sequence[str], num_nodes: int, gpus: int) -> Iterator[str]:
    """Contradictions between a job and the words of its torchrun, by torchrun's own parser."""
    from torch.distributed import run

    args = run.parse_args(words)
    low, high = run.parse_min_max_nnodes(args.nnodes)
    address = run.get_rdzv_endpoint(args)
    is_static = args.rdzv_backend == "static"
    if args.standalone and num_nodes > 1:
        yield f"--standalone keeps torchrun from finding the other nodes: {_LEAVE}"
        return
    if not low <= num_nodes <= high:
        yield _number("--nnodes", args.nnodes, num_nodes)
    if is_static and num_nodes > 1 and args.node_rank != num_nodes - 1:
        yield _rank("--node-rank", args.node_rank)
    if num_nodes > 1 and _HERE.fullmatch(address):
        option = "--master-addr" if is_static else f"--rdzv-endpoint of {args.rdzv_backend}"
        yield _address(option, address)
    # gpu and auto ask for the devices of the node.
    if gpus and args.nproc_per_node.isdecimal() and int(args.nproc_per_node) > gpus:
        yield f"--nproc-per-node is {args.nproc_per_node}, and a node has {gpus} GPUs: {_LEAVE}"


def accelerate(words: Sequence[str], num_nodes: int, gpus: int) -> Iterator[str]:
    """Contradictions between a job and the words of its ``accelerate launch``, and its file."""
    from accelerate.commands import launch

    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    if args.num_machines != num_nodes:
        yield _number("--num_machines", args.num_machines, num_nodes)
    if num_nodes > 1 and args.machine_rank != num_nodes - 1:
        yield _rank("--machine_rank", args.machine_rank)
    if num_nodes > 1 and _HERE.fullmatch(args.main_process_ip or ""):
        yield _address("--main_process_ip", args.main_process_ip)
    if gpus and args.num_processes > gpus * num_nodes:
        gpus *= num_nodes
        yield f"--num_processes is {args.num_processes}, and all nodes have {gpus} GPUs: {_LEAVE}"


def imports(file: str) -> Iterator[str]:
    """Modules that a file imports in any case, and that are not installed."""
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except SyntaxError as error:
        yield f"{file}, line {error.lineno}: {error.msg} (SyntaxError)"
        return
    own = [os.path.dirname(os.path.abspath(file)), *os.environ.get("PYTHONPATH", "").split(":")]
    sys.path[:0] = [os.path.abspath(each) for each in own]
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [] if node.level else [str(node.module)]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) or _is_text(node):
            names = []
        else:
            return  # from here on modules may be elsewhere
        for name in names:
            spec = importlib.util.find_spec(name.partition(".")[0])
            if spec is None:
                yield name.partition(".")[0]
            elif not spec.origin or spec.origin.startswith(os.getcwd()):
                return  # a module of the user's, which may change the path


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _number(option: str, value: Any, num_nodes: int) -> str:
    nodes = f"--nodes {value}"
    return (
        f"{option} is {value}, and the nodes of the job are {num_nodes}: {_LEAVE}; or give {nodes}"
    )


def _rank(option: str, value: Any) -> str:
    return f"{option} is {value} on every node: {_LEAVE}"


def _address(option: str, value: Any) -> str:
    at = f"is {value}" if value else "names no address"
    return f"{option} {at}, at which each node finds only itself: {_LEAVE}; or give --nodes 1"


if __name__ == "__main__":
    _, question, *rest = sys.argv
    if question == "imports":
        answers = imports(rest[0])
    else:
        answers = {"torchrun": torchrun, "accelerate": accelerate}[question](
            rest[2:], int(rest[0]), int(rest[1])
        )
    for answer in answers:
        print(f"{MARK}{answer}")
