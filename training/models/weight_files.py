"""Which files of a published model hold its weights. Standard library only.

A laptop looks at a model's list of files before it submits a job, the node before it trains.
"""

from collections.abc import Iterable
from typing import Final

from contract.errors import InputError

SAFETENSORS: Final = "model.safetensors"
SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
#: Patterns of all files of a model in that format, parts included.
PICKLED_FILES: Final = (PICKLED, "pytorch_model-*.bin", PICKLED_INDEX)


def has_safetensors(names: Iterable[str]) -> bool:
    """Whether files of these names include weights that need no conversion."""
    return bool({SAFETENSORS, SAFETENSORS_INDEX} & {*names})


def check_weights(names: Iterable[str], model: str) -> None:
    """
    Args:
        names: of the files directly in a model's folder.
        model: what its user calls it.

    Raises:
        InputError: they include no weights that can be used.
    """
    if not {SAFETENSORS, SAFETENSORS_INDEX, PICKLED, PICKLED_INDEX} & {*names}:
        raise InputError(
            f"model {model} has no weights that can be used: it needs {SAFETENSORS} or {PICKLED} "
            "(or their parts with an index); give another model or revision, or new:FOLDER to "
            "train its shape from random weights"
        )
