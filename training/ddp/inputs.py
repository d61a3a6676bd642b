"""Check of the DDP recipe's data before its loop starts. Imports no torch by itself."""

import shlex
from itertools import islice
from pathlib import Path
from typing import Final

from contract import text
from contract.errors import InputError
from training.data import catalog, sources
from training.data.download import Report
from training.data.pictures import layout
from training.ddp.settings import DdpConfig

#: Options of recipe imagenet that suit a few pictures on a CPU; ``make demo`` names them too.
A_FEW_PICTURES: Final = "--preset small --image-size 64 --epochs 10"
#: Files of a folder that are looked at for pictures.
_LOOKED_AT: Final = 1000


def look_at(config: DdpConfig) -> None:
    """Check that a folder has the files, and the network a way to a published set; the rest of what
    is remote is left to ``prepare``.

    Raises:
        InputError: a file is missing.
        UnreachableError: there is no way.
    """
    sources.check_way(config.data)
    if not sources.is_remote(config.data) and catalog.find(config.data) is None:
        try:
            sources.local_files(config.data, catalog.IDX_FILES)
        except InputError:
            files = islice(Path(config.data).rglob("*"), _LOOKED_AT)
            if all(each.suffix.lower() not in catalog.PICTURES for each in files):
                raise
            layout.find(Path(config.data))  # raises where no recipe takes them
            raise InputError(
                f"data folder {config.data} has pictures, and this recipe trains on "
                f"{', '.join(catalog.IDX_FILES)}; recipe imagenet takes them: "
                f"{text.program('trainctl')} run imagenet {A_FEW_PICTURES} --data "
                f"{shlex.quote(config.data)}"
            ) from None


def prepare(config: DdpConfig, report: Report | None = None) -> DdpConfig:
    """Fetch and read the images.

    Raises:
        InputError: they cannot be used.
    """
    from training.data import small_images

    small_images.load(config.data, report=report)
    return config
