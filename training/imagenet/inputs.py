"""The ImageNet recipe's pictures: checked before its loop starts, and read in it.

Imports no torch by itself.
"""

from store import storage
from training.data.download import Report
from training.data.pictures import library
from training.imagenet.settings import SYNTHETIC, ImagenetConfig
from training.system import devices


def look_at(config: ImagenetConfig) -> None:
    """Check that a folder holds a set; what is remote is left to ``prepare``.

    Raises:
        InputError: it does not.
    """
    if not storage.is_s3(config.data):
        library.open_set(config.data)


def prepare(config: ImagenetConfig, report: Report | None = None) -> ImagenetConfig:
    """Read the list of the pictures.

    Raises:
        InputError: they cannot be used.
    """
    del report  # pictures are read while training
    if config.data != SYNTHETIC:
        library.open_set(config.data)
    return config


def num_decoders(config: ImagenetConfig, world_size: int) -> int:
    """Processes that decode pictures for one worker: the machine's cores, less one for training,
    over the workers that it has room for."""
    if config.decoders:
        return config.decoders
    gpus = len(devices.gpu_names())
    return max(1, devices.num_cpus() // (gpus or world_size) - 1)
