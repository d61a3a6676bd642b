"""Proves that every mistake on the command line gets one clear line and exit code 2, before
anything is started or written."""

import json
import re
from pathlib import Path

import pytest

from contract import runs
from contract.runs import RunPaths
from training import command, launch
from training.data.catalog import IDX_FILES
from training.system import devices
from training.system.lease import Holder, Lease


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder with two CPUs and no GPU, whatever this machine has."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(devices, "gpu_names", list)
    monkeypatch.setattr(devices, "num_cpus", lambda: 2)
    return folder


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command line that must be refused."""
    try:
        code: object = launch.main(arguments)
    except SystemExit as end:  # argparse's own way out
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


MINE = ["ddp", "--local", "--run", "mine"]
#: A command line, and its error.
MISTAKES = {
    "dpp": "unknown recipe 'dpp'.*did you mean ddp\\?",
    "--local ddp": "unknown option before the recipe '--local'.*ddp, fsdp",
    "ddp --local --zebra": "unknown option --zebra.*--help",
    "ddp --local stray": "unknown option stray",
    "ddp --local --workers 0": "--workers is 0.*at least 1",
    "ddp --local --workers -2": "--workers is -2.*give a number",
    "ddp --local --workers 5": "--workers is 5.*2 CPUs.*at most 4",
    "ddp --local --workers 1:2": "a range needs a cluster that grows",
    "ddp --local --run ../up": r"run name '\.\./up'",
    "ddp --local --storage gs://bucket": "storage 'gs://bucket'.*s3://BUCKET",
    "ddp --local --storage no/such/place": "no/such does not exist.*make it first",
    "ddp --local --data nowhere": f"nowhere does not exist.*{IDX_FILES[0]}",
    "ddp --local --data .": "is empty",
    "ddp --local --data fashion_mnist": "did you mean fashion-mnist",
    "fsdp --local --model new:tiny --data tiny_shakespeare": "did you mean tiny-shakespeare",
    "ddp --local --report-to mlflow": "'mlflow': mlflow is none of tensorboard, wandb",
    "fsdp --local --model ./nope": r"model folder \./nope does not exist",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(
    line: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(MISTAKES[line], refused(line.split(), capsys), re.DOTALL)
    assert not any(path.is_file() for path in elsewhere.rglob("*"))


@pytest.fixture
def run(elsewhere: Path) -> Path:
    """Folder of a run of nine epochs."""
    folder = elsewhere / "runs" / "mine"
    folder.mkdir(parents=True)
    recorded = {"recipe": "ddp", "run": "mine", "global_batch": 64, "lr": 0.001, "epochs": 9}
    recorded |= {"preset": "digits", "batch_per_worker": 32, "seed": 0}
    (folder / "config.json").write_text(json.dumps(recorded))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Content of each file, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a year of work")


@pytest.mark.parametrize("option", ["", "--overwrite"])
@pytest.mark.parametrize(
    "names",
    [
        "train.py model/net.py .git/HEAD .venv/pyvenv.cfg",
        "model/model.safetensors model/config.json",
        "config.json model.safetensors",
        "checkpoints/step-00000100/mine.pt",
        "leases/flat.pdf houses.csv",
        "jobs/letter.tex thesis.tex",
    ],
)
def test_a_folder_that_is_no_run_is_refused_and_left_as_it_is(
    names: str, option: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(elsewhere / "project", *names.split())
    before = tree(elsewhere)
    err = refused(f"ddp --local --storage . --run project {option}".split(), capsys)
    assert f"{elsewhere}/project holds other things (" in err
    assert "give --run another name" in err
    assert tree(elsewhere) == before


@pytest.mark.parametrize("name", [".DS_Store", ".git/HEAD", "jobs/mine-abc.json", "leases/.part"])
def test_a_folder_that_holds_only_what_nobody_misses_is_free(name: str, elsewhere: Path) -> None:
    lay(elsewhere / "runs" / "mine", name)
    overwrite([*MINE, "--overwrite"])
    assert [*tree(elsewhere / "runs" / "mine")] == [name]


def test_overwrite_removes_what_a_run_has_written_and_nothing_of_the_user(run: Path) -> None:
    users = ["notes.md", ".git/HEAD", ".dvc/config", "model/net.py", "checkpoints/why.txt"]
    users += ["checkpoints/old/step.pt", ".staging-area/a", "step-00000001/a", "output/a"]
    lay(run, *users, "leases/00000001.json", "jobs/mine-abc.json")
    before = tree(run)
    overwrite([*MINE, "--epochs", "9"])
    assert tree(run) == before
    del before["config.json"]
    lay(run, "result.json", "report.html", "stacks/step-1.txt", "tensorboard/events.out", "wandb/a")
    lay(run, "model/model.safetensors", "model/config.json", ".staging-abcd_123/config.json")
    for step in ("step", "damaged-step", "diverged-step"):
        lay(run, f"checkpoints/{step}-00000001/state.pt")
    lay(run, "checkpoints/.step-00000001.part/state.pt")
    overwrite([*MINE, "--overwrite"])
    assert tree(run) == before


def test_overwrite_removes_checkpoints_behind_a_link_and_no_others(
    run: Path, elsewhere: Path
) -> None:
    disk = elsewhere / "disk"
    lay(disk, "step-00000001/state.pt", "other-run/step-00000001/state.pt")
    (run / "checkpoints").symlink_to(disk)
    overwrite([*MINE, "--overwrite"])
    assert [*tree(disk)] == ["other-run/step-00000001/state.pt"]


def overwrite(words: list[str], number: int = 2) -> None:
    """What a command does until it has made its first step, under a lease."""
    given = command.parse(words)
    config, _ = launch.configured(given)
    paths = RunPaths.of(config.storage, config.run)
    lease = Lease(paths.uri, number, Holder.here())
    before = tree(Path(paths.uri))
    if replace := launch.overwrite(paths, given, lease):
        mark = {runs.OVERWRITES_FILE: str(number).encode()}
        assert tree(Path(paths.uri)) == before | mark, "it is whole until the new one has a step"
        replace()


@pytest.mark.parametrize(
    ("mark", "restart", "resumes"),
    [
        # Killed while it removed the earlier run: the rest goes first, also without the option.
        ("2 is removing", "", True),
        # torchrun starts its ranks again, with the same words: before a first step, and after it.
        ("2", "1", False),
        ("", "1", True),
    ],
)
def test_a_run_that_was_begun_anew_is_never_mixed_with_the_earlier_one(
    mark: str, restart: str, resumes: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart or "0")
    names = ["step-00000009"] * (mark != "") + ["step-00000001-lease2"]
    lay(run, *(f"checkpoints/{name}/state.pt" for name in names))
    if mark:
        (run / runs.OVERWRITES_FILE).write_text(mark)
    paths = RunPaths(str(run))
    given = command.parse([*MINE, *(["--overwrite"] if restart else [])])
    replace = launch.overwrite(paths, given, Lease(paths.uri, 3, Holder.here()))
    assert (replace is None) == resumes
    left = [*tree(run / "checkpoints")]
    assert left == [f"{name}/state.pt" for name in (names[-1:] if resumes else names)]


def test_a_job_overwrites_a_run_once_and_then_resumes_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*MINE, "--overwrite"]
    monkeypatch.setenv("TRAIN_JOB", "first")
    overwrite(words)
    assert [*tree(run)] == ["overwritten-by"]
    lay(run, "checkpoints/step-00000001/state.pt", "leases/00000001.json")
    overwrite(words)  # its head was lost
    assert (run / "checkpoints").exists()
    monkeypatch.setenv("TRAIN_JOB", "second")
    overwrite(words)
    assert not (run / "checkpoints").exists()


def test_resuming_with_other_settings_names_each_difference(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run)
    err = refused([*MINE, "--lr", "0.01", "--seed", "4"], capsys)
    assert "lr:" not in err  # which may change
    assert "--seed: the run has 0, now 4" in err
    assert "--epochs: the run has 9" in err
    assert "--overwrite" in err
    assert tree(run) == before
