"""How long a start takes and how much CPU time it costs, against the code before it was made quick.

    python -m benchmarks.startup [--runs 3] [--baseline DIR] [--recipes ddp,fsdp] [--json]
                                 [--only local,equal,trainctl,synth]

``local`` starts the real command with ``--local`` up to its first step, in two ways that take turns
on one machine: ``baseline`` is an earlier commit, ``now`` is this code. ``equal`` lets runs of them
end and compares what they computed. ``trainctl`` and ``synth`` time the command line's help and the
synth of a deploy. The exit code is 1 if the two computed different things.
"""

import argparse
import json
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import baseline, equality
from benchmarks.baseline import ROOT, BaselineError
from benchmarks.meter import Tree, busy_s, interruptible
from benchmarks.output import report, say
from benchmarks.phases import Spent, column, interpolated, phase_times, ratios, rotated, split
from contract import exits
from contract.runs import METRICS_FILE
from training.data import sources
from training.record import reader

SECTIONS: Final = ("local", "equal", "trainctl", "synth")
# Settings of a start, which is ended after its first step, and of a short run to its end.
_RECIPES: Final[Mapping[str, tuple[Sequence[str], Sequence[str]]]] = {
    "ddp": (["--epochs", "1"], ["--epochs", "1"]),
    "fsdp": ([], ["--max-steps", "4"]),
}
# "false" makes a synth leave out the validation of its templates.
VALIDATION_SWITCH: Final = "CDK_VALIDATION"
_RUN: Final = "startup"
_TIMEOUT_S: Final = 600.0
_SAMPLE_EVERY_S: Final = 0.05
# Commands of a second vary more than those of half a minute, and cost less.
_MIN_RUNS_OF_HELP: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One column: code, and how it is started."""

    name: str
    folder: Path
    """Root of the checkout."""
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        own = baseline.environment(self.folder)
        # Whatever the caller has set, the name of the column tells how it was started.
        changed = {name: own[name] for name in own if name != VALIDATION_SWITCH}
        return {**changed, **self.variables}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3, help="starts of each way (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="workers (default: 2)")
    parser.add_argument(
        "--recipes", type=_names(_RECIPES), default=[*_RECIPES], help="default: ddp,fsdp"
    )
    parser.add_argument(
        "--only", type=_names(SECTIONS), default=[*SECTIONS], help="sections (default: all)"
    )
    parser.add_argument(
        "--baseline",
        metavar="DIR",
        help=f"checkout to compare with (default: commit {baseline.COMMIT[:7]}, taken from git)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}: it must be at least 1")
    try:
        with interruptible(), baseline.checked_out(options.baseline) as folder:
            result = _measure(folder, options)
    except BaselineError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.BAD_INPUT
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    report(result, as_json=options.json)
    return 0 if result.get("equal", {}).get("equal", True) else 1


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    before = Way(name="baseline", folder=folder)
    now = Way(name="now", folder=ROOT)
    for each in (folder, ROOT):
        baseline.compile_sources(each)
    found: dict[str, Any] = {}
    methods: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="st-", ignore_cleanup_errors=True) as scratch:
        place = Place(folder=Path(scratch), workers=options.workers, methods=methods)
        if "local" in options.only:
            ways = [before, now]
            found["local"] = {
                recipe: _local(recipe, ways, place, runs=options.runs) for recipe in options.recipes
            }
        if "equal" in options.only:
            compared = {recipe: _equal(recipe, [now, before], place) for recipe in options.recipes}
            same = all(each["equal"] for each in compared.values())
            found["equal"] = {"equal": same, **compared}
        if "trainctl" in options.only:
            ways = [before, now]
            runs = max(options.runs, _MIN_RUNS_OF_HELP)
            found["trainctl"] = _trainctl(ways, place, runs=runs)
        if "synth" in options.only:
            found["synth"] = _synth(before, place, runs=options.runs)
    return {
        "benchmark": "startup",
        **_headline(found),
        "baseline_commit": baseline.commit_of(folder),
        "cpu_seconds_by": sorted(methods),
        "world_size": options.workers,
        **found,
    }


def _headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios of the first recipe that was started, or else of what was measured instead."""
    measured = [*found.get("local", {}).values()]
    measured += [found[name] for name in ("trainctl", "synth") if name in found]
    first = measured[0] if measured else {"ratio": None}
    return {name: value for name, value in first.items() if name.startswith("ratio")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the commands of this invocation write, and what is noted on the way."""

    folder: Path
    workers: int
    methods: set[str]
    """How CPU seconds were counted."""

    @contextmanager
    def tree(self, command: Sequence[str], way: Way, folder: Path) -> Iterator[Tree]:
        """Start ``command`` with ``folder`` for its temporary files; end what is left of it."""
        environment = way.environment() | {
            "TMPDIR": str(folder),
            # Text is cut into tokens once for all starts, as on a machine that is in use.
            sources.CACHE_VARIABLE: str(self.folder / "cache"),
        }
        log = folder / "log"
        with Tree(command, folder=way.folder, environment=environment, log=log) as tree:
            self.methods.add(tree.method)
            yield tree

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for one command. Its path is short: sockets of an earlier commit's Ray are in a
        folder below it, and Linux takes 107 characters for a socket."""
        with tempfile.TemporaryDirectory(
            prefix="", dir=self.folder, ignore_cleanup_errors=True
        ) as scratch:
            yield Path(scratch)


# --- local: from the command to the first step --------------------------------------------------


def _local(recipe: str, ways: Sequence[Way], place: Place, *, runs: int) -> dict[str, Any]:
    # One start of each checkout that does not count: it fills the caches, and shows that its
    # processes import its own code.
    for way in {way.folder: way for way in ways}.values():
        say(f"{recipe}: checking what a start of {way.folder} imports")
        _check_imports(recipe, way, place)
    starts: dict[str, list[Spent]] = {way.name: [] for way in ways}
    for number in range(runs):
        for way in rotated(ways, number):
            spent = _start(recipe, way, place)
            starts[way.name].append(spent)
            say(
                f"{recipe}: {way.name} {number + 1} of {runs}: {spent.wall_s['first_step']:.1f} s, "
                f"{spent.cpu_s['first_step']:.1f} CPU s"
            )
    columns = {name: column(spent, last="first_step") for name, spent in starts.items()}
    ratio, ratio_cpu = ratios(columns["baseline"], columns["now"])
    return {
        "ratio": ratio,
        "ratio_cpu": ratio_cpu,
        **{
            name: {
                **asdict(columns[name]),
                "phases": {phase: asdict(part) for phase, part in split(spent).items()},
            }
            for name, spent in starts.items()
        },
    }


def _command(recipe: str, settings: Sequence[str], storage: Path, place: Place) -> list[str]:
    return [
        *(sys.executable, "-m", "training.launch", recipe, "--local"),
        *("--workers", str(place.workers), "--storage", str(storage), "--run", _RUN),
        *("--report-every", "1", *settings),
    ]


def _start(recipe: str, way: Way, place: Place) -> Spent:
    """Start a run and end it after its first step."""
    with place.scratch() as scratch:
        command = _command(recipe, _RECIPES[recipe][0], scratch / "runs", place)
        metrics = scratch / "runs" / _RUN / METRICS_FILE
        busy_before = busy_s()
        with place.tree(command, way, scratch) as tree:
            samples = [(tree.began, 0.0)]
            while True:
                # Read first: the sample after the step is then later than the step.
                times = phase_times(reader.read_events(metrics))
                samples.append((time.time(), tree.cpu_s()))
                if "first_step" in times:
                    break
                if tree.exit_code is not None:
                    raise _failure(tree, command, "ended before its first step")
                _check_time(tree, command)
                time.sleep(_SAMPLE_EVERY_S)
            foreign = None
            if busy_before is not None:
                foreign = max(0.0, (busy_s() or 0.0) - busy_before - samples[-1][1])
        return Spent(
            wall_s={name: at - tree.began for name, at in times.items()},
            cpu_s={name: interpolated(samples, at) for name, at in times.items()},
            foreign_cpu_s=foreign,
        )


def _check_time(tree: Tree, command: Sequence[str]) -> None:
    if time.time() - tree.began > _TIMEOUT_S:
        raise _failure(tree, command, f"is not done after {_TIMEOUT_S:.0f} s")


def _failure(tree: Tree, command: Sequence[str], how: str) -> SystemExit:
    return SystemExit(f"error: {shlex.join(command)} {how}; it printed:\n{tree.printed()}")


def _check_imports(recipe: str, way: Way, place: Place) -> None:
    """Start a run once, without timing it; fail if a process of it imports another checkout."""
    with place.scratch() as scratch:
        hook, opened = scratch / "hook", scratch / "opened"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(baseline.SITECUSTOMIZE, encoding="utf-8")
        variables = {
            **way.variables,
            "PYTHONPATH": f"{hook}{os.pathsep}{way.folder}",
            "OPENED_FILES": str(opened),
        }
        _start(recipe, Way(name=way.name, folder=way.folder, variables=variables), place)
        roots, num_processes = baseline.imported_from(opened.read_text(encoding="utf-8"))
    if roots != {str(way.folder)}:
        raise SystemExit(
            f"error: processes of a start in {way.folder} import the package training from "
            f"{sorted(roots)}: nothing can be compared"
        )
    say(f"{recipe}: {num_processes} processes of it read their code from {way.folder} only")


# --- equal: the same losses, the same checkpoints -----------------------------------------------


def _equal(recipe: str, ways: Sequence[Way], place: Place) -> dict[str, Any]:
    """Compare complete runs of two ways."""
    with place.scratch() as scratch:
        left_behind = {}
        for way in ways:
            say(f"{recipe}: a complete run, {way.name}")
            left_behind[way.name] = _complete(recipe, way, scratch / way.name, place)
        first, second = (scratch / way.name / _RUN for way in ways)
        result = reader.read_result(str(first))
        compared = equality.compare(first, second)
    say(f"{recipe}: they are {'equal' if compared.equal else 'NOT EQUAL'}")
    return {
        **asdict(compared),
        "loss": result.loss if result else None,
        "accuracy": result.measures.get("accuracy") if result else None,
        # Of each way, what still ran five seconds after the command had ended.
        "left_behind": left_behind,
    }


def _complete(recipe: str, way: Way, storage: Path, place: Place) -> list[str]:
    """Let a short run end; return the command lines of processes that it leaves behind."""
    command = _command(recipe, _RECIPES[recipe][1], storage, place)
    with place.scratch() as scratch, place.tree(command, way, scratch) as tree:
        _wait(tree, command)
        deadline = time.monotonic() + 5
        while (left := tree.commands()) and time.monotonic() < deadline:
            time.sleep(0.1)
    return left


# --- trainctl and synth: whole commands ---------------------------------------------------------


def _trainctl(ways: Sequence[Way], place: Place, *, runs: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "trainctl", "--help"]
    commands = [(way, command) for way in ways]
    return _whole_commands("trainctl --help", commands, place, runs=runs)


def _synth(before: Way, place: Place, *, runs: int) -> dict[str, Any]:
    """Synth of both stacks as a deploy does it; ``validated`` is this code as `cdk synth` does it.

    Through the CDK command line where it is installed, else ``app.py`` as that would start it.
    """
    ways = [
        replace(before, variables=deploy_variables(before.folder)),
        Way(name="validated", folder=ROOT),
        Way(name="now", folder=ROOT, variables=deploy_variables(ROOT)),
    ]
    cdk = ROOT / "node_modules" / ".bin" / "cdk"
    app = [sys.executable, "app.py"]
    commands = []
    with place.scratch() as scratch:
        for way in ways:
            output = scratch / way.name
            variables = {**way.variables, "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20"}
            command = app
            if cdk.exists():
                command = [str(cdk), "synth", "--quiet", "--app", shlex.join(app)]
                command += ["--output", str(output)]
                variables |= {"CDK_DISABLE_CLI_TELEMETRY": "true", "NODE_NO_WARNINGS": "1"}
            else:
                settings = json.loads((way.folder / "cdk.json").read_text(encoding="utf-8"))
                context = json.dumps(settings["context"])
                variables |= {"CDK_OUTDIR": str(output), "CDK_CONTEXT_JSON": context}
            commands.append((replace(way, variables=variables), command))
        found = _whole_commands("synth", commands, place, runs=runs)
        same = _templates(scratch / "validated") == _templates(scratch / "now") != {}
    return {
        **found,
        "command": "cdk synth" if cdk.exists() else "app.py",
        "templates_equal_without_validation": same,
    }


def deploy_variables(folder: Path) -> dict[str, str]:
    """What `cdk deploy` in a checkout adds to the environment of ``app.py``.

    It passes on the setting ``validation`` of cdk.json. `cdk synth` does not: there the default of
    the option ``--validation`` comes before cdk.json.
    """
    settings = json.loads((folder / "cdk.json").read_text(encoding="utf-8"))
    return {VALIDATION_SWITCH: "false"} if settings.get("validation") is False else {}


def _templates(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.template.json")}


def _whole_commands(
    what: str, commands: Sequence[tuple[Way, Sequence[str]]], place: Place, *, runs: int
) -> dict[str, Any]:
    """Let the commands take turns; compare ``baseline`` with ``now``."""
    for way, command in commands:
        _whole_command(way, command, place)  # does not count: it fills the caches
    found: dict[str, list[Spent]] = {way.name: [] for way, _ in commands}
    for number in range(runs):
        for way, command in rotated(commands, number):
            spent = _whole_command(way, command, place)
            found[way.name].append(spent)
            say(
                f"{what}: {way.name} {number + 1} of {runs}: {spent.wall_s['end']:.2f} s, "
                f"{spent.cpu_s['end']:.2f} CPU s"
            )
    columns = {name: column(spent, last="end") for name, spent in found.items()}
    wall, cpu = ratios(columns["baseline"], columns["now"])
    return {
        "ratio": wall,
        "ratio_cpu": cpu,
        **{name: asdict(each) for name, each in columns.items()},
    }


def _whole_command(way: Way, command: Sequence[str], place: Place) -> Spent:
    with place.scratch() as scratch:
        busy_before, waited_before = busy_s(), _waited_cpu_s()
        began = time.perf_counter()
        with place.tree(command, way, scratch) as tree:
            _wait(tree, command, every_s=0.01)
            wall = time.perf_counter() - began
            # Where processes are looked for, those that ended between two readings were missed;
            # those that their parent has waited for are in this process's account.
            cpu = max(tree.cpu_s(), _waited_cpu_s() - waited_before)
        foreign = None if busy_before is None else (busy_s() or 0.0) - busy_before - cpu
    return Spent(wall_s={"end": wall}, cpu_s={"end": cpu}, foreign_cpu_s=foreign)


def _wait(tree: Tree, command: Sequence[str], *, every_s: float = 0.1) -> None:
    """Wait until the command has ended; fail if it does."""
    while (code := tree.exit_code) is None:
        tree.cpu_s()
        _check_time(tree, command)
        time.sleep(every_s)
    if code:
        raise _failure(tree, command, f"ended with exit code {code}")


def _waited_cpu_s() -> float:
    """CPU seconds of the processes that this one has waited for, and of those they waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _names(known: Any) -> Any:
    """Type of an option that takes some of ``known``, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}: choose from {[*known]}")
        return list(dict.fromkeys(names))

    return parse


if __name__ == "__main__":
    sys.exit(main())
