"""Proves the parts of the ImageNet recipe's loop: its course, its loss, its exact evaluation, and
that a run which is interrupted goes on as if nothing had happened."""

import errno
import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from contract.errors import UnreachableError
from tests import forks
from tests.training.kills import killed, play
from tests.training.local_runs import assert_nothing_is_left, launcher
from tests.training.sample_pictures import CLASSES, as_jpeg, write_tree
from tests.training.test_checkpoint_faults import newest
from training import predict
from training.checkpoint import checkpoints
from training.data import augmentation
from training.data.pictures import layout
from training.data.pictures.batches import rank_plan
from training.data.small_images import BatchOrder
from training.imagenet import train as imagenet
from training.imagenet.settings import MIDDLE, PRESETS, ImagenetConfig
from training.models import picture_shapes
from training.record.events import Evaluation, Event, Finished, RankTimes, Step
from training.runtime.torchrun import TorchrunWorker

SMALL: dict[str, Any] = {
    "model": "efficientnet-b0",
    "image_size": 32,
    "global_batch": 16,
    "synthetic_images": 64,
    "epochs": 2,
    "report_every": 1,
    "ema": 0.9,
}


def config(**changes: Any) -> ImagenetConfig:
    needed = {"recipe": "imagenet", "run": "r", "storage": "/s", "data": "synthetic"}
    return ImagenetConfig(**{**needed, **SMALL, **changes})


def test_the_learning_rate_grows_with_the_batch() -> None:
    rates = {
        batch: max(
            imagenet.learning_rate(config(global_batch=batch, epochs=10, lr=0.1), step, 100)
            for step in range(1000)
        )
        for batch in (256, 1024)
    }
    assert rates[256] == pytest.approx(0.1, rel=1e-3)
    assert rates[1024] == pytest.approx(0.4, rel=1e-3)


