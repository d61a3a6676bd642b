"""Start a recipe: ``python -m training.launch RECIPE``.

The same command trains in plain processes on one machine (``--local``), on the Ray cluster whose
head it runs on, and, started by torchrun, without Ray. Giving a run's name again resumes it.
``training.command`` has the options.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from contract import exits, faults, nodes, runs
from contract.errors import InputError
from contract.nodes import Gpus, Range
from contract.runs import RunPaths, check_run_name
from store import storage
from training import command as commands
from training.command import Command, OptionError, Recorded, RunCompleteError
from training.data import catalog
from training.record import trackers
from training.settings import RunConfig
from training.system.lease import Lease, newest_number

#: Folders that a run may have before it has begun to train: of its jobs, and another process.
_BEFORE_TRAINING: Final = {runs.JOBS_DIR, runs.OUTPUT_DIR, runs.RAY_DIR, runs.LEASES_DIR}


@faults.command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    # Before torch is loaded: its profiler announces itself on stderr with every use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or {"-h", "--help"} & {*words}:
            with exits.on_closed_pipe():
                print(commands.help_text(words))
            return exits.OK if words else exits.BAD_INPUT
        return start(commands.parse(words))
    except ModuleNotFoundError as error:
        # The command line is installed without the packages that train.
        if error.name not in {"fsspec", "ray", "torch"}:
            raise
        raise InputError(commands.NEEDS_PACKAGES.format(error.name)) from None
    except OptionError as error:
        raise InputError(f"{error}\nsee: python -m training.launch {words[0]} --help") from None


def start(command: Command) -> int:
    """Train; return the exit code.

    Raises:
        InputError: something that was given is wrong.
        Exception: among others, of a storage that does not answer.
    """
    if _is_first():
        trackers.check(command.report_to)
    try:
        config, workers = configured(command)
    except RunCompleteError as error:
        return _already_complete(command, error)
    if command.look:
        print("looking at the data", file=sys.stderr)
        command.recipe.prepare(config)
        return exits.OK
    paths = RunPaths.of(config.storage, config.run)
    lease, replace = None, None
    try:
        if _is_first():
            lease = Lease.take(paths.uri, take_over=command.take_over, wait=_watch_lease)
            lease.keep()
            replace = overwrite(paths, command, lease)
            if replace is None:
                reopen(paths)
        if _is_torchrun():
            from training.runtime.torchrun import run_torchrun

            return run_torchrun(config, command, lease=lease, replace=replace)
        from training.runtime.driver import Driver, Workers

        assert lease is not None
        processes: Workers
        failures, verbose = command.max_failures, command.verbose
        if command.local:
            from training.runtime.local import LocalWorkers

            processes = LocalWorkers(command.recipe, max_failures=failures, verbose=verbose)
        else:
            from training.runtime.ray_cluster import RayWorkers

            processes = RayWorkers(workers=workers, max_failures=failures, verbose=verbose)
        return Driver(config, command, workers=processes, lease=lease, replace=replace).run()
    finally:
        if lease is not None:
            lease.release()


def _watch_lease(seconds: float) -> None:
    print(f"looking for {seconds:.0f} s whether another process trains this run", file=sys.stderr)
    time.sleep(seconds)


def configured(command: Command) -> tuple[RunConfig, Range]:
    """The settings of the run, and with how many workers it trains. Nothing is written.

    Combines preset, recorded settings of a run to resume, and the options given. Whatever can be
    seen at once is checked here; the content of the data is looked at later, in another process.

    Raises:
        InputError: a value is wrong, storage or data cannot be used, or the run to resume was
            started with other settings; of the class RunCompleteError where it is complete.
    """
    workers = _workers(command)
    if workers is None:
        # What does not depend on their number is checked before Ray is imported and joined.
        _configured(command, Range(1, 1))
        from training.runtime import ray_cluster

        ray_cluster.join_cluster(verbose=command.verbose)
        workers = ray_cluster.cluster_workers()
    return _configured(command, workers), workers


def _configured(command: Command, workers: Range) -> RunConfig:
    root, run = storage.runs_root(command.storage), _run_name(command)
    gpus = Gpus.from_environment(os.environ)
    config = commands.configure(command, run=run, storage=root, workers=workers, gpus=gpus)
    config = dataclasses.replace(config, data=_absolute(config.data, command))
    command.recipe.look_at(config)
    storage.check_writable(root)
    paths = RunPaths.of(root, run)
    if _has_overwritten(paths):
        command = dataclasses.replace(command, overwrite=False)
    recorded = Recorded.of(
        storage.read_bytes(paths.file(runs.CONFIG_FILE)),
        storage.read_bytes(paths.file(runs.RESULT_FILE)),
    )
    if recorded is None or "recipe" not in (recorded.settings or {}):
        _check_free(paths.uri)
    return commands.resume(config, None if command.overwrite else recorded, command)


def _check_free(uri: str) -> None:
    """
    Raises:
        InputError: the folder of a run holds other things, and no run.
    """
    others = {*storage.list_files(uri), *storage.list_folders(uri)} - _BEFORE_TRAINING
    if others and not newest_number(uri):
        raise InputError(
            f"{uri} holds other things ({', '.join(sorted(others)[:3])}) and no run: give --run "
            "another name, or --storage another place"
        )


def overwrite(paths: RunPaths, command: Command, lease: Lease) -> Callable[[], None] | None:
    """Begin a run anew where that was asked for.

    Returns:
        A function that removes the earlier run of the name, all but the leases: to be called once
        the new one has made a step. Until then only the checkpoints of the earlier one do not
        count, and when this process is killed it is as it was.
    """
    mark = paths.file(runs.OVERWRITES_FILE)
    number, _, is_removing = (storage.read_bytes(mark) or b"").decode().partition(" ")
    if is_removing:  # a command that was killed meanwhile
        storage.remove_run(paths.uri, before=int(number))
    # Those that torchrun starts again resume what the first ones have begun anew.
    is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_done = _has_overwritten(paths) or (is_again and (is_removing or not number))
    if not command.overwrite or is_done:
        storage.remove_file(mark)
        return None

    def replace() -> None:
        storage.write_bytes(mark, f"{lease.number} is removing".encode())
        storage.remove_run(paths.uri, before=lease.number)
        storage.remove_file(mark)
        if job := os.environ.get(nodes.ENV_JOB):
            storage.write_bytes(paths.file(runs.OVERWRITTEN_FILE), job.encode())

    if lease.number == 1:  # the names of its checkpoints are not told from the earlier ones
        replace()
        return None
    storage.write_bytes(mark, str(lease.number).encode())
    return replace


def reopen(paths: RunPaths) -> None:
    """Remove the result of a complete run that is made longer: this one may end early, and be
    started again."""
    uri = paths.file(runs.RESULT_FILE)
    recorded = Recorded.of(None, storage.read_bytes(uri))
    if recorded is not None and recorded.is_complete:
        storage.remove_file(uri)


def _has_overwritten(paths: RunPaths) -> bool:
    """True if this job has already removed the earlier run. Its head was lost and restarted with
    the same command, and must not remove the job's own checkpoints."""
    job = os.environ.get(nodes.ENV_JOB)
    if not job:
        return False
    return storage.read_bytes(paths.file(runs.OVERWRITTEN_FILE)) == job.encode()


