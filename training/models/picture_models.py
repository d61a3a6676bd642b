"""ResNet50, EfficientNet-B0 and B7 of transformers, untrained, for pictures of any size.

What is saved loads with ``AutoModelForImageClassification.from_pretrained``. For images of 28
pixels use ``classifiers``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from training.models import classifiers
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

    labels: Any = classifiers.labels(classes)
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
    _draw_as_published(model)
    return model


@torch.no_grad()
def _begin_as_identity(model: nn.Module) -> None:
    """Let each block of a ResNet begin as its shortcut: the scale of its last normalization is
    zero. It makes large batches trainable from the first step (arXiv 1706.02677, 5.1)."""
    for module in model.modules():
        if type(module).__name__ == "ResNetBottleNeckLayer":
            block: Any = module
            block.layer[-1].normalization.weight.zero_()


@torch.no_grad()
def _draw_as_published(model: nn.Module) -> None:
    """Draw an EfficientNet's weights as its authors do (arXiv 1905.11946, their code).

    transformers is made to load weights: it draws all of them around 0 with a deviation of 0.02,
    the scales of normalization too. Each layer then shrinks what passes it fifty times, and the
    model never learns.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(module, nn.Linear):
            limit = 1 / math.sqrt(module.out_features)
            nn.init.uniform_(module.weight, -limit, limit)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
