"""ResNet18 in plain torch, the same as transformers' ``ResNetForImageClassification``.

Names of modules and parameters, initial weights, logits and gradients are those of transformers, to
the bit; tests compare them. Only the import is left out: with transformers, every
worker imports 1,900 modules more, 4 s of CPU, before its first step. This is ResNet18 and nothing
else; for any other ResNet, use transformers.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from training.models import classifiers

_NUM_LABELS: Final = 10
_STAGE_FACTORS: Final = (1, 2, 4, 8)
_BLOCKS_PER_STAGE: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNet18Config:
    """Configuration that transformers needs to build this network."""

    width: int = 64
    """Channels of the first stage; each of the others has twice as many as the one before."""

    classes: Sequence[str] = ()
    """Their names; empty: they have none."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each stage."""
        return tuple(self.width * factor for factor in _STAGE_FACTORS)

    def to_json_string(self) -> str:
        """Return the text of ``config.json``; what it leaves out is transformers' default."""
        values: dict[str, Any] = {
            "model_type": "resnet",
            "layer_type": "basic",
            "num_channels": 1,
            "embedding_size": self.width,
            "hidden_sizes": self.widths,
            "depths": [_BLOCKS_PER_STAGE] * len(self.widths),
            "num_labels": _NUM_LABELS,
        }
        if self.classes:
            values |= classifiers.labels(self.classes)
        return json.dumps(values, indent=2) + "\n"


class Output(NamedTuple):
    """Output of a forward pass."""

    logits: torch.Tensor
    """``[batch, 10]``."""


class ResNet18(nn.Module):
    """An untrained ResNet18 for grey images of ten classes: 11,175,370 parameters.

    Weights are drawn from torch's global generator: seed it first.
    """

    def __init__(self, classes: Sequence[str] = (), *, width: int = 64) -> None:
        """``classes``, ``width``: see ``ResNet18Config``."""
        super().__init__()
        self.config = config = ResNet18Config(width=width, classes=classes)
        # Weights are drawn in transformers' order: body, then head, each after torch's own draw.
        self.resnet = _named(
            embedder=_stem(config),
            encoder=_named(stages=nn.Sequential(*_stages(config.widths))),
            pooler=nn.AdaptiveAvgPool2d((1, 1)),
        )
        _initialize(self.resnet)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(config.widths[-1], _NUM_LABELS))
        _initialize(self.classifier)

    def forward(self, pixel_values: torch.Tensor) -> Output:
        """Classify images, float ``[batch, 1, height, width]``."""
        return Output(logits=self.classifier(self.resnet(pixel_values)))


def _named(**modules: nn.Module) -> nn.Sequential:
    """Modules one after the other, by the names that transformers gives them."""
    return nn.Sequential(OrderedDict(modules))


def _stem(config: ResNet18Config) -> nn.Module:
    return _named(
        embedder=_conv(1, config.width, kernel=7, stride=2),
        pooler=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _stages(widths: Sequence[int]) -> Iterator[nn.Module]:
    for i, (num_in, num_out) in enumerate(pairwise((widths[0], *widths))):
        first = _Block(num_in, num_out, stride=1 if i == 0 else 2)
        yield _named(layers=nn.Sequential(first, _Block(num_out, num_out, stride=1)))


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        same_shape = num_in == num_out and stride == 1
        self.shortcut = (
            nn.Identity() if same_shape else _conv(num_in, num_out, kernel=1, stride=stride)
        )
        self.layer = nn.Sequential(
            _conv(num_in, num_out, stride=stride), _conv(num_out, num_out, relu=False)
        )
        self.activation = nn.ReLU()

    def forward(self, maps: torch.Tensor) -> Any:
        # The layers before the shortcut, and the sum in place: as transformers does it.
        out = self.layer(maps)
        out += self.shortcut(maps)
        return self.activation(out)


def _conv(
    num_in: int, num_out: int, *, kernel: int = 3, stride: int = 1, relu: bool = True
) -> nn.Module:
    """A convolution with its normalization; a kernel of 1 is that of a shortcut."""
    return _named(
        convolution=nn.Conv2d(
            num_in, num_out, kernel, stride=stride, padding=kernel // 2, bias=False
        ),
        normalization=nn.BatchNorm2d(num_out),
        activation=nn.ReLU() if relu and kernel > 1 else nn.Identity(),
    )


@torch.no_grad()
def _initialize(part: nn.Module) -> None:
    """Draw the weights as transformers does, so that a seed means the same network as there."""
    for module in part.modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        # transformers' general rule draws first and the ResNet's own overwrites what it drew. It
        # is drawn here too: the numbers after it in the generator, dropout's say, stay the same.
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        else:
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.bias, -bound, bound)
