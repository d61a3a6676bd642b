"""Proves that a trained model for pictures is used as it was evaluated: by the lines that a run
prints, by transformers, and by ``trainctl predict``."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contract import exits
from tests.trainctl.conftest import Cli
from tests.training.local_runs import DIGITS, launcher
from tests.training.sample_pictures import picture
from training import predict, recipes
from training.data import augmentation, small_images
from training.models import classifiers


def processed(image: Image.Image, folder: Path, *size: int, **values: Any) -> torch.Tensor:
    from transformers import AutoImageProcessor

    content = classifiers.processor(*size, **values)
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    make: Any = AutoImageProcessor
    found: torch.Tensor = make.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    return found


def test_transformers_makes_of_a_picture_what_an_evaluation_sees(tmp_path: Path) -> None:
    image = picture(np.random.default_rng(4)).convert("RGB")
    canvas = torch.from_numpy(np.asarray(image).copy())[None]
    extents = torch.tensor([canvas.shape[1:3]])
    side = max(canvas.shape[1:3])
    canvas = torch.nn.functional.pad(canvas, (0, 0, 0, side - canvas.shape[2]))
    canvas = torch.nn.functional.pad(canvas, (0, 0, 0, 0, 0, side - canvas.shape[1]))
    expected = augmentation.middle_views(canvas, extents, size=112, share=0.875)
    colors = {"mean": augmentation.MEAN, "std": augmentation.STD}
    found = processed(image, tmp_path, 112, **colors, share=0.875)
    assert found.shape == expected.shape
    assert (found - expected).abs().mean() < 0.02
    whole = processed(image, tmp_path, 112, **colors)
    assert (whole - expected).abs().mean() > 0.1, "the test tells views apart"


def test_a_grey_picture_of_the_models_size_stays_as_it_is(tmp_path: Path) -> None:
    pixels = small_images.load("digits").test_images[0]
    found = processed(Image.fromarray(pixels), tmp_path, 28, mean=[0.3], std=[0.2])
    assert found.shape == (1, 1, 28, 28)
    assert np.allclose(found[0, 0].numpy(), (pixels / 255 - 0.3) / 0.2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", "small"])
def test_digits_are_told_as_in_the_evaluation(
    model: str, tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    with launcher(tmp_path, "ddp") as start:
        run = start("mine", *DIGITS, "--epochs", "1", "--model", model)
        command, *lines = run.succeed().partition("Use this model:\n")[2].splitlines()
    folder = run.run_folder
    assert command == "trainctl predict runs/mine PICTURE"
    found = small_images.load("digits")
    files = [tmp_path / f"{number}.png" for number in range(len(found.test_images))]
    for file, pixels in zip(files, found.test_images, strict=True):
        Image.fromarray(pixels).save(file)
    likely = [next(iter(each)) for each in predict.predictions(folder / "model", files)]
    right = sum(map(str.__eq__, likely, map(str, found.test_labels)))
    assert right / len(files) == pytest.approx(run.result()["accuracy"], abs=1e-9)
    (printed,) = cli.json("predict", str(folder), str(files[0]))
    assert next(iter(printed["classes"])) == likely[0]
    if model == "small":  # which transformers does not know
        assert not lines
        return
    program = "\n".join(lines).replace("PICTURE", str(files[0])).replace("runs/mine", str(folder))
    exec(program, {})
    assert capsys.readouterr().out == f"tensor({likely[0]})\n"


@pytest.mark.slow
def test_the_pipeline_of_transformers_has_the_accuracy_of_the_evaluation(tmp_path: Path) -> None:
    """Every fourth picture is in the wrong folder, so that not all are told right."""
    from transformers import pipeline

    draw = np.random.default_rng(0)
    labels = {}
    for number in range(64):
        split, shade = ("train", "val")[number % 2], number // 2 % 2
        label = ("dark", "light")[shade ^ (number % 8 == 7)]
        pixels = draw.integers(100 * shade, 100 * shade + 100, (80, 96, 3))
        file = tmp_path / "data" / split / label / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype("uint8")).save(file)
        if split == "val":
            labels[file] = label
    words = ["--preset", "small", "--epochs", "3", "--decoders", "1", "--data", "data"]
    with launcher(tmp_path, "imagenet") as start:
        run = start("mine", *words, "--model", "efficientnet-b0", "--lr", "0.1")
        assert 'pipeline("image-classification", "runs/mine/model")' in run.succeed()
    make: Any = pipeline
    classify = make("image-classification", str(run.run_folder / "model"))
    right, losses = 0, []
    for file, label in labels.items():
        scores = {each["label"]: each["score"] for each in classify(str(file))}
        right += max(scores, key=lambda name: scores[name]) == label
        losses.append(-math.log(scores[label]))
    result = run.result()
    assert right / len(labels) == pytest.approx(result["accuracy"], abs=1e-9)
    assert sum(losses) / len(losses) == pytest.approx(result["loss"], abs=0.02)


def test_the_use_of_a_model_is_a_command_where_it_is_not_here_yet() -> None:
    pictures, text = recipes.by_name("imagenet"), recipes.by_name("fsdp")
    assert pictures.use("s3://bucket/runs/r1", {})[:2] == [
        "trainctl predict r1 PICTURE",
        "trainctl download r1",
    ]
    assert text.use("s3://bucket/runs/r1", {})[0] == "trainctl export r1 --to DIR"
    assert recipes.by_name("bandwidth").use("runs/r1", {}) == []


def test_what_cannot_be_classified_is_refused(tmp_path: Path, cli: Cli) -> None:
    picture_ = tmp_path / "a.png"
    picture_.write_bytes(b"none")
    (tmp_path / "r1" / "model").mkdir(parents=True)
    assert "there is no file" in cli.refuses("predict", "r1", "missing.png")
    assert "only a complete run on pictures" in cli.refuses(
        "predict", str(tmp_path / "r1"), str(picture_), code=exits.BAD_INPUT
    )
