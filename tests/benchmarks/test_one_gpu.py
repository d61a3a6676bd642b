"""The measurements for a machine with one GPU and no Ray run on a CPU, and add up what they saw."""

from pathlib import Path

import pytest

from benchmarks import fashion_gpu
from tests.benchmarks.test_scripts import printed
from tests.training.test_data import write_images


def test_settings_to_try_become_words_of_the_command_line() -> None:
    assert fashion_gpu.words_of("lr=0.006 global_batch=256 flip=false compile=true") == [
        *("--lr", "0.006", "--global-batch", "256", "--no-flip", "--compile")
    ]


def test_ways_are_compared_by_their_means_and_medians() -> None:
    runs = [
        {"way": way, "accuracy": accuracy, "accuracy_after_1": 0.8, "seconds": s, "images_per_s": 9}
        for way, accuracy, s in [
            *(("tuned", 0.92, 60.0), ("tuned", 0.93, 20.0), ("tuned", 0.94, 30.0)),
            *(("small-stem", 0.94, 10.0), ("small-stem", 0.95, 16.0)),
        ]
    ]
    found = fashion_gpu.summary(runs)
    assert list(found["ways"]) == ["small-stem", "tuned"]
    assert found["ways"]["tuned"]["accuracy"] == pytest.approx(0.93)
    assert (found["ways"]["tuned"]["seeds"], found["ways"]["tuned"]["seconds"]) == (3, 30.0)
    assert found["ratio"] == pytest.approx(30 / 13)
    assert fashion_gpu.summary(runs[:3])["ratio"] is None


@pytest.mark.slow
@pytest.mark.night
def test_small_images_are_trained_without_ray(tmp_path: Path) -> None:
    data = write_images(tmp_path, num_train=130, num_test=50)
    tried = "epochs=2 width=8 global_batch=64 cutout=4"
    words = ["--data", str(data), "--seeds", "1", "--ways", "--try", tried]
    (run,) = printed("benchmarks.fashion_gpu", *words)["runs"]
    assert (run["way"], run["epochs"]) == (tried, 2)
    assert 0 < run["seconds"] < 100
    for accuracy in (run["accuracy"], run["accuracy_after_1"]):
        assert 50 * accuracy == pytest.approx(round(50 * accuracy))  # of 50 images


@pytest.mark.slow
@pytest.mark.night
def test_packed_pictures_are_trained_without_ray() -> None:
    words = ["--models", "efficientnet-b0", "--batches", "8", "--steps", "4", "--packed", "raw"]
    (run,) = printed("benchmarks.imagenet_gpu", *words)["runs"]
    assert list(run["phases_s"]) == ["data", "forward", "backward", "optimizer"]
    assert run["step_time_s"] == pytest.approx(sum(run["phases_s"].values()))
    assert run["images_per_s"] == pytest.approx(8 / run["step_time_s"])
