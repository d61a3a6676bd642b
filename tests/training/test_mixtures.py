"""Proves that several texts are mixed as their weights say, in one order on any number of workers,
and that each is evaluated by itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import InputError
from tests import forks
from tests.conftest import ROOT
from tests.training.local_runs import trained
from tests.training.test_plan import config as fsdp
from training.data import mixture
from training.data.mixed_feed import MixedFeed, described, feed_for
from training.fsdp import inputs
from training.fsdp.settings import PRESETS, FsdpConfig
from training.loop.losses import IGNORE
from training.record.events import Evaluation, Finished, Noted, Step, Warned

pytestmark = pytest.mark.usefixtures("cache")

LICENSE = str(ROOT / "LICENSE")
CHATS = '{"prompt": "How many are %d and 1?", "completion": "They are %d."}\n'


def words(folder: Path, name: str, num: int = 60) -> Path:
    path = folder / name
    path.write_text("\n\n".join(f"{name} has document {each}, of {num}" for each in range(num)))
    return path


def config(tmp_path: Path, data: str, **changes: Any) -> FsdpConfig:
    sizes = {"held_out_every": 5, "seq_len": 32, "global_batch": 4}
    return fsdp(**{**PRESETS["tiny"], "storage": str(tmp_path), "data": data, **sizes, **changes})


def mixed(settings: FsdpConfig) -> MixedFeed:
    feed, _ = feed_for(
        mixture.sources_of(settings.data),
        inputs.stores_of(settings),
        seq_len=settings.seq_len,
        global_batch=settings.global_batch,
        seed=settings.seed,
    )
    assert isinstance(feed, MixedFeed)
    return feed


def two(tmp_path: Path, weights: tuple[str, str] = ("0.7", "0.3")) -> str:
    small = words(tmp_path, "small.txt", 20)
    return f"{weights[0]} {LICENSE}, {weights[1]} {small}"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("s3://bucket/web", [("s3://bucket/web", 1, "web")]),
        ("/a, b/c d.txt", [("/a, b/c d.txt", 1, "c_d")]),
        (
            "0.7 s3://b/web/, 0.3 hf://o/n",
            [("s3://b/web/", 0.7, "web"), ("hf://o/n", 0.3, "n")],
        ),
        ("7 a/x.jsonl,3 b/x.txt", [("a/x.jsonl", 0.7, "x"), ("b/x.txt", 0.3, "x_2")]),
        ("1 a,b, 3 c", [("a,b", 0.25, "a_b"), ("c", 0.75, "c")]),
        (
            "1e-1 python-help, .9 Ünï",
            [("python-help", 0.1, "python_help"), ("Ünï", 0.9, "n")],
        ),
    ],
)
def test_sources_are_told_from_their_weights(
    data: str, found: list[tuple[str, float, str]]
) -> None:
    sources = mixture.sources_of(data)
    assert [(each.place, each.share, each.label) for each in sources] == found
    assert mixture.sources_of(mixture.with_places(data, str)) == sources


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"text nowhere does not exist"):
        inputs.look_at(config(tmp_path, f"1 {LICENSE}, 1 nowhere"))
    inputs.look_at(config(tmp_path, "1 python-help, 1 s3://bucket/text"))


def test_the_batch_of_a_step_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    settings = inputs.prepare(config(tmp_path, two(tmp_path)))
    feed, again = mixed(settings), mixed(settings)
    total = sum(each.feed.num_sequences for each in feed.parts)
    assert feed.steps_per_epoch == total // 4
    seen: list[list[int]] = [[], []]
    num = 3 * feed.steps_per_epoch
    for step in range(num):
        whole = feed.step(step, rank=0, world_size=1).tokens.tolist()
        for world_size in (2, 4):
            parts = [feed.step(step, rank=r, world_size=world_size) for r in range(world_size)]
            assert sorted(row for each in parts for row in each.tokens.tolist()) == sorted(whole)
        for own, found in zip(seen, feed.sequences(step), strict=True):
            own += found.tolist()
    # As a run would that resumes there.
    for step in (num - 1, 1):
        assert [each.tolist() for each in again.sequences(step)] == [
            each.tolist() for each in feed.sequences(step)
        ]
    shares = [len(own) / (4 * num) for own in seen]
    # Of each epoch, up to three sequences fill no step.
    assert shares == pytest.approx([0.7, 0.3], abs=4 / total)
    # Each source has epochs of its own, and none of its sequences comes much more often.
    for own, part in zip(seen, feed.parts, strict=True):
        counts = np.bincount(own, minlength=part.feed.num_sequences)
        assert counts.max() <= -(-len(own) // part.feed.num_sequences) + 1


def test_a_person_is_told_how_often_each_source_is_seen(tmp_path: Path) -> None:
    feed = mixed(inputs.prepare(config(tmp_path, two(tmp_path, ("1", "9")))))
    license, small = (each.feed.num_sequences for each in feed.parts)
    facts, warnings = described(feed, 50)
    assert facts == [
        f"license: {license} sequences, 10.00% of the run's, each seen {20 / license:.2f} times",
        f"small: {small} sequences, 90.00% of the run's, each seen {180 / small:.2f} times",
    ]
    (warning,) = warnings
    assert warning.startswith(f"small is repeated {180 / small:.1f} times in this run")


def test_a_run_goes_on_only_with_the_same_texts_and_weights(tmp_path: Path) -> None:
    prepared = inputs.prepare(config(tmp_path, two(tmp_path)))
    first, second = (each.info.key for each in inputs.stores_of(prepared))
    assert prepared.text_key == f"0.7 {first}, 0.3 {second}"
    same = replace(prepared, data=two(tmp_path, ("7", "3")))
    assert inputs.prepare(same).text_key == prepared.text_key
    for data in (two(tmp_path, ("0.6", "0.4")), LICENSE):
        with pytest.raises(InputError, match=r"of a mixture, with the same weights in the same"):
            inputs.prepare(replace(prepared, data=data))
    copy = tmp_path / "copy" / "LICENSE"
    copy.parent.mkdir()
    copy.write_bytes(Path(LICENSE).read_bytes())
    with pytest.raises(InputError, match=r"two of the sources have the same text"):
        inputs.prepare(config(tmp_path, f"1 {LICENSE}, 1 {copy}"))


def test_conversations_among_text_are_learned_by_their_answers_only(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(CHATS % (each, each + 1) for each in range(40)))
    settings = inputs.prepare(config(tmp_path, f"1 {LICENSE}, 1 {chats}", seq_len=96))
    feed = mixed(settings)
    assert feed.isolates
    batch = feed.step(1, rank=0, world_size=1)
    assert batch.positions is not None
    of_text = [(row != IGNORE).all() for row in batch.labels]
    assert {*of_text} == {True, False}
    for row, is_text in enumerate(of_text):
        learned = batch.labels[row] != IGNORE
        assert (batch.labels[row][learned] == batch.tokens[row, 1:][learned]).all()
        assert (np.diff(batch.positions[row]) == 1).all() == is_text
    assert feed.num_labels(1) == batch.num_labels == (batch.labels != IGNORE).sum()
    passes = [feed.step(1, rank=rank, world_size=2) for rank in range(2)]
    assert sum(each.num_labels for each in passes) == batch.num_labels


def test_a_source_that_is_too_short_is_named(tmp_path: Path) -> None:
    short = words(tmp_path, "short.txt", 5)
    settings = inputs.prepare(config(tmp_path, f"1 {LICENSE}, 1 {short}", seq_len=400))
    with pytest.raises(InputError, match=r"short.txt: .* 0 sequences of 400"):
        mixed(settings)


@pytest.mark.slow
def test_a_run_on_a_mixture_is_evaluated_source_by_source(tmp_path: Path) -> None:
    settings = inputs.prepare(
        config(
            tmp_path,
            two(tmp_path),
            max_steps=6,
            evaluate_every=3,
            report_every=1,
            sample_tokens=4,
            eval_sequences=8,
        )
    )
    events, _ = forks.run(2, trained, settings)
    assert sum(isinstance(each, Noted) for each in events) == 2
    assert not [each for each in events if isinstance(each, Warned)]
    found = [each for each in events if isinstance(each, Evaluation)]
    assert [each.step for each in found] == [0, 3, 6]
    for each in found:
        assert list(each.measures) == ["perplexity", "loss_license", "loss_small"]
        weighted = 0.7 * each.measures["loss_license"] + 0.3 * each.measures["loss_small"]
        assert each.loss == pytest.approx(weighted)
    (end,) = [each for each in events if isinstance(each, Finished)]
    assert end.measures == found[-1].measures
    steps = [each.loss for each in events if isinstance(each, Step)]
    assert steps[-1] < steps[0]
