"""The laptop that submits a job and the node that trains read a command line in the same way: each
refuses what the other one would, in the same words."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import InputError
from contract.nodes import ENV_JOB, ENV_NUM_GPUS, ENV_TRAINS, ENV_WORKER_GPUS, Gpus, Range
from training import command, launch, recipes
from training.command import Recorded, read_command
from training.recipe import Recipe
from training.settings import fields_of, kind_of, option_name

ONE = Range(1, 1)


def test_settings_are_those_of_preset_and_options() -> None:
    words = ["ddp", "--preset", "tuned", "--epochs=3", "--no-flip"]
    found = read_command(words, run="r", workers=Range(2, 4))
    assert (found.run, found.num_workers, found.preset) == ("r", 4, "tuned")
    expected = {"epochs": 3, "lr": 3e-3, "flip": False, "global_batch": 4 * 128}
    assert expected.items() <= found.to_json().items()


#: Words of a job's recipe, and what is wrong with them.
REFUSED = {
    "ddp -h": "-h is not an option of a job's recipe",
    "": "no recipe is given: choose ddp, fsdp, imagenet, bandwidth",
    "ddp --run=other": "--run is not an option of a job's recipe",
    "ddp --data tiny-shakespeare": (
        "--data is tiny-shakespeare, which is text, and this recipe trains on images: choose "
        "fashion-mnist, mnist"
    ),
    "ddp --epochs 0": "--epochs is 0: .* 1",
    "ddp --max-steps 9007199254740993": "9007199254740992",
    "ddp --lr 0": "--lr is 0.0: .* 0",
    "ddp --lr nan": "--lr is nan",
    "ddp --precision fp8": "--precision is 'fp8': .* auto, fp32, bf16",
    "fsdp --preset tiny --data mnist": "text",
    "fsdp --lora-alpha 8": "--lora-rank",
    "fsdp --global-batch 3": "--global-batch is 3, .* 4 ",
    "imagenet --data mnist": "pictures",
    "imagenet --image-size 32 --first-size 64": "--first-size is 64, .* 32",
    "imagenet --image-size 16": "--image-size is 16: .* 32 ",
    "imagenet --model resnet18": "--model is 'resnet18': .* resnet50",
    "imagenet --global-batch 16": " 4 workers",
    "bandwidth --min-bytes 1024 --max-bytes 512": "--min-bytes, 1024",
    "bandwidth --factor 1": "--factor is 1: .* 2",
    "bandwidth --lr 1": "--lr",
    "fsdp --data '0.7 s3://b/web, 0.3 hf://o/n'": "mixtures",
    # An option whose value is two dashes has none.
    "ddp --lr=--": "--lr",
    "ddp --epochs=--": "--epochs",
    "ddp --precision=--": "--precision",
    "ddp --preset=--": "--preset",
    "ddp --data=--": "--data",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_wrong_is_said_on_the_laptop(line: str) -> None:
    with pytest.raises(InputError, match=REFUSED[line]):
        read_command(shlex.split(line), run="r", workers=Range(4, 4))


def test_hosts_join_and_leave_with_all_of_their_gpus() -> None:
    assert Gpus(per_node=4).possible(Range(1, 10)) == [4, 8, 10]
    assert Gpus(per_node=4).possible(Range(5, 6)) == [6]
    assert Gpus(per_node=4, on_head=2).possible(Range(1, 10)) == [2, 6, 10]
    assert Gpus(per_node=0, on_head=0).possible(Range(1, 3)) == [1, 2, 3]


def test_the_batch_of_a_run_may_be_too_small_for_the_workers_that_resume_it() -> None:
    begun = read_command(["ddp", "--global-batch", "24"], run="r", workers=ONE)
    recorded = Recorded.of(json.dumps(begun.to_json()).encode(), None)
    with pytest.raises(InputError, match=r"24 is too small for 6 workers: .*--global-batch 48 or"):
        read_command(["ddp"], run="r", workers=Range(1, 6), recorded=recorded)


# --- the laptop refuses what the node refuses -----------------------------------------------------
@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a node finds runs; data is left out of it, as a laptop cannot look at it."""
    monkeypatch.setattr(Recipe, "look_at", lambda *_: None)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def on_laptop(words: Sequence[str], workers: Range, gpus: Gpus, earlier: Recorded | None) -> str:
    """The sentence with which a laptop refuses a command line; empty where it accepts."""
    try:
        read_command(words, run="r", workers=workers, gpus=gpus, recorded=earlier)
    except InputError as error:
        return str(error)
    return ""


