"""Choice of a published model's weight files. Standard library only.

A laptop looks at a model's list of files before it submits a job, the node before it trains.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from contract.errors import InputError
from contract.runs import check_relative

SAFETENSORS: Final = "model.safetensors"
SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
#: Patterns of all files of a model in that format, parts included.
PICKLED_FILES: Final = (PICKLED, "pytorch_model-*.bin", PICKLED_INDEX)
#: Of weights and files, in characters; those of known models have less than a hundred.
LONGEST_NAME: Final = 200


def has_safetensors(names: Iterable[str]) -> bool:
    """True if the files include weights that need no conversion."""
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


def indexed(index: Path) -> dict[str, str]:
    """Mapping in an index of weights: name of a weight -> name of the file that holds it.

    Raises:
        InputError: it is not an index, names files elsewhere, or some of the files are missing.
    """
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {check_relative(name, what=f"{index}: file") for name in places.values()}
        if max(map(len, (*places, *files)), default=0) > LONGEST_NAME:
            raise ValueError(f"a name has more than {LONGEST_NAME} characters")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"{index} is not an index of weights: {error!r}") from None
    lacking = sorted(name for name in files if not (index.parent / name).exists())
    if lacking:
        raise InputError(f"{index.parent} lacks {', '.join(lacking)}: download it again")
    return places
