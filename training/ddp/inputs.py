"""Check of the DDP recipe's data before its loop starts. Imports no torch by itself."""

from training.data import catalog, sources
from training.data.download import Report
from training.ddp.settings import DdpConfig


def look_at(config: DdpConfig) -> None:
    """Check that a folder has the files, and the network a way to a published set; the rest of what
    is remote is left to ``prepare``.

    Raises:
        InputError: a file is missing.
        UnreachableError: there is no way.
    """
    sources.check_way(config.data)
    if not sources.is_remote(config.data) and catalog.find(config.data) is None:
        sources.local_files(config.data, catalog.IDX_FILES)


def prepare(config: DdpConfig, report: Report | None = None) -> DdpConfig:
    """Fetch and read the images.

    Raises:
        InputError: they cannot be used.
    """
    from training.data import small_images

    small_images.load(config.data, report=report)
    return config
