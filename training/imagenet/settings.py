"""Settings and presets of the ImageNet recipe. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError
from training.models import picture_shapes
from training.settings import (
    SCHEDULES,
    ReplicaConfig,
    TrainingConfig,
    Value,
    best_option,
    option,
)

#: Name of the built-in data: pictures that are made on the device, see ``synthetic``.
SYNTHETIC: Final = "synthetic"
#: A tenth of the learning rate after each 30 epochs.
STEPS: Final = "steps"
#: Images per step to which the learning rate is given (arXiv 1706.02677).
IMAGES_PER_LR: Final = 256
#: Of the shorter side of a picture, what evaluation shows.
MIDDLE: Final = 0.875
#: Sizes are multiples of this: models halve a picture five times.
SIZE_STEP: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagenetConfig(ReplicaConfig):
    """Classification of pictures of any size (``training.imagenet.train``)."""

    lr: float = option(
        0.256,
        above=0,
        help="peak learning rate of SGD for 256 images per step",
        same_on_resume=False,
    )
    model: str = option("resnet50", choices=picture_shapes.NAMES, help="the model")
    image_size: int = option(
        0, low=0, high=1024, help="pixels of a side that the model sees (0: the model's own)"
    )
    first_size: int = option(
        0,
        low=0,
        high=1024,
        help="image size in the first epoch; it grows to image-size in the first three quarters "
        "of the run (0: image-size throughout)",
    )
    lr_scaling: bool = option(
        True, help="multiply the learning rate by the images per step over 256"
    )
    schedule: str = option(
        "cosine",
        choices=(*SCHEDULES, STEPS),
        help="as for ddp, or steps: a tenth of the learning rate after each 30 epochs; a run with "
        "--first-size is not continued",
    )
    keep_best: str = best_option("loss", "accuracy", "top5")
    ema: float = option(
        0.0,
        low=0,
        high=0.99999,
        help="decay of the running average of the weights, which is evaluated and saved as the "
        "model in place of the last ones (0: none)",
    )
    least_area: float = option(
        0.08, above=0, high=1, help="smallest part of a picture that a random crop may show"
    )
    decoders: int = option(
        0,
        low=0,
        high=256,
        help="processes per worker that decode pictures (0: this machine's cores, shared evenly)",
        same_on_resume=False,
    )
    synthetic_images: int = option(
        640, low=64, help="number of training pictures where the data is synthetic"
    )

    def __post_init__(self) -> None:
        ReplicaConfig.__post_init__(self)  # see there why not super()
        for name, size in (("image-size", self.image_size), ("first-size", self.first_size)):
            if 0 < size < SIZE_STEP:
                raise InputError(
                    f"--{name} is {size}: it must be at least {SIZE_STEP} pixels, or 0"
                )
        if self.first_size > self.full_size:
            raise InputError(
                f"--first-size is {self.first_size}, above the image size of {self.full_size}: "
                "pictures grow from the first size to that one"
            )

    def why_not_longer(self, name: str, *, is_complete: bool) -> str:
        if name == "max_steps":
            return ""  # rates and sizes follow from the epochs
        if self.first_size:
            return "pictures grow over the epochs of the run (--first-size): begin another --run"
        if self.schedule == STEPS:
            return ""
        return TrainingConfig.why_not_longer(self, name, is_complete=is_complete)

    @property
    def full_size(self) -> int:
        """Pixels of a side at the end of the run, and in evaluation."""
        return self.image_size or picture_shapes.image_size(self.model)

    def size_of(self, packed: int) -> int:
        """Most pixels of the shorter side of a picture as it is decoded.

        For a model that sees 224 pixels 400: evaluation, which shows ``MIDDLE`` of them, and nearly
        all random crops are then shrunk, not enlarged.

        Args:
            packed: of a set whose pictures were shrunk when it was packed, to what; 0: they were
                not. Packed pictures are used as they are: to shrink them again costs more than it
                saves.
        """
        return packed or self.full_size * 25 // 14

    def size_in(self, epoch: int) -> int:
        """Pixels of a side in an epoch, counted from 0."""
        rising = max(1, self.epochs * 3 // 4)
        if not self.first_size or epoch >= rising:
            return self.full_size
        size = self.first_size + (self.full_size - self.first_size) * epoch / rising
        return max(self.first_size, int(size) // SIZE_STEP * SIZE_STEP)

    def less_memory(self, world_size: int) -> str:
        """Advice, as a sentence, for a run with ``world_size`` workers that ran out of GPU
        memory."""
        each = self.images_per_step // world_size
        others = [f"--batch-per-worker {max(8, each // 2)}"] if each > 8 else []
        smaller = self.full_size * 3 // 4 // SIZE_STEP * SIZE_STEP
        if smaller >= max(SIZE_STEP, self.first_size):
            others.append(f"--image-size {smaller}")
        begin = f", or begin another --run with {' or '.join(others)}" if others else ""
        return (
            "Give more --workers: the run resumes with its global batch, so each has fewer images "
            f"at a time{begin}"
        )

    @property
    def peak_lr(self) -> float:
        """Peak learning rate at the run's global batch."""
        return self.lr * self.images_per_step / IMAGES_PER_LR if self.lr_scaling else self.lr


_OURS: Final[Mapping[str, Value]] = {
    "label_smoothing": 0.1,
    "weight_decay": 5e-5,
    "ema": 0.9999,
}
PRESETS: Final[Mapping[str, Mapping[str, Value]]] = {
    # Compiled 1.41 times faster on an H200 (docs/benchmarks.md); the others were not measured.
    "resnet50": {**_OURS, "epochs": 90, "first_size": 160, "least_area": 0.25, "compile": True},
    "efficientnet-b7": {
        **_OURS,
        "model": "efficientnet-b7",
        "epochs": 300,
        "first_size": 320,
        "batch_per_worker": 16,
        "lr": 0.1,
    },
    # What the public solution's script and its two job files set: fp32, 64 images per GPU, a rate
    # of 0.1 whatever the batch, a tenth of it after each 30 epochs, one epoch, 224 pixels for
    # each model. For comparison; the accuracy it reaches was never published.
    "reference": {
        "epochs": 1,
        "image_size": 224,
        "batch_per_worker": 64,
        "lr": 0.1,
        "lr_scaling": False,
        "schedule": "steps",
        "precision": "fp32",
        "weight_decay": 1e-4,
        "max_grad_norm": 0.0,
    },
    # Shows in minutes on a laptop that it works: on made-up pictures, or on a few of your own.
    "small": {
        **_OURS,
        "image_size": 32,
        "epochs": 3,
        "batch_per_worker": 16,
        "least_area": 0.5,
        "ema": 0.9,
        "lr": 0.8,
        "report_every": 5,
    },
}
