"""Catalog of published data sets that ``--data`` takes by name: addresses and checksums.

Standard library only: a laptop that submits a job knows the same names as the node that trains.
Files are served under their own names, directly below an address. What counts is their
decompressed content, because mirrors compress anew.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError
from contract.text import did_you_mean

IMAGES: Final = "images"
TEXT: Final = "text"

#: How the name of a picture ends, in lower case.
PICTURES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
#: Address of a mirror that has a folder per data set, called by its name; for networks that do not
#: reach the original addresses.
MIRROR_VARIABLE: Final = "TRAINING_DATA_MIRROR"

IDX_FILES: Final = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """A data set that anyone can fetch."""

    name: str
    kind: str
    """``images`` (for ``ddp``) or ``text`` (for ``fsdp``)."""
    about: str
    """One phrase."""
    license: str
    address: str
    """``https://``; the files are directly below it."""
    files: Mapping[str, str]
    """Name of each file -> SHA-256 of its content, decompressed where it ends in ``.gz``."""
    num_bytes: int
    """To download, about."""
    num_train_tokens: int = 0
    """Number of training tokens of a text, counted with GPT-NeoX's tokenizer; includes the tokens
    that end documents, but not the twentieth that is held out. 0: not counted."""
    class_names: tuple[str, ...] = ()
    """Names of image classes, in the order of their labels."""

    @property
    def source(self) -> str:
        """Where its files are fetched from: its address, or the mirror that is set."""
        mirror = os.environ.get(MIRROR_VARIABLE, "").rstrip("/")
        return f"{mirror}/{self.name}" if mirror else self.address


ALL: Final = (
    DataSet(
        name="fashion-mnist",
        kind=IMAGES,
        about="70,000 pictures of clothes in ten classes, 28 x 28, grey",
        license="MIT",
        address="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        files=dict(
            zip(
                IDX_FILES,
                (
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
                strict=True,
            )
        ),
        num_bytes=30_900_000,
        class_names=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
    ),
    DataSet(
        name="mnist",
        kind=IMAGES,
        about="70,000 handwritten digits, 28 x 28, grey",
        license="CC BY-SA 3.0",
        address="https://ossci-datasets.s3.amazonaws.com/mnist",
        files=dict(
            zip(
                IDX_FILES,
                (
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
                strict=True,
            )
        ),
        num_bytes=11_600_000,
        class_names=tuple("0123456789"),
    ),
    DataSet(
        name="tiny-shakespeare",
        kind=TEXT,
        about="40,000 lines of Shakespeare's plays",
        license="public domain",
        address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
        files={
            "input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        },
        num_bytes=1_115_394,
        num_train_tokens=318_344,  # 14,675 are held out
    ),
)
_BY_NAME: Final = {each.name: each for each in ALL}


def find(name: str) -> DataSet | None:
    """The data set of that name; None for anything else, such as a folder or an address."""
    return _BY_NAME.get(name)


def names(kind: str | None = None) -> list[str]:
    """Names of all data sets, or of those of one kind."""
    return [each.name for each in ALL if kind in (None, each.kind)]


def by_name(name: str) -> str:
    """Words that point to a data set of about this name, for an error that lacks one."""
    return did_you_mean(name, names(), otherwise=f"by name there are {', '.join(names())}")


def check_kind(data: str, kind: str) -> None:
    """
    Raises:
        InputError: ``data`` names a data set of another kind than a recipe trains on.
    """
    found = find(data)
    if found is not None and kind and found.kind != kind:
        suits = ", ".join(names(kind))
        choice = f"choose {suits}, or give" if suits else "give"
        raise InputError(
            f"--data is {data}, which is {found.kind}, and this recipe trains on {kind}: {choice} "
            "a folder or an address"
        )
