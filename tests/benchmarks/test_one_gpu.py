"""The measurement of pictures on one GPU runs on a CPU, and adds up what it saw."""

import pytest

from tests.benchmarks.test_scripts import printed

pytestmark = [pytest.mark.slow, pytest.mark.night]


def test_packed_pictures_are_trained_without_ray() -> None:
    words = ["--models", "efficientnet-b0", "--batches", "8", "--steps", "4", "--packed", "raw"]
    (run,) = printed("benchmarks.imagenet_gpu", *words)["runs"]
    assert list(run["phases_s"]) == ["data", "forward", "backward", "optimizer", "checkpoint"]
    assert run["step_time_s"] == pytest.approx(sum(run["phases_s"].values()))
    assert run["images_per_s"] == pytest.approx(8 / run["step_time_s"])
