"""ResNet50 and EfficientNet-B0 to B7 of transformers, untrained, for pictures of any size.

What is saved loads with ``AutoModelForImageClassification.from_pretrained``. For images of 28
pixels use ``classifiers``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from training.models.picture_shapes import RESNET50, SHAPES


def build(name: str, *, classes: Sequence[str]) -> nn.Module:
    """Return an untrained model of that name (``picture_shapes.NAMES``).

    Its forward pass takes float ``[batch, 3, height, width]`` and returns an object with
    ``logits``, ``[batch, len(classes)]``. Weights are drawn from torch's global generator: seed it
    first.
    """
    # Not above: the import takes seconds, and this file's other users need no model.
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.models.efficientnet.configuration_efficientnet import EfficientNetConfig
    from transformers.models.efficientnet.modeling_efficientnet import (
        EfficientNetForImageClassification,
    )

    labels: dict[str, Any] = {
        "id2label": dict(enumerate(classes)),
        "label2id": {label: number for number, label in enumerate(classes)},
    }
    model: nn.Module
    if name == RESNET50:
        model = ResNetForImageClassification(ResNetConfig(**labels))
        _begin_as_identity(model)
        return model
    shape = SHAPES[name]
    model = EfficientNetForImageClassification(
        EfficientNetConfig(
            width_coefficient=shape.width,
            depth_coefficient=shape.depth,
            image_size=shape.image_size,
            hidden_dim=shape.hidden,
            dropout_rate=shape.dropout,
            depthwise_padding=list(shape.odd),
            # transformers' 0.99 is TensorFlow's momentum, which torch counts from the other end:
            # with it the running statistics would be those of the last batch.
            batch_norm_momentum=0.1,
            **labels,
        )
    )
    return model


@torch.no_grad()
def _begin_as_identity(model: nn.Module) -> None:
    """Let each block of a ResNet begin as its shortcut: the scale of its last normalization is
    zero. It makes large batches trainable from the first step (arXiv 1706.02677, 5.1)."""
    for module in model.modules():
        if type(module).__name__ == "ResNetBottleNeckLayer":
            block: Any = module
            block.layer[-1].normalization.weight.zero_()
