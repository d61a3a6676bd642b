"""Frozen matrices in four bits: NF4, the number format of QLoRA (arXiv 2305.14314).

A row of a matrix is a row of bytes: two weights in each, and then, for each 64 weights, the largest
of their absolute values in fp32. That is 4.5 bits per weight. No row depends on another, so each
process packs the rows of its own shard, and FSDP2 sends packed rows: no process ever needs the
matrix in more bits, but for one product. Values are those of bitsandbytes 0.50.2, to the bit, but
computed in plain torch, so that nothing has to be installed and any device will do.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.errors import InputError
from training.models.model_shapes import NF4_BLOCK, NOTHING_TO_PACK

#: Bytes of a row per weight: half a byte, and four for each block.
_BYTES: Final = (1, 2), (4, NF4_BLOCK)
# Classes of transformers whose own ``forward`` is that of ``nn.Linear``, rounding excepted.
_PLAIN: Final = ("FalconLinear",)
# Sixteen quantiles of the normal distribution (QLoRA, appendix E).
_VALUES: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def packable(stack: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Linear layers of a model's blocks that can be packed.

    Everything else stays as it is: norms, the experts of a mixture, many routers, GPT-2's
    transposed matrices, adapters, and layers with rows that do not consist of whole blocks.
    """
    return [
        (name, module)
        for name, module in stack.named_modules()
        if isinstance(module, nn.Linear)
        and is_plain(module)
        and "lora_" not in name
        and module.in_features % NF4_BLOCK == 0
    ]


def replace(stack: nn.Module) -> None:
    """Replace those layers by packed ones. The model is on the meta device, without memory yet.

    Raises:
        InputError: there are none.
    """
    found = packable(stack)
    if not found:
        raise InputError(NOTHING_TO_PACK)
    for name, module in found:
        stack.set_submodule(name, PackedLinear(module, name=name.removesuffix(".base_layer")))


def is_plain(module: nn.Module) -> bool:
    """Tell that a module, packed or not, is a product with a matrix and nothing else.

    Classes derived from ``nn.Linear`` may do anything in their own ``forward``, as routers do.
    """
    return (
        isinstance(module, PackedLinear)
        or type(module) is nn.Linear
        or type(module).__name__ in _PLAIN
    )


def restore(model: nn.Module) -> None:
    """Replace packed matrices by linear layers in fp32 with the same values."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, PackedLinear):
            linear: Any = nn.Linear(module.in_features, module.out_features, device="meta")
            linear.weight = nn.Parameter(unpack(module.packed, torch.float32), requires_grad=False)
            linear.bias = module.bias
            model.set_submodule(name, linear)


class PackedLinear(nn.Module):
    """A linear layer whose matrix is packed, and not trained.

    Args:
        name: of the layer, for errors.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, *, name: str = "") -> None:
        super().__init__()
        self._name = name
        self.in_features, self.out_features = layer.in_features, layer.out_features
        num_bytes = sum(layer.in_features * size // of for size, of in _BYTES)
        rows = torch.empty(
            layer.out_features, num_bytes, dtype=torch.uint8, device=layer.weight.device
        )
        self.packed = nn.Parameter(rows, requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """Models that read a matrix, or its type, instead of calling its layer would compute with
        bytes: they are refused at their first pass.

        Raises:
            InputError: always (``hasattr`` fails with it too), but while transformers' rules fill
                buffers, which leave weights with its mark as they are.
        """
        if getattr(self.packed, "_is_hf_initialized", False):
            return self.packed
        raise InputError(
            f"--lora-bits is 4, and this kind of model reads the weight of its layer {self._name} "
            "itself, where four bits cannot stand for it: leave --lora-bits out"
        )

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.is_floating_point():
            raise InputError(
                f"--lora-bits is 4, and this kind of model gives its layer {self._name} numbers of "
                f"type {inputs.dtype}: leave --lora-bits out"
            )
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        product: Tensor = _Product.apply(inputs, self.packed)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """A product that keeps the packed matrix for its backward pass, and unpacks it again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(inputs, unpack(packed, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (packed,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ unpack(packed, gradient.dtype), None


def pack(rows: Tensor) -> Tensor:
    """Rows of a matrix ``[num, inputs]`` as bytes, ``[num, 9/16 of the inputs]``; ``num`` may be 0,
    as it is where more processes than rows share a matrix."""
    values = torch.tensor(_VALUES, device=rows.device)
    blocks = rows.float().reshape(len(rows), rows.shape[1] // NF4_BLOCK, NF4_BLOCK)
    largest = blocks.abs().amax(dim=2)
    scaled = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    nearest = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    codes = nearest.view(rows.shape)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], largest.view(torch.uint8)], dim=1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack``, rounded to a sixteenth of the block's range and to ``dtype``."""
    rows, inputs = shape_of(packed)
    values = torch.tensor(_VALUES, device=packed.device)
    pairs = torch.cartesian_prod(values, values)  # of each byte
    codes, scales = packed[:, : inputs // 2], packed[:, inputs // 2 :]
    blocks = F.embedding(codes.int(), pairs).view(rows, inputs // NF4_BLOCK, NF4_BLOCK)
    # A slice of bytes may begin anywhere, and numbers may not.
    blocks *= scales.contiguous().view(torch.float32)[:, :, None]
    return blocks.view(rows, inputs).to(dtype)


def unpacked_name(name: str) -> str:
    """The name of a weight in the same model without packed matrices."""
    layer, _, own = name.rpartition(".")
    return f"{layer}.weight" if own == "packed" else name


def shape_of(weight: Tensor) -> torch.Size:
    """Shape of a weight, also of one that is packed."""
    if weight.dtype != torch.uint8:
        return weight.shape
    return torch.Size((weight.shape[0], weight.shape[1] * 16 // 9))


def num_weights(weight: Tensor) -> int:
    """Number of values of a weight, also of one that is packed."""
    return shape_of(weight).numel()