def on_node(words: Sequence[str], workers: Range, gpus: Gpus, storage: Path) -> str:
    """The same of the node that the command line is sent to."""
    recipe, *options = words
    added = ["--run", "r", "--workers", str(workers), "--storage", str(storage)]
    variables = {
        ENV_JOB: "a-job",
        ENV_WORKER_GPUS: str(gpus.per_node),
        ENV_NUM_GPUS: str(gpus.on_head or 0),
        ENV_TRAINS: "0" if gpus.on_head is None else "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            launch.configured(command.parse([recipe, *added, *options]))
        except InputError as error:
            return str(error)
    return ""


@st.composite
def options(draw: st.DrawFn, recipe: Recipe) -> list[str]:
    """Some settings of a recipe: mostly valid values, some not."""
    words = []
    fields = {k: v for k, v in fields_of(recipe.config).items() if v.metadata["cli"]}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)):
        field = fields[name]
        if kind_of(field) is bool:
            words += [draw(st.sampled_from([option_name(name), f"--no-{name}", f"--{name}=x"]))]
            continue
        near = [field.metadata[key] for key in ("low", "high", "above")]
        values: list[Any] = [field.default, *(each for each in near if each is not None)]
        values += [each + 1 for each in values if isinstance(each, int | float)]
        values += [each - 1 for each in values if isinstance(each, int | float)]
        values += [*(field.metadata["choices"] or ()), "nan", "x", 2, 6, 0.5, 12]
        words.append(f"{option_name(name)}={draw(st.sampled_from(values))}")
    if draw(st.booleans()):
        words += ["--preset", draw(st.sampled_from([*recipe.presets, "none"]))]
    if draw(st.booleans()):
        data = draw(st.sampled_from(["s3://bucket/data", "mnist", "tiny-shakespeare"]))
        words += ["--data", data]
    if draw(st.integers(0, 9)) == 0:
        words += [draw(st.sampled_from(["--overwrite", "--max-failures=-1", "--verbose", "--no"]))]
    return words


@pytest.mark.parametrize("recipe", recipes.ALL, ids=recipes.NAMES)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_laptop_and_node_refuse_the_same_in_the_same_words(
    recipe: Recipe, runs: Path, data: st.DataObject
) -> None:
    words = [recipe.name, *data.draw(options(recipe))]
    low = data.draw(st.integers(0, 4))
    workers = Range(low, low + data.draw(st.sampled_from([0, 0, 1, 4])))
    gpus = data.draw(
        st.builds(Gpus, per_node=st.integers(0, 4), on_head=st.none() | st.integers(0, 4))
    )
    # What the bucket has of the run: nothing, an attempt with settings like these, or another's.
    config = result = None
    if data.draw(st.booleans()):
        earlier = data.draw(st.sampled_from(recipes.ALL))
        begun = [earlier.name, *data.draw(options(earlier))]
        if data.draw(st.booleans()):
            begun = words
        try:
            config = json.dumps(read_command(begun, run="r", workers=ONE).to_json()).encode()
        except InputError:
            config = data.draw(st.sampled_from([None, b"{"]))
        status = data.draw(st.sampled_from(["succeeded", "failed"]))
        result = json.dumps({"status": status}).encode()
    folder = runs / "r"
    folder.mkdir(exist_ok=True)
    (folder / "leases").mkdir(exist_ok=True)  # what a run has, whatever became of its files
    (folder / "leases" / "00000001.json").write_text("{}")
    for name, content in (("config.json", config), ("result.json", result)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    here = on_laptop(words, workers, gpus, Recorded.of(config, result))
    assert here == on_node(words, workers, gpus, runs)


def test_help_is_given_also_beside_an_option_without_its_value() -> None:
    assert "--preset" in command.help_text(["ddp", "--preset", "--help"])