def test_the_reference_has_a_tenth_after_each_thirty_epochs_whatever_the_batch() -> None:
    reference = config(**{**PRESETS["reference"], "epochs": 90, "global_batch": 1024})
    rates = [imagenet.learning_rate(reference, epoch * 7, 7) for epoch in (0, 29, 30, 59, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_pictures_grow_to_their_full_size_by_three_quarters_of_the_run() -> None:
    growing = config(image_size=224, first_size=128, epochs=16)
    sizes = [growing.size_in(epoch) for epoch in range(16)]
    assert (sizes[0], sizes[11], sizes[12:]) == (128, 192, [224] * 4)
    assert sizes == sorted(sizes)
    assert all(size % 32 == 0 for size in sizes)
    assert {config(epochs=3).size_in(epoch) for epoch in range(3)} == {32}
    assert config(model="efficientnet-b7", image_size=0).full_size == 600


def test_packed_pictures_are_not_shrunk_again() -> None:
    whole = config(image_size=224)
    assert [whole.size_of(packed) for packed in (0, 160, 320, 512)] == [400, 160, 320, 512]


def test_a_usual_picture_is_read_with_all_its_pixels(tmp_path: Path) -> None:
    for folder in ("train/a", "train/b", "val/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.jpg").write_bytes(as_jpeg(Image.new("L", (375, 500))))
    worker: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    with ExitStack() as stack:
        whole = config(data=str(tmp_path), image_size=224, decoders=1)
        found = imagenet.open_pictures(whole, worker, stack)
        for source in (found.train, found.val):
            (batch,) = source.batches([torch.arange(1)])
            assert batch.extents.tolist() == [[500, 375]]


def test_a_set_that_cannot_be_read_after_the_run_has_begun_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(uri: str) -> bytes:
        raise OSError(errno.EIO, "Input/output error", uri)

    monkeypatch.setattr("store.storage.read_bytes", fail)
    worker: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(UnreachableError, match=r"index\.json"):
        imagenet.open_pictures(config(data=str(tmp_path)), worker, ExitStack())


def evaluated(folder: str) -> None:
    from training.models import picture_models

    worker = TorchrunWorker(run_uri=folder)
    whole = config(synthetic_images=510)  # 51 to evaluate
    found = imagenet.open_pictures(whole, worker, ExitStack())
    torch.manual_seed(0)
    model = picture_models.build(whole.model, classes=found.classes)
    (batch,) = found.val.batches([torch.arange(51)])
    pixels = augmentation.middle_views(batch.pictures, batch.extents, size=32, share=0.875)
    with torch.no_grad():
        for _ in range(20):  # without statistics of its own, its answers would be all alike
            model(pixels)
    got = imagenet.evaluate(model, None, found, whole, worker=worker, use_bf16=False)
    assert model.training
    with torch.no_grad():
        logits = model.eval()(pixels).logits
    assert got.loss == pytest.approx(F.cross_entropy(logits, batch.labels).item(), abs=1e-5)
    ranks = (logits > logits.gather(1, batch.labels[:, None])).sum(dim=1)
    assert got.measures["accuracy"] == (ranks < 1).sum().item() / 51
    assert got.measures["top5"] == (ranks < 5).sum().item() / 51
    assert 0 < got.measures["top5"] < 1
    worker.close()


@pytest.mark.long
@pytest.mark.slow
def test_top1_and_top5_are_exact_over_uneven_parts(tmp_path: Path) -> None:
    forks.run(2, evaluated, str(tmp_path))


def trained_in_pieces(folder: str) -> None:
    def run(name: str, *, stop_at: int = 0, max_steps: int = 0) -> list[Event]:
        worker = TorchrunWorker(run_uri=f"{folder}/{name}")
        found: list[Event] = []

        def notice(*events: Event) -> None:
            found.extend(events)
            if any(isinstance(event, Step) and event.step == stop_at for event in events):
                os.kill(os.getpid(), signal.SIGTERM)

        worker.on_events = notice
        imagenet.train(worker, config(run=name, max_steps=max_steps))
        worker.close()
        return found

    run("whole")
    run("pieces", stop_at=2)
    assert checkpoints.names(f"{folder}/pieces") == ["step-00000003"]
    # It ends in mid-epoch, evaluated and saved, and what is left is what it was without an end.
    ended = run("pieces", max_steps=6)
    assert [each.step for each in ended if isinstance(each, Step)] == [4, 5, 6]
    assert [(each.step, each.epoch) for each in ended if isinstance(each, Evaluation)] == [
        (4, 1),
        (6, 1.5),
    ]
    assert [each.step for each in ended if isinstance(each, Finished)] == [6]
    assert checkpoints.names(f"{folder}/pieces")[-1] == "step-00000006"
    # For a study, too, an epoch has all of its steps.
    last = [each for each in ended if isinstance(each, RankTimes)][-1]
    assert last.step / last.epoch == 4
    run("pieces")


@pytest.mark.long
@pytest.mark.slow
def test_weights_and_their_average_are_equal_to_the_bit_after_ends_and_resumes_in_mid_epoch(
    tmp_path: Path,
) -> None:
    forks.run(1, trained_in_pieces, str(tmp_path))
    whole, pieces = (newest(str(tmp_path / name)) for name in ("whole", "pieces"))
    assert whole is not None
    assert pieces is not None
    assert whole.position.step == pieces.position.step == 8
    for name in ("model", "average"):
        ours, theirs = getattr(pieces, name), getattr(whole, name)
        assert ours.keys() == theirs.keys()
        assert len(ours) > 300
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    assert any(not torch.equal(whole.model[key], whole.average[key]) for key in whole.model)
    # The model that is left is the average.
    left = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert all(torch.equal(value, whole.average[key]) for key, value in left.items())


@pytest.mark.slow
@killed([])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    kills: list[tuple[str, str]],
    tmp_path: Path,
) -> None:
    words = "--preset small --data synthetic --synthetic-images 64 --model efficientnet-b0"
    words += " --global-batch 16 --epochs 5 --report-every 1 --decoders 1 --workers 2"
    words += " --checkpoint-minutes 0.03"
    with launcher(tmp_path, "imagenet") as start:
        whole = start("whole", *words.split())
        whole.succeed()
        play(kills, start, whole, words.split())


@pytest.mark.long
@pytest.mark.slow
def test_the_command_trains_on_class_folders_and_lists_damaged_pictures(tmp_path: Path) -> None:
    """Its model is as good by the standard call of transformers."""
    from transformers import pipeline

    data = write_tree(tmp_path / "data", num_train=96, num_val=0) / "train"
    broken = sorted(data.rglob("*.JPEG"))[:3]
    for path in broken:
        path.write_bytes(path.read_bytes()[:100])
    with launcher(tmp_path, "imagenet") as start:
        words = ["--data", str(data), "--preset", "small", "--model", "efficientnet-b0"]
        words += ["--workers", "2", "--epochs", "2", "--decoders", "1", "--lr", "0.1", "--json"]
        command = start("tree", *words)
        code, out, err = command.end()
        assert code == 0, err
        assert_nothing_is_left(command)  # decoders neither
    result = json.loads(out)
    assert result == command.result()
    assert 0 <= result["accuracy"] <= result["top5"] <= 1
    assert (result["steps"], result["world_size"]) == (6, 2)
    for path in broken:
        assert f"{path.parent.name}/{path.name}" in err
    # By transformers
    make: Any = pipeline
    classify = make("image-classification", str(command.run_folder / "model"))
    assert [*classify.model.config.id2label.values()] == [*CLASSES]
    right = []
    for each in layout.find(data).pictures["val"]:
        if Path(each.path) not in broken:
            scores = {found["label"]: found["score"] for found in classify(each.path, top_k=10)}
            (by_us,) = predict.predictions(command.run_folder / "model", [Path(each.path)])
            assert by_us == pytest.approx(scores, abs=1e-3)
            right.append(next(iter(scores)) == each.class_name)
    assert sum(right) / len(right) == pytest.approx(result["accuracy"])


def test_no_worker_gets_more_pictures_than_it_has_room_for() -> None:
    order = BatchOrder(num_images=101, global_batch=32, seed=0)
    for num in (1, 2, 3):
        steps = range(order.steps_per_epoch)
        for rank in range(num):
            plan = rank_plan(order, steps=steps, rank=rank, world_size=num)
            assert max(map(len, plan)) <= imagenet.most_per_worker(config(global_batch=32), num)


@pytest.mark.parametrize("model", picture_shapes.NAMES)
def test_evaluation_and_nearly_all_crops_are_shrunk_from_what_is_decoded(model: str) -> None:
    whole = config(model=model, image_size=0, least_area=0.25)
    size, full = whole.size_of(0), whole.full_size
    assert MIDDLE * size >= full
    boxes = augmentation.random_boxes(
        torch.arange(10_000), seed=0, step=0, least_area=whole.least_area
    )
    crops = (boxes.area * size * size * 4 / 3).sqrt()  # of a picture of 4:3
    assert (crops < full).float().mean() < 0.01
