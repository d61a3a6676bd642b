"""Helpers of models for pictures: layout of kernels, operations, what transformers reads beside the
weights, and a ResNet18 for small images without the taps that only ever meet padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def channels_last(model: nn.Module) -> None:
    """Keep the kernels in the order in which a GPU's convolutions read them, in place.

    Kernels of one tap are in both orders at once: they get the strides that their gradients come
    with, on a GPU others than on a CPU, or DDP would copy each gradient into its bucket and warn.
    """
    for parameter in model.parameters():
        if parameter.dim() == 4 and (parameter.is_cuda or parameter[0, 0].numel() > 1):
            # Not contiguous(): of one channel, that leaves strides from which a CPU chooses the
            # other order for all that follows.
            parameter.data = parameter.data.to(memory_format=torch.channels_last, copy=True)


def labels(classes: Sequence[str]) -> dict[str, object]:
    """Keys of ``config.json`` that name the classes."""
    return {
        "id2label": dict(enumerate(classes)),
        "label2id": {label: number for number, label in enumerate(classes)},
    }


def processor(
    size: int, *, mean: Sequence[float], std: Sequence[float], share: float = 1.0
) -> dict[str, object]:
    """Content of ``preprocessor_config.json``, with which transformers makes of a picture what an
    evaluation sees: the square in its middle, normalized.

    Args:
        size: pixels of a side that the model sees.
        mean: of each color, scaled to 0..1; a single one for grey pictures.
        share: side of the square over the picture's shorter one.
    """
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": len(mean) > 1,
        "size": {"shortest_edge": round(size / share)},
        "resample": 2,  # PIL's bilinear: a triangle filter, which averages where it shrinks
        "crop_size": {"height": size, "width": size},
        "image_mean": mean,
        "image_std": std,
    }


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def keep_live_taps(model: nn.Module, *, image_size: int) -> None:
    """Cut the taps that only ever meet padding from the convolutions with one position, in place.

    Where a feature map is smaller than the kernel's reach, some taps multiply zeros for every
    output: their gradient is zero, always. At 28 x 28, ResNet18's last stage works on 1 x 1 maps
    and 62.2 % of all gradient elements are such zeros, which a data-parallel step would still
    sum over the network. Leaving the taps out changes neither loss nor gradient of the others.

    The state dict of the model keeps the standard shapes: see ``LiveConv2d``.
    """
    for module, input_shape, output_shape in _layers(model, image_size):
        if not isinstance(module, nn.Conv2d) or module.groups > 1:
            continue
        kernel, height, padding = module.kernel_size[0], input_shape[-1], int(module.padding[0])
        has_one_position = output_shape[-1] == 1 and padding + height <= kernel
        if not has_one_position or kernel == height or module.kernel_size != (kernel, kernel):
            continue
        # Parameters, names and random numbers drawn stay the convolution's.
        live: Any = module
        live.__class__ = LiveConv2d
        live.live = slice(padding, padding + height)
        live.weight = nn.Parameter(live.cut(live.weight.detach()))


class LiveConv2d(nn.Conv2d):
    """A convolution at a single position that has only the taps over its input.

    It is one matrix product, which a CPU does four times as fast as the convolution that it is
    equal to (oneDNN, 512 channels, 1 x 1). State dicts hold its weight in the standard shape, with
    zeros, which is what the other taps contribute; random leftovers of the initialization would
    only be noise to those who use the model on larger images.
    """

    live: slice
    """Rows, and columns, of the standard kernel that are kept."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None]

    def whole(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight, or its gradient, in the standard shape."""
        full = weight.new_zeros(*weight.shape[:2], *self.kernel_size)
        full[:, :, self.live, self.live] = weight
        return full

    def cut(self, weight: torch.Tensor) -> torch.Tensor:
        """The inverse of ``whole``: a copy of the kept taps."""
        return weight[:, :, self.live, self.live].clone(memory_format=torch.contiguous_format)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.whole(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        name = f"{prefix}weight"
        own = {**state_dict, name: self.cut(state_dict[name])}
        super()._load_from_state_dict(own, prefix, *others)


def _layers(
    model: nn.Module, image_size: int
) -> list[tuple[nn.Conv2d | nn.Linear, torch.Size, torch.Size]]:
    """Module, input shape and output shape of each convolution and linear layer, in the
    order of a forward pass on one square image."""
    found: list[tuple[nn.Conv2d | nn.Linear, torch.Size, torch.Size]] = []

    def record(module: Any, inputs: Any, output: torch.Tensor) -> None:
        found.append((module, inputs[0].shape, output.shape))

    hooks = [
        module.register_forward_hook(record)
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    image = torch.zeros(1, first.in_channels, image_size, image_size, device=first.weight.device)
    training = model.training
    model.eval()  # running statistics must not see this image
    with torch.no_grad():
        model(image)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return found


def forward_flops(model: nn.Module, *, image_size: int) -> int:
    """Floating-point operations of one image's forward pass: those of convolutions and linear
    layers, two for each multiply-add, as torch's ``FlopCounterMode`` counts them.

    Counted here because importing that counter imports torch's compiler and sympy. A training
    step costs three times as many: one forward and twice that in backward.
    """
    return sum(
        2 * returned.numel() * module.weight[0].numel()
        for module, _, returned in _layers(model, image_size)
    )
