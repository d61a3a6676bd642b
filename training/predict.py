"""Classes of pictures by a run's model: ``trainctl predict``, on a machine that has torch.

A picture is read as in an evaluation; what follows is transformers', by the model's
``preprocessor_config.json``.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contract.errors import InputError
from training.checkpoint.checkpoints import MODEL_CONFIG_FILE, MODEL_FILE
from training.data.pictures.picture import DamagedPictureError, fitted
from training.models.small import MODEL_TYPE, Small


def predictions(folder: Path, files: Sequence[Path]) -> Iterator[dict[str, float]]:
    """The probability of each class, the likeliest first, for each picture.

    Args:
        folder: ``model/`` of a complete run on pictures.
        files: pictures.

    Raises:
        InputError: a file is no picture.
    """
    from transformers import AutoImageProcessor
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    make: Any = AutoImageProcessor
    processor = make.from_pretrained(folder, local_files_only=True)
    model, classes = _model(folder)
    # Of a single mean, pictures are grey.
    mode = "RGB" if len(processor.image_mean) > 1 else "L"
    for file in files:
        try:
            picture = fitted(file.read_bytes()).convert(mode)
        except (DamagedPictureError, OSError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        with torch.no_grad():
            logits = model(**processor(picture, return_tensors="pt")).logits[0]
        likely = logits.float().softmax(dim=0).sort(descending=True)
        pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        yield {classes.get(str(number), str(number)): value for number, value in pairs}


def _model(folder: Path) -> tuple[nn.Module, dict[str, str]]:
    """The model, and the names of its classes by their numbers."""
    config = json.loads((folder / MODEL_CONFIG_FILE).read_text("utf-8"))
    model: nn.Module
    if config["model_type"] == MODEL_TYPE:
        from safetensors.torch import load_file

        model = Small()
        model.load_state_dict(load_file(folder / MODEL_FILE))
    else:
        from transformers import AutoModelForImageClassification

        model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True)
    return model.eval(), config.get("id2label", {})
