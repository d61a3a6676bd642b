"""Proves that settings are checked where they live, and that a run keeps those it must keep."""

import math
from dataclasses import replace
from typing import Any

import pytest

from contract import runs
from contract.errors import InputError
from tests.training.test_plan import config as fsdp
from training import recipes
from training.bookkeeping import check_longer
from training.checkpoint.checkpoints import Position
from training.ddp.settings import PRESETS, DdpConfig
from training.imagenet.settings import ImagenetConfig
from training.recipe import Recipe
from training.settings import TrainingConfig, differences

NEEDED = {"recipe": "ddp", "run": "r", "storage": "/s", "data": "digits"}


def config(**changes: Any) -> DdpConfig:
    return DdpConfig(**{**NEEDED, **changes})


@pytest.mark.parametrize("recipe", recipes.ALL, ids=recipes.NAMES)
def test_every_preset_of_every_recipe_is_valid(recipe: Recipe) -> None:
    for name, values in recipe.presets.items():
        given: dict[str, Any] = {**NEEDED, "recipe": recipe.name, "preset": name, **values}
        built = recipe.config(**given)
        assert {key: getattr(built, key) for key in values} == dict(values)


def test_the_ddp_preset_has_the_references_settings() -> None:
    built = config(num_workers=2, **PRESETS["ddp"])
    assert (built.images_per_step, built.lr, built.epochs) == (256, 1e-3, 10)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("epochs", True, "of type int"),
        ("flip", "yes", "of type bool"),
        ("run", "a/b", "no slash"),
        ("run", "-x", "not usable"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(setting: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as found:
        config(**{setting: value})
    assert str(value) in str(found.value)


def test_settings_survive_json_and_unknown_ones_of_a_newer_version_are_ignored() -> None:
    built = config(lr=0.5, flip=True)
    assert DdpConfig.from_json({**built.to_json(), "of_the_future": 1}) == built


@pytest.mark.parametrize(
    ("name", "had", "now"),
    [("preset", "tuned", "ddp"), ("batch_per_worker", 64, 32)],
)
def test_what_a_resumed_run_would_record_and_not_apply_is_refused(
    name: str, had: Any, now: Any
) -> None:
    recorded = config(global_batch=64, **{name: had}).to_json()
    resumed = config(**{name: now}).begun(recorded)
    (found,) = differences(recorded, resumed)
    assert found == f"--{name.replace('_', '-')}: the run has {had!r}, now {now!r}"


def test_a_run_from_before_there_was_a_setting_had_its_default() -> None:
    recorded = config().to_json()
    del recorded["model"]
    assert differences(recorded, config()) == []
    (found,) = differences(recorded, config(model="small"))
    assert found == "--model: the run has 'resnet18', now 'small'"


def imagenet(**changes: Any) -> ImagenetConfig:
    return ImagenetConfig(**{**NEEDED, "recipe": "imagenet", **changes})


@pytest.mark.parametrize(
    ("had", "now", "reason"),
    [
        (config(epochs=2, schedule="constant"), {"epochs": 3}, ""),
        (config(epochs=2, schedule="constant"), {"epochs": 1}, "--epochs: the run has 2, now 1"),
        (config(schedule="constant"), {"max_steps": 9}, "--max-steps: the run has 0, now 9"),
        (fsdp(max_steps=5, schedule="wsd"), {"max_steps": 8}, ""),
        (fsdp(max_steps=5), {"max_steps": 8}, "has its course over the whole run"),
        (imagenet(epochs=2, schedule="steps"), {"epochs": 3}, ""),
        (imagenet(epochs=2, first_size=64, schedule="steps"), {"epochs": 3}, "pictures grow"),
    ],
)
def test_a_run_is_made_longer_where_its_steps_stay_the_same(
    had: TrainingConfig, now: dict[str, Any], reason: str
) -> None:
    recorded, longer = had.to_json(), replace(had, **now)
    found = differences(recorded, longer, command_settings=now)
    assert [reason in each for each in found] == [True] * bool(reason)
    assert differences(recorded, longer), "the value of a preset makes no run longer"
    if not reason and not isinstance(had, ImagenetConfig):
        ends = [each.num_steps(4) for each in (had, longer)]
        rates = [[had.rate(n, end, peak=1.0) for n in range(ends[0])] for end in ends]
        same = math.floor(had.decay_begins(ends[0])) if had.schedule == "wsd" else ends[0]
        assert rates[0][:same] == rates[1][:same]


def test_a_run_whose_rate_has_begun_to_fall_is_not_made_longer() -> None:
    had = fsdp(max_steps=10, schedule="wsd", warmup_steps=2, decay_fraction=0.5)
    rates = [had.rate(n, 10, peak=1.0) for n in range(10)]
    assert rates == pytest.approx([0.25, 0.75, 1, 1, 1, 0.9, 0.7, 0.5, 0.3, 0.1])
    recorded, longer = had.to_json(), replace(had, max_steps=20)
    check_longer(longer, recorded, Position(step=5), 100)
    check_longer(longer, {}, Position(), 100)
    check_longer(had, recorded, Position(step=6), 100)
    with pytest.raises(InputError, match=r"only a run that was stopped before .* step 6 of 10"):
        check_longer(longer, recorded, Position(step=6), 100)
    (found,) = differences(recorded, longer, command_settings=("max_steps",), is_complete=True)
    assert "has begun to fall" in found


@pytest.mark.parametrize("made", [config, fsdp])
def test_a_resumed_run_keeps_its_learning_rate_unless_another_is_given(made: Any) -> None:
    recorded = made(global_batch=64, lr=0.5).to_json()
    assert made(global_batch=64).begun(recorded).lr == 0.5
    given = {name: value for name, value in recorded.items() if name != "lr"}
    slower = made(global_batch=64, lr=0.1).begun(given)
    assert slower.lr == 0.1
    assert differences(recorded, slower) == []


def test_checkpoint_names_sort_by_step_and_say_it() -> None:
    names = [runs.checkpoint_name(step) for step in (2, 10, 12_345_678)]
    assert names == sorted(names)
    # The writers without a lease and with the first one add nothing.
    assert runs.checkpoint_name(2, 1) == runs.checkpoint_name(2) == "step-00000002"
    assert runs.checkpoint_key(runs.checkpoint_name(2, 12)) == (2, 12)
    for other in ("step-12", "damaged-step-00000012", ".step-00000001", "step-00000012-lease"):
        assert runs.checkpoint_key(other) is None


@pytest.mark.parametrize(
    ("workers", "microbatch", "passes", "size"),
    [(1, 5, 4, 4), (2, 3, 3, 3), (3, 16, 1, 6)],
)
def test_a_worker_takes_the_fewest_passes_and_none_is_larger_than_it_needs_to_be(
    workers: int, microbatch: int, passes: int, size: int
) -> None:
    found = fsdp(num_workers=workers, global_batch=16, microbatch=microbatch)
    assert (found.num_microbatches, found.sequences_per_pass) == (passes, size)


@pytest.mark.parametrize(
    ("total", "per_epoch", "given", "every"),
    [
        (20_000, 20_000, 0, 1000),  # 20 times
        (600, 600, 0, 50),
        (30, 30, 0, 30),  # a short run: as before, at the end
        (100, 20, 0, 20),  # every epoch
        (20_000, 20_000, 25, 25),
    ],
)
def test_a_long_run_is_evaluated_twenty_times_unless_it_is_told_how_often(
    total: int, per_epoch: int, given: int, every: int
) -> None:
    assert fsdp(evaluate_every=given).steps_between_evaluations(total, per_epoch) == every
