"""How a model uses the matrices of its blocks: found out in a pass without memory for its weights.

What adapters and four bits need is that a layer is called. Some models take the weight of a layer
instead and compute with that: an adapter beside such a layer would never be trained, and packed
bytes would be taken for weights. The pass follows a few tokens through the model on the meta
device, where nothing is computed, and notes who asks for which weight.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.models import language_models, nf4
from training.models.model_shapes import Matrix, Without
from training.models.nf4 import PackedLinear

#: Tokens of the pass: as many as the largest of the usual convolutions of state-space models.
_LENGTH: Final = 8
#: What a mixture calls the layer that chooses its experts, beside "router".
_GATES: Final = frozenset({"gate", "wg"})
_aten: Final = torch.ops.aten


@dataclass(kw_only=True, slots=True)
class _Use:
    """What a pass does with a layer."""

    is_called: bool = False
    is_read: bool = False
    """Whether anything but the layer itself asks for its weight."""
    is_inside: bool = False


def matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """Each matrix of the blocks of a model on the meta device, by its name within the blocks.

    Adapters and what they have put around a matrix are no part of it, so that the answer is the
    same before and after ``lora.add``.
    """
    layers = dict(language_models.matrices(model))
    uses = _uses(model, layers)
    refused = _refused(model, {_last(name) for name in layers})
    found = {}
    for name, layer in layers.items():
        use = uses.get(name, _Use(is_called=True))
        inputs, outputs = _widths(layer)
        without = Without.NOTHING
        if use.is_read and not use.is_called:
            without = Without.READ
        elif _last(name) in refused:
            without = Without.REFUSED
        elif isinstance(layer, nn.Linear) and not nf4.is_plain(layer):
            without = Without.MORE
        elif _is_router(model, name, outputs):
            without = Without.ROUTER
        found[name] = Matrix(
            name=_last(name),
            inputs=inputs,
            outputs=outputs,
            number=1,
            is_plain=nf4.is_plain(layer),
            is_read=use.is_read,
            without=without,
        )
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _widths(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a matrix."""
    if isinstance(layer, nn.Linear | PackedLinear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape  # transformers' Conv1D, as in GPT-2
    return int(inputs), int(outputs)


def _is_router(model: Any, name: str, outputs: int) -> bool:
    """Whether a matrix chooses the experts of a token: it has that name, or that size and place."""
    parts = name.split(".")
    if any("router" in part for part in parts):
        return True
    return not _GATES.isdisjoint(parts) and outputs == language_models.num_experts(model.config)


def _refused(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those last names for which peft refuses adapters in models of this kind: state-space models,
    some of whose layers are read by CUDA kernels that mamba-ssm brings. peft tells by failing."""
    # It takes seconds to import, and other models have no such layer.
    if not any(_last(name) == "conv1d" for name, _ in model.named_modules()):
        return set()
    try:
        from peft import LoraConfig
        from peft.tuners import tuners_utils
    except ImportError:  # then there are no adapters at all
        return set()
    check: Any = getattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_given: None)
    found = set()
    for name in names:
        try:
            check(LoraConfig(), model, name)
        except ValueError:
            found.add(name)
    return found


def _uses(model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, _Use]:
    """What a pass does with each layer that is not packed: packed ones let nothing read them.

    Where a model cannot make such a pass to its end, each layer is taken to be called.
    """
    found = {name: _Use() for name in layers if not isinstance(layers[name], PackedLinear)}
    tokens = torch.zeros((1, _LENGTH), dtype=torch.long, device="meta")
    watched = _watched([(layers[name], use) for name, use in found.items()])
    plausible = _Plausible()  # type: ignore[no-untyped-call]
    with watched, plausible, torch.no_grad():
        try:
            model(input_ids=tokens)
        except Exception:  # whatever a model does with values that are not there
            for use in found.values():
                use.is_called = True  # or would have been
    return found


@contextmanager
def _watched(layers: list[tuple[nn.Module, _Use]]) -> Iterator[None]:
    """Note calls of layers and who reads their weights."""
    kinds = [type(layer) for layer, _ in layers]
    for layer, use in layers:
        layer.__class__ = _watching(type(layer), use)
    try:
        yield
    finally:
        for (layer, _), kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


def _watching(kind: Any, use: _Use) -> Any:
    """A class like ``kind`` for one layer, of which ``use`` notes what is done."""

    class Watching(kind):  # type: ignore[misc]
        def forward(self, *given: Any, **more: Any) -> Any:
            use.is_called = use.is_inside = True
            try:
                return super().forward(*given, **more)
            finally:
                use.is_inside = False

        @property
        def weight(self) -> Tensor:
            use.is_read |= not use.is_inside
            weight: Tensor = self._parameters["weight"]
            return weight

    return Watching


class _Plausible(TorchDispatchMode):
    """Answers what a model asks about values that do not exist, so that it goes on: each number is
    one, nothing is true, and every element counts."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return torch.tensor(args[0].dtype != torch.bool, dtype=args[0].dtype).item()
        if func is _aten.nonzero.default and args[0].is_meta:
            shape = (args[0].numel(), args[0].dim())
            return torch.empty(shape, dtype=torch.long, device="meta")
        if func is _aten._grouped_mm.default and args[0].is_meta:  # refuses fp32 on this device
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))
