"""Every call that removes or replaces something is known, with what guards a user's own files."""

import ast
import re
import subprocess
from collections.abc import Iterator
from typing import Final

import pytest

from tests.conftest import ROOT

#: What removes or replaces, of the standard library, boto3, fsspec and of this project.
NAMES: Final = {
    *("rmtree", "unlink", "rmdir", "removedirs", "renames", "rm_file", "copytree"),
    *("staged_folder", "whole_file", "rename_folder", "show_folder"),
}
#: The same where they are called: in other places these words mean something else.
CALLED: Final = {"remove", "rename", "replace", "move", "rm", "truncate", "delete"}
OURS: Final = "only names that this code makes"
ASKS: Final = "asks"
MEMORY: Final = "nothing on a disk or in a bucket"

#: File:function -> its calls and the guard: what it removes, or whom it asks.
GUARDS: Final = {
    "containers/node.py:NodeRunner._give_notice": ("replace", OURS, "its notice"),
    "store/bucket.py:Bucket.delete": ("delete_objects", OURS, "keys of its callers"),
    "containers/program/host_cache.py:_remove": (
        "rename rmtree unlink",
        OURS,
        "entries of the host's cache by their places; what a link leads to stays",
    ),
    "containers/program/code.py:forget_failure_of_worker": ("delete", OURS, "failed, of a job"),
    "containers/program/disk.py:Disk.create": ("unlink", OURS, "the node's copy, restored"),
    "containers/program/disk.py:Disk.finish": ("unlink", OURS, "a file that it has begun"),
    "containers/program/program_files.py:Mirror._remove_unused": (
        "delete",
        OURS,
        "pieces and lists",
    ),
    "containers/program/on_node.py:Launcher._prepare": ("rename", OURS, "its folder on the node"),
    "containers/program/on_node.py:prepare_head": ("copytree", OURS, "into a folder of the job"),
    "containers/program/supervisor.py:NodeGroup._gather": ("remove", MEMORY, "a list"),
    "containers/program/packages.py:_check": ("rmtree", OURS, "copies that INSTALLER marks"),
    "containers/program/shell.py:note": ("replace", OURS, "where the program runs"),
    "containers/program/starts.py:_sweep": ("delete", OURS, "claims and lists of old starts"),
    "containers/program/startup/sitecustomize.py:_note_errors.note": ("replace", OURS, "PID.json"),
    "containers/ray_head.py:RayHead.scale": ("replace", OURS, "a file in its temporary folder"),
    "contract/host_check.py:answer": ("replace unlink", OURS, "request and answer"),
    "contract/host_check.py:ask": ("unlink", OURS, "an earlier answer"),
    "examples/accelerate/train.py:recover": ("rename", OURS, "its checkpoint"),
    "examples/accelerate/train.py:save": ("rename rmtree", OURS, "its checkpoint"),
    "examples/ddp/train.py:main": ("replace", OURS, "its checkpoint"),
    "rehearsal/cycle.py:Rehearsal._remember": ("replace", OURS, "state.json of .rehearsal"),
    "rehearsal/cycle.py:Rehearsal._tidy": ("rmdir rmtree unlink", OURS, ".rehearsal"),
    "rehearsal/cycle.py:Rehearsal.down": ("remove", OURS, "labels of this checkout"),
    "rehearsal/ministack/ecs_runtime.py:ContainerEngine._run_within_limits": (
        "remove",
        OURS,
        "a container that it could not start",
    ),
    "rehearsal/ministack/ecs_runtime.py:ContainerEngine.remove": ("remove", OURS, "its containers"),
    "rehearsal/ministack/ecs_runtime.py:Runtime._remove": ("remove", OURS, "containers of a task"),
    "stacks/jobs/keeper/cluster.py:seen_s": ("delete_attributes", OURS, "its mark of a host"),
    "stacks/teardown/handler.py:terminate_hosts": (
        "delete_auto_scaling_group",
        OURS,
        "groups of the stack that is being destroyed",
    ),
    "trainctl/commands/data.py:rm": ("remove", ASKS, "trainctl/removal.py"),
    "trainctl/commands/runs.py:rm": ("remove", ASKS, "trainctl/removal.py"),
    "trainctl/data_sets.py:put": ("delete", ASKS, "unless it holds these files or some of them"),
    "trainctl/downloads.py:_fetch_one": (
        "replace unlink",
        OURS,
        "in folders that it has marked; another file there is refused",
    ),
    "trainctl/programs.py:Program.__init__": ("remove", MEMORY, "a list"),
    "trainctl/removal.py:remove": ("delete", ASKS, "and refuses what a job uses"),
    "training/checkpoint/unfinished.py:close": ("remove_leftovers", OURS, "as below"),
    "training/checkpoint/unfinished.py:discard": ("remove_folder rename", OURS, ".step-*.part"),
    "training/record/writer.py:RunRecord._open": ("remove_leftovers", OURS, "as below"),
    "training/checkpoint/checkpoints.py:complete": ("show_folder", OURS, "fails where one is"),
    "training/checkpoint/checkpoints.py:newest_usable.pass_over": (
        "rename_folder",
        OURS,
        "damaged-step-*",
    ),
    "training/checkpoint/divergence.py:diverged.set_aside": (
        "rename_folder",
        OURS,
        "diverged-step-*",
    ),
    "training/checkpoint/checkpoints.py:prune": (
        "remove_file remove_folder",
        OURS,
        "step-* and damaged-step-*",
    ),
    "training/checkpoint/checkpoints.py:publish_model": (
        "staged_folder",
        OURS,
        "two files of model/",
    ),
    "training/checkpoint/checkpoints.py:take_snapshot": ("replace", MEMORY, "a function"),
    "training/data/download.py:_verify": ("unlink", OURS, ".NAME.part of the cache"),
    "training/data/download.py:download": ("unlink", OURS, ".NAME.part of the cache"),
    "training/data/download.py:fetch": ("replace", OURS, "a file that is not there"),
    "training/data/pictures/destination.py:Destination.remove": (
        "delete rmdir unlink",
        OURS,
        "a file, and its folder once it is empty",
    ),
    "training/data/pictures/destination.py:Destination.write": (
        "replace",
        OURS,
        "a preparation refuses a place with shards of something else",
    ),
    "training/data/pictures/prepare.py:prepare": ("remove", OURS, ".prepare-DIGEST/NAME"),
    "store/storage.py:fetch": ("replace unlink", OURS, ".NAME.part and NAME of the cache"),
    "training/data/sources.py:_fetch": ("whole_file", OURS, "a file of the cache"),
    "training/data/sources.py:_fetched": ("unlink", OURS, ".NAME.etag of the cache"),
    "training/data/sources.py:discard": ("unlink", OURS, "fetched files of the cache"),
    "training/data/rows.py:_is_there": ("staged_folder", OURS, "a store of the cache"),
    "training/data/rows.py:build": ("staged_folder", OURS, "a store of the cache"),
    "training/export.py:export": ("staged_folder", OURS, "refuses a target that holds anything"),
    "training/export.py:export_adapters": (
        "staged_folder",
        OURS,
        "refuses a target that holds anything",
    ),
    "training/fsdp/model.py:_built": ("replace", MEMORY, "layers"),
    "training/launch.py:reopen": ("remove_file", OURS, "its result, of a run that goes on"),
    "training/launch.py:overwrite": (
        "remove_file remove_run",
        OURS,
        "the mark of an earlier command, and the rest of what that was removing",
    ),
    "training/launch.py:overwrite.replace": (
        "remove_file remove_run",
        OURS,
        "contract.runs.RECORD of a run, once the new one has made a step; its mark",
    ),
    "training/models/classifiers.py:_layers": ("remove", MEMORY, "a hook"),
    "training/models/conversion.py:with_weights": ("staged_folder", OURS, "a model of the cache"),
    "training/models/model_weights.py:_sources": ("rename", MEMORY, "names of tensors"),
    "training/models/pretrained.py:_from_s3": ("unlink", OURS, "fetched files of the cache"),
    "training/record/trackers.py:Trackers._work": ("remove", MEMORY, "a list"),
    "training/record/writer.py:RunRecord._send_all": ("rmtree", OURS, "its temporary folder"),
    "training/record/writer.py:RunRecord.abandon": ("rmtree", OURS, "its temporary folder"),
    "training/runtime/trainer.py:_free_places": ("remove_placement_group", MEMORY, "places of Ray"),
    "training/runtime/local.py:LocalWorkers.close": ("rmtree", OURS, "its temporary folders"),
    "store/storage.py:check_writable": ("rm_file", OURS, ".probe-UUID"),
    "store/storage.py:create_bytes": ("unlink", OURS, "its temporary file"),
    "store/storage.py:_move": ("rename replace", OURS, "files of those names"),
    "store/storage.py:remove_file": ("rm_file", OURS, "names of its callers"),
    "store/storage.py:remove_folder": ("rm rmtree", OURS, "names of its callers"),
    "store/storage.py:remove_leftovers": (
        "rmtree unlink",
        OURS,
        ".staging-XXXXXXXX, .NAME.XXXXXXXX of the record's names",
    ),
    "store/storage.py:remove_run": (
        "remove remove_file remove_folder remove_leftovers rmdir",
        OURS,
        "contract.runs.RECORD, and folders that are empty then",
    ),
    "store/storage.py:rename_folder": (
        "remove_folder rename",
        OURS,
        "names of its callers",
    ),
    "store/storage.py:show_folder": ("rename", OURS, "fails where one is"),
    "store/storage.py:staged_folder": (
        "rmtree",
        OURS,
        "its temporary folder",
    ),
    "store/storage.py:whole_file": ("replace unlink", OURS, "names of its callers"),
    "store/storage.py:write_bytes": ("whole_file", OURS, "names of the run's record"),
}

