"""The startup benchmark compares the right columns, counts every process, and leaves nothing."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import baseline, equality, meter, phases, startup
from benchmarks.phases import Spent
from tests.conftest import ROOT
from training.record.events import Evaluation, Event, Phase, Step

# Two processes, each busy for 0.3 CPU seconds: the command, and a child that leaves its session
# and outlives it.
_BUSY = """
import subprocess, sys, time
child = "import time\\nwhile time.process_time() < 0.3: pass\\nprint('done', flush=True)\\n"
child += "time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
while time.process_time() < 0.3: pass
time.sleep(2)  # without a cgroup, only what is still there is counted
"""


def spent(wall: float, cpu: float) -> Spent:
    """A start whose phases end after 10, 20, 70 and 100 % of the time."""
    parts = {"ray_ready": 0.1, "workers_ready": 0.2, "model_ready": 0.7, "first_step": 1.0}
    return Spent(
        wall_s={name: part * wall for name, part in parts.items()},
        cpu_s={name: part * cpu for name, part in parts.items()},
        foreign_cpu_s=0.25,
    )


def test_a_column_has_medians_and_all_single_values() -> None:
    starts = [spent(wall, cpu) for wall, cpu in ((30.0, 50.0), (20.0, 60.0), (90.0, 40.0))]
    found = phases.column(starts, last="first_step")
    assert (found.wall_s, found.cpu_s) == (30.0, 50.0)
    assert found.all_wall_s == (30.0, 20.0, 90.0)
    assert found.foreign_cpu_s == (0.25,) * 3


def test_a_ratio_says_how_many_times_less_the_second_column_takes() -> None:
    slow, quick = (
        phases.column([spent(*each)], last="first_step") for each in ((30.0, 20.0), (10.0, 5.0))
    )
    assert phases.ratios(slow, quick) == (3.0, 4.0)


def test_a_phase_is_counted_from_the_one_before_it() -> None:
    found = phases.split([spent(10.0, 20.0)] * 3)
    assert [each.wall_s for each in found.values()] == pytest.approx([1, 1, 5, 3])
    assert [each.cpu_s for each in found.values()] == pytest.approx([2, 2, 10, 6])


def test_each_way_comes_first_in_one_of_as_many_rounds() -> None:
    rounds = [phases.rotated(["baseline", "before", "now"], number) for number in range(4)]
    assert [each[0] for each in rounds] == ["baseline", "before", "now", "baseline"]
    assert all(sorted(each) == ["baseline", "before", "now"] for each in rounds)


def test_the_first_step_ends_the_phases_of_a_record() -> None:
    found: list[Event] = [
        Phase(name="ray_ready", time=1.0),
        Phase(name="another", time=1.5),
        Evaluation(step=0, epoch=0, loss=1.0),
    ]
    assert phases.phase_times(found) == {"ray_ready": 1.0}
    found += [
        Step(step=number, epoch=1, loss=1.0, lr=0.1, grad_norm=1.0, time=2.0 + number)
        for number in (1, 2)
    ]
    assert phases.phase_times(found) == {"ray_ready": 1.0, "first_step": 3.0}


def test_a_value_between_two_samples_is_interpolated() -> None:
    samples = [(10.0, 0.0), (12.0, 4.0), (13.0, 4.5)]
    found = [phases.interpolated(samples, at) for at in (9.0, 10.0, 11.0, 12.5, 14.0)]
    assert found == [0.0, 0.0, 2.0, 4.25, 4.5]


def test_the_headline_is_that_of_the_first_recipe() -> None:
    local = {"ddp": {"ratio": 3.0, "ratio_cpu": 4.0, "now": {}}, "fsdp": {"ratio": 2.0}}
    synth = {"ratio": 9.0}
    assert startup._headline({"local": local, "synth": synth}) == {"ratio": 3.0, "ratio_cpu": 4.0}
    assert startup._headline({"synth": synth}) == {"ratio": 9.0}
    assert startup._headline({"equal": {"equal": True}}) == {"ratio": None}


def test_a_process_that_imports_another_checkout_is_seen() -> None:
    opened = "7 /a/training/launch.py\n7 /a/training/data/text.py\n9 /b/training/worker.py\n"
    assert baseline.imported_from(opened) == ({"/a", "/b"}, 2)


def test_a_column_runs_its_own_code_whatever_the_caller_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(startup.VALIDATION_SWITCH, "false")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    now = startup.Way(name="now", folder=ROOT).environment()
    assert startup.VALIDATION_SWITCH not in now
    assert now["PYTHONPATH"] == str(ROOT)


@pytest.mark.parametrize(
    ("settings", "variables"),
    [({}, {}), ({"validation": False}, {"CDK_VALIDATION": "false"}), ({"validation": True}, {})],
)
def test_a_synth_validates_as_a_deploy_of_its_checkout_would(
    tmp_path: Path, settings: dict[str, bool], variables: dict[str, str]
) -> None:
    (tmp_path / "cdk.json").write_text(json.dumps(settings))
    assert startup.deploy_variables(tmp_path) == variables


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture(params=["cgroup", "marked"])
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to count; skips the first where no cgroup can be made."""
    if request.param == "marked":
        monkeypatch.setattr(meter, "_cgroup", lambda _mark: None)
    else:
        group = meter._cgroup("probe")
        if group is None:
            pytest.skip("no cgroup can be made here: that needs root or a delegated group")
        group.close()
    return str(request.param)


