"""Questions to a program's own Python: its launcher's parser, and the modules that it finds.

    python ask.py torchrun|accelerate|composer NODES GPUS ARGUMENTS...
    python ask.py imports FILE
    python ask.py module NAME

Run by its path with the environment of the last node of a job, on a host without a
GPU (``containers.program.start.questions``): it imports nothing of this project. It prints what
certainly keeps the program from running, one reason a line. An error means that there is no answer.
"""

import argparse
import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: Begins each answer: the user's modules may print, too.
MARK = "asked: "
_HERE = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|::1|\[::1\])?(:\d+)?")
_LEAVE = "leave it out, this job's nodes have it in their environment"


def torchrun(words: Sequence[str], num_nodes: int, gpus: int) -> Iterator[str]:
    """Contradictions between a job and the words of its torchrun, by torchrun's own parser."""
    from torch.distributed import launch, run

    args = launch.parse_args(words)  # torchrun's, and --use-env of torch.distributed.launch
    low, high = run.parse_min_max_nnodes(args.nnodes)
    if args.standalone and num_nodes > 1:
        yield f"--standalone keeps torchrun from finding the other nodes: {_LEAVE}"
        return
    if not low <= num_nodes <= high:
        yield _number("--nnodes", args.nnodes, num_nodes)
    if num_nodes > 1:
        address = run.get_rdzv_endpoint(args)
        yield from apart(args.rdzv_backend, address, args.node_rank, num_nodes - 1)
    # gpu and auto ask for the devices of the node.
    if gpus and args.nproc_per_node.isdecimal() and int(args.nproc_per_node) > gpus:
        yield f"--nproc-per-node is {args.nproc_per_node}, and a node has {gpus} GPUs: {_LEAVE}"


def apart(backend: str, address: str | None, node_rank: int | None, rank: int) -> Iterator[str]:
    """Reasons why the torchrun of one of several nodes would wait for the others in vain.

    Args:
        backend: of its rendezvous.
        address: at which the nodes meet; None: not asked.
        node_rank: as its words have it.
        rank: of the node.
    """
    is_static = backend == "static"
    if backend.startswith("etcd") and importlib.util.find_spec("etcd") is None:
        package = "the package python-etcd and a server of yours"
        yield f"--rdzv-backend is {backend}, which needs {package}: {_LEAVE}"
    if is_static and node_rank != rank:
        yield _rank("--node-rank", node_rank)
    if address is not None and _HERE.fullmatch(address):
        option = "--master-addr" if is_static else f"--rdzv-endpoint of {backend}"
        yield _address(option, address)


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


def composer(words: Sequence[str], num_nodes: int, gpus: int) -> Iterator[str]:
    """Contradictions between a job and the words of its ``composer``."""
    import torch

    launcher = importlib.import_module("composer.cli.launcher")  # of the job's own packages
    torch.cuda.device_count = lambda: gpus  # its default
    sys.argv[1:] = words
    size = "--world_size $((NUM_NODES * GPUS_PER_NODE)) in sh -c '...'"
    try:
        args = launcher._parse_args()
    except ValueError as error:
        yield f"{str(error).rstrip('.')}: give {size}"
        return
    if args.world_size != args.nproc * num_nodes:
        all_nodes = args.nproc * num_nodes
        yield f"--world_size is {args.world_size}, and all nodes start {all_nodes}: give {size}"
    if num_nodes > 1 and args.node_rank != num_nodes - 1:
        yield _rank("--node_rank", args.node_rank)
    if num_nodes > 1 and _HERE.fullmatch(args.master_addr or ""):
        yield _address("--master_addr", args.master_addr)


def module(name: str) -> Iterator[str]:
    """The first name of a module that ``-m`` runs, if it is not installed."""
    sys.path[:0] = _places(os.getcwd())
    first = name.partition(".")[0]
    if importlib.util.find_spec(first) is None:
        yield first


def imports(file: str) -> Iterator[str]:
    """Modules that a file imports in any case, and that are not installed."""
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except SyntaxError as error:
        yield f"{file}, line {error.lineno}: {error.msg} (SyntaxError)"
        return
    sys.path[:0] = _places(os.path.dirname(file))
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


def _places(first: str) -> list[str]:
    """Folders before Python's own in which a program finds its modules."""
    return [os.path.abspath(each) for each in (first, *os.environ.get("PYTHONPATH", "").split(":"))]


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


class _UsageError(Exception):
    """Words that a launcher's parser refuses."""


def _refuse(_parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise _UsageError(message)


def _answers(question: str, words: Sequence[str]) -> Iterator[str]:
    if question in ("imports", "module"):
        yield from {"imports": imports, "module": module}[question](words[0])
        return
    argparse.ArgumentParser.error = _refuse  # type: ignore[method-assign, assignment]
    ask = {"torchrun": torchrun, "accelerate": accelerate, "composer": composer}[question]
    try:
        yield from ask(words[2:], int(words[0]), int(words[1]))
    except _UsageError as error:
        yield str(error)


if __name__ == "__main__":
    for answer in _answers(sys.argv[1], sys.argv[2:]):
        print(f"{MARK}{answer}")