#: Scripts of which every command runs inside an image that is being built.
IN_IMAGES: Final = {"containers/Dockerfile", "containers/install.sh", "rehearsal/debian_base.sh"}
#: The same of make and other scripts: beginning of the line -> its guard.
SIGN: Final = re.compile(r"(?:^|[\s;({'@])(?:rm|mv|rmdir|unlink) -?\S|-delete\b|\bprune --all\b")
LINES: Final = {
    '.ci/beside: trap \'kill "$first" 2>/dev/null; rm -f "$said"\' ': "its temporary file",
    '.ci/run: [[ -z ${CI_FRESH:-} ]] && is_clean || rm -f "$pa': "its record",
    '.ci/run: rm -f "$output" "$output".*': "its temporary files",
    ".ci/run: docker system prune --all --force --filter until=": "only an engine that it started",
    '.ci/run: rm -rf "$engine_folder"': "of the engine that it started",
    ".ci/uv: rm -rf .uv": "a folder that only make uses",
    '.ci/venv: rm -f "$dir/ready" # first, because `rm -r` may be ': "its mark",
    '.ci/venv: find "$dir/" -mindepth 1 -maxdepth 1 ! -name insta': "not what was made by hand",
    '.ci/venv: mv "$dir/ready.new" "$dir/ready"': "its mark",
    "Makefile: rm -rf .pytest_cache .mypy_cache .ruff_cache .hypo": "of make's own tools",
    "Makefile: find contract store training trainctl stacks con": "caches of our modules",
    "Makefile: mv benchmarks/results/$$name.new": "figures that a page has from this command",
    "Makefile: rm -rf .uv node_modules": "what only make makes",
    "Makefile: if [ -f $$dir/install.log ] && [ ! -f $$dir/adopte": "not what was made by hand",
}
PRODUCT: Final = (
    *("store", "training", "containers", "trainctl", "contract", "stacks", "rehearsal", "examples"),
)


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--", *patterns]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def mentions(tree: ast.AST, place: str = "") -> Iterator[tuple[str, str]]:
    """Function, and what in it removes or replaces; also where it is passed on and not called."""
    for node in ast.iter_child_nodes(tree):
        here = place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            here = f"{place}.{node.name}".strip(".")
        if isinstance(node, ast.Call) and (name := name_of(node.func)) in CALLED:
            # Not those of text and dataclasses: replace(old, new), replace(it, field=value).
            if name != "replace" or (len(node.args) == 1 and not node.keywords):
                yield here, name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            name = name_of(node)
            if name in NAMES or re.match("(delete|remove)_", name):
                yield here, name
        yield from mentions(node, here)