def _run_name(command: Command) -> str:
    # torchrun's processes must agree on the name, and each reads its own clock.
    stamp = os.environ.get("TORCHELASTIC_RUN_ID") or time.strftime("%Y%m%d-%H%M%S")
    return check_run_name(f"{command.recipe.name}-{stamp}" if command.run is None else command.run)


def _workers(command: Command) -> Range | None:
    """How many workers the run is made for, and with how few it continues; None where that is for
    the cluster to say."""
    commands.check(command)
    if _is_torchrun() and "WORLD_SIZE" in os.environ:
        return Range(int(os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]))
    wanted = command.workers
    if wanted is not None and wanted.low < 1:
        raise InputError(f"--workers is {wanted}: it must be at least 1")
    if command.local:
        return _local_workers(wanted)
    return wanted


def _local_workers(wanted: Range | None) -> Range:
    from training.system import devices

    if wanted is not None and wanted.low != wanted.high:
        raise InputError(
            f"--workers is {wanted}: a range needs a cluster that grows; with --local, "
            "give a number"
        )
    available, kind = devices.num_devices()
    # Two to a CPU are slow but right, and enough to try how a run resumes elsewhere.
    most = available if kind == "GPUs" else 2 * available
    if wanted is None:
        number = available if kind == "GPUs" else 1
        return Range(number, number)
    if wanted.high > most:
        raise InputError(
            f"--workers is {wanted}, but this machine has {available} {kind}: use at most {most}"
        )
    return wanted


def _absolute(data: str, command: Command) -> str:
    """Workers run in another folder: make a local folder's path absolute."""
    if "://" in data or data == command.recipe.built_in_data or catalog.find(data):
        return data
    return str(Path(data).expanduser().absolute())


def _already_complete(command: Command, error: RunCompleteError) -> int:
    """Show the result of the run; no error, because a job's second attempt may get here."""
    if not _is_first():
        return exits.OK
    from training.record import reader
    from training.runtime.outcome import print_result

    print(error, file=sys.stderr)
    paths = RunPaths.of(storage.runs_root(command.storage), _run_name(command))
    result = reader.read_result(paths.uri)
    if result is not None:
        settings = reader.read_json(paths.uri, runs.CONFIG_FILE) or {}
        print_result(result, command.recipe, paths.uri, settings=settings, as_json=command.json)
    return exits.OK


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_first() -> bool:
    """True in the command's only process, or in torchrun's process of rank 0."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
