"""Models, and what can be left out of them without changing what they compute.

ResNet18 has transformers' layout, so that a saved model loads with
``ResNetForImageClassification.from_pretrained``; one with the small stem, with ``resnet.load``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from training.models.resnet import ResNet18, ResNet18Config

Window = tuple[int, int]
"""First and one-past-last live row (and column) of a square kernel."""


def resnet18(
    *, num_channels: int = 1, num_labels: int = 10, stem: str = "large", width: int = 64
) -> nn.Module:
    """Return an untrained ResNet18; 11,175,370 parameters with the defaults, 2,560 fewer with the
    small stem. ``ResNet18Config`` describes the arguments.

    Weights are drawn from torch's global generator: seed it first.
    """
    return ResNet18(
        ResNet18Config(num_channels=num_channels, num_labels=num_labels, stem=stem, width=width)
    )


def channels_last(model: nn.Module) -> None:
    """Keep the kernels in the order in which a GPU's convolutions read them, in place.

    Kernels of one tap are in both orders at once: they keep the strides that their gradients come
    with, or DDP would copy each gradient into its bucket and warn of it.
    """
    for parameter in model.parameters():
        if parameter.dim() == 4 and parameter[0, 0].numel() > 1:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def keep_live_taps(model: nn.Module, *, image_size: int) -> dict[str, tuple[Window, int]]:
    """Cut from every square convolution the taps that only ever meet padding, in place.

    Where feature maps are smaller than the kernel's reach, some taps multiply zeros for every
    output: their gradient is zero, always. At 28 x 28, ResNet18's last stage works on 1 x 1 maps
    and 62.2 % of all gradient elements are such zeros, which a data-parallel step would still
    sum over the network. Leaving the taps out changes neither loss nor gradient of the others.

    Returns:
        For each cut weight, by parameter name: its live window and the full kernel size, which is
        what ``full_state`` needs to put the taps back.
    """
    cut: dict[str, tuple[Window, int]] = {}
    for name, module, height, out_height in _convolutions(model, image_size):
        kernel, stride, padding = module.kernel_size[0], module.stride[0], module.padding
        if isinstance(padding, str) or module.kernel_size != (kernel, kernel):
            continue
        top = int(padding[0])
        live = [
            tap
            for tap in range(kernel)
            if any(0 <= out * stride - top + tap < height for out in range(out_height))
        ]
        first, end = live[0], live[-1] + 1
        # What remains must be expressible as an ordinary convolution with symmetric padding.
        keeps_size = (height + 2 * (top - first) - (end - first)) // stride + 1 == out_height
        if end - first == kernel or first > top or not keeps_size or module.groups > 1:
            continue
        weight = module.weight.detach()[:, :, first:end, first:end]
        module.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
        module.kernel_size = (end - first, end - first)
        module.padding = (top - first, top - first)
        cut[f"{name}.weight"] = ((first, end), kernel)
        if out_height == 1 and end - first == height:
            # Only its forward changes: parameters, names and shapes are the convolution's.
            module.__class__ = _WholeMapConv2d
    return cut


class _WholeMapConv2d(nn.Conv2d):
    """A convolution whose kernel covers its whole input: one matrix product, which a CPU does
    four times as fast as the convolution that it is equal to (oneDNN, 512 channels, 1 x 1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None]


def _convolutions(model: nn.Module, image_size: int) -> Iterator[tuple[str, nn.Conv2d, int, int]]:
    """Yield name, module, input height and output height of each convolution on square images."""
    for name, module, given, returned in _layers(model, image_size):
        if isinstance(module, nn.Conv2d):
            yield name, module, given[-1], returned[-1]


def _layers(
    model: nn.Module, image_size: int
) -> list[tuple[str, nn.Conv2d | nn.Linear, torch.Size, torch.Size]]:
    """Name, module, input shape and output shape of each convolution and linear layer, in the
    order of a forward pass on one square image."""
    found: list[tuple[str, nn.Conv2d | nn.Linear, torch.Size, torch.Size]] = []

    def record(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            found.append((name, module, inputs[0].shape, output.shape))

        return hook

    hooks = [
        module.register_forward_hook(record(name))
        for name, module in model.named_modules()
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


def full_state(
    state: Mapping[str, torch.Tensor], cut: Mapping[str, tuple[Window, int]]
) -> dict[str, torch.Tensor]:
    """Return a state dict in the standard shapes: the taps left out come back as zeros.

    Zeros are what they contributed; random leftovers of the initialisation would only be noise
    to those who use the model on larger images.
    """
    whole = dict(state)
    for name, ((first, end), kernel) in cut.items():
        if name in whole:
            live = whole[name]
            full = live.new_zeros(*live.shape[:2], kernel, kernel)
            full[:, :, first:end, first:end] = live
            whole[name] = full
    return whole


def live_state(
    state: Mapping[str, torch.Tensor], cut: Mapping[str, tuple[Window, int]]
) -> dict[str, torch.Tensor]:
    """The inverse of ``full_state``: cut standard weights to the windows a model has kept."""
    live = dict(state)
    for name, ((first, end), _) in cut.items():
        if name in live:
            live[name] = live[name][:, :, first:end, first:end].clone(
                memory_format=torch.contiguous_format
            )
    return live


def forward_flops(model: nn.Module, *, image_size: int) -> int:
    """Floating-point operations of one image's forward pass: those of convolutions and linear
    layers, two for each multiply-add, as torch's ``FlopCounterMode`` counts them.

    Counted here because importing that counter imports torch's compiler and sympy. A training
    step costs three times as many: one forward and twice that in backward.
    """
    return sum(
        2 * returned.numel() * module.weight[0].numel()
        for _, module, _, returned in _layers(model, image_size)
    )