def found(source: str, file: str) -> dict[str, str]:
    names: dict[str, set[str]] = {}
    for function, name in mentions(ast.parse(source)):
        names.setdefault(f"{file}:{function}", set()).add(name)
    return {place: " ".join(sorted(each)) for place, each in names.items()}


def test_every_call_that_removes_or_replaces_has_a_guard() -> None:
    there: dict[str, str] = {}
    for name in tracked(*(f"{folder}/*.py" for folder in PRODUCT)):
        there |= found((ROOT / name).read_text(), name)
    assert there == {place: names for place, (names, *_) in GUARDS.items()}
    assert {kind for _, kind, _ in GUARDS.values()} == {OURS, ASKS, MEMORY}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("shutil.rmtree(run)", "rmtree"),
        ("os.remove(name); path.unlink(missing_ok=True)", "remove unlink"),
        ("s3.delete_objects(Bucket=b, Delete=d)", "delete_objects"),
        ("new.replace(path); os.rename(a, b)", "rename replace"),
        ("text.replace('a', 'b'); replace(config, lr=1); config.replace(lr=1)", ""),
    ],
)
def test_the_parser_finds_them(code: str, names: str) -> None:
    source = f"class A:\n    def f(self):\n        {code}\n"
    assert found(source, "x.py") == ({"x.py:A.f": names} if names else {})


def test_every_line_of_a_script_that_removes_has_a_guard() -> None:
    there = {
        f"{name}: {line.strip()}"
        for name in {*tracked("Makefile", "*.sh", "*Dockerfile", ".ci")} - IN_IMAGES
        if not name.startswith("tests/")
        for line in (ROOT / name).read_text().splitlines()
        if SIGN.search(line.partition(" # ")[0]) and not line.lstrip().startswith("#")
    }
    assert [line for line in there if not line.startswith((*LINES,))] == []
    assert [known for known in LINES if not any(line.startswith(known) for line in there)] == []