@pytest.mark.usefixtures("counting")
def test_all_processes_of_a_command_are_counted_and_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", _BUSY]
    with meter.Tree(command, folder=tmp_path, environment=os.environ, log=log) as tree:
        deadline = time.monotonic() + 60
        while tree.exit_code is None or "done" not in tree.printed():
            assert time.monotonic() < deadline, tree.printed()
            tree.cpu_s()
            time.sleep(0.02)
        assert tree.cpu_s() > 0.5
        assert len(tree.commands()) == 1  # the child, which outlives the command
        left = tree._counter.pids()
    assert len(left) == 1
    assert not meter._is_running(left[0])
    if isinstance(tree._counter, meter._Cgroup):
        assert not tree._counter._folder.exists()


# --- the baseline -------------------------------------------------------------------------------


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(baseline.BaselineError, match=r"no training/launch\.py"),
        baseline.checked_out(str(tmp_path)),
    ):
        pass


def test_a_clone_without_the_commit_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(baseline, "ROOT", tmp_path)
    with (
        pytest.raises(baseline.BaselineError, match="git fetch --unshallow"),
        baseline.checked_out(None),
    ):
        pass


def test_the_worktree_is_removed_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        command = ["git", "-C", str(tmp_path), *settings, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("earlier")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(baseline, "ROOT", tmp_path)
    monkeypatch.setattr(baseline, "COMMIT", git("rev-parse", "HEAD").strip())
    (tmp_path / "file").write_text("now")
    with pytest.raises(KeyboardInterrupt), baseline.checked_out(None) as folder:  # noqa: PT012
        assert (folder / "file").read_text() == "earlier"
        assert baseline.commit_of(folder) == baseline.COMMIT
        raise KeyboardInterrupt
    assert not folder.exists()
    assert len(git("worktree", "list").splitlines()) == 1


# --- equality -----------------------------------------------------------------------------------


def a_run(folder: Path, *, weight: float = 0.0, loss: float = 0.5, seconds: float = 1.0) -> Path:
    """A small run's folder, as the ddp recipe writes it."""
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    save_file({"fc.weight": torch.tensor([1.0, weight])}, checkpoint / "model.safetensors")
    state = {
        "optimizer": {"fc.weight": {"step": torch.tensor(1.0)}},
        "position": {"step": 1, "seconds": seconds},
        "config": {"lr": 0.1, "storage": str(folder.parent)},
    }
    torch.save(state, checkpoint / "state.pt")
    (checkpoint / "manifest.json").write_text(json.dumps({"of": seconds}))
    events = [
        {"type": "step", "step": 1, "loss": loss, "time": seconds},
        {"type": "evaluation", "step": 1, "loss": loss, "seconds": seconds},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_runs_that_differ_only_in_their_clocks_and_places_are_equal(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one" / "run")
    other = a_run(tmp_path / "other" / "run", seconds=2.0)
    found = equality.compare(one, other)
    assert found.differences == ()
    assert found.equal
    assert (found.steps, found.evaluations, found.tensors) == (1, 1, 2)
    assert found.files_with_equal_bytes == ("checkpoints/step-00000001/model.safetensors",)
    assert found.files == 3


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"loss": 0.5000000000000001}, "event 0 differs"),
        ({"weight": -0.0}, "model.safetensors: fc.weight differs"),
    ],
)
def test_a_difference_in_the_last_bit_is_found(
    tmp_path: Path, change: dict[str, float], difference: str
) -> None:
    found = equality.compare(a_run(tmp_path / "one"), a_run(tmp_path / "other", **change))
    assert not found.equal
    assert any(difference in each for each in found.differences), found.differences


def test_a_missing_checkpoint_is_a_difference(tmp_path: Path) -> None:
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    shutil.rmtree(other / "checkpoints")
    assert not equality.compare(one, other).equal
    assert not equality.compare(other, other).equal  # nothing was compared


# --- the script ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.night
def test_the_script_times_the_help_of_two_checkouts() -> None:
    # This checkout against itself: a shallow clone, as in CI, has no other commit.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.startup", "--json"),
            *("--only", "trainctl", "--runs", "1", "--baseline", str(ROOT)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    columns = [found["trainctl"][name] for name in ("baseline", "now")]
    assert found["ratio_cpu"] == columns[0]["cpu_s"] / columns[1]["cpu_s"]
    assert all(value > 0 for each in columns for value in each["all_cpu_s"])
