"""``trainctl predict``, and what transformers reads beside a model for pictures; the models of real
runs are used in tests/training, in ``test_local_runs`` and ``test_imagenet``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from tests.training.test_augmentation import pictures
from training import recipes
from training.data import augmentation
from training.models import classifiers
from training.models.small import Small


def test_transformers_makes_of_a_picture_what_an_evaluation_sees(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    canvases, extents = pictures()
    expected = augmentation.middle_views(canvases, extents, size=56, share=0.875)
    make: Any = AutoImageProcessor
    for share, least, most in ((0.875, 0, 0.05), (1.0, 0.1, 9)):  # the test tells views apart
        colors = {"mean": augmentation.MEAN, "std": augmentation.STD}
        content = json.dumps(classifiers.processor(56, **colors, share=share))
        (tmp_path / "preprocessor_config.json").write_text(content)
        processor = make.from_pretrained(tmp_path)
        for canvas, (height, width), view in zip(canvases, extents.tolist(), expected, strict=True):
            image = Image.fromarray(canvas[:height, :width].numpy())
            found = processor(image, return_tensors="pt")["pixel_values"]
            assert least <= (found - view[None]).abs().mean() < most


def test_a_model_in_the_bucket_that_transformers_does_not_know_is_used(
    account: Account, cli: Cli, tmp_path: Path
) -> None:
    model = Small([f"class {number}" for number in range(10)])
    weights = {name: each.contiguous() for name, each in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    content = json.dumps(classifiers.processor(28, mean=[0.3], std=[0.4]))
    picture = str(tmp_path / "a.png")
    Image.fromarray(np.eye(28, dtype=np.uint8)).save(picture)
    assert "has no model/preprocessor_config.json" in cli.refuses("predict", "r1", picture)
    assert "there is no folder runs/r1/model" in cli.refuses("predict", "runs/r1", picture)
    account.objects |= {
        "runs/r1/model/model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
        "runs/r1/model/config.json": model.config.to_json_string().encode(),
        "runs/r1/model/preprocessor_config.json": content.encode(),
    }
    (found,) = cli.json("predict r1", picture)
    assert {*found["classes"]} == {f"class {number}" for number in range(10)}
    likely = next(iter(found["classes"]))
    assert cli("predict r1", picture).out.startswith(f"{picture}: {likely} ")
    Path(picture).write_bytes(b"none")
    assert "this is no picture" in cli.refuses("predict", "r1", picture)
    use = {each.name: each.use("s3://bucket/runs/r1", {})[:2] for each in recipes.ALL}
    assert use["imagenet"] == ["trainctl predict r1 PICTURE", "trainctl download r1"]
    assert use["fsdp"][0] == "trainctl export r1 --to DIR"
