"""Trace a model on the meta device to find the matrices that can take adapters or four bits.

Adapters and four bits need a layer that is called. Some models read the weight of a layer instead
and compute with that: an adapter beside such a layer would never be trained, and packed bytes would
be taken for weights. A few tokens pass through the model on the meta device, where nothing is
computed, and every access to a weight is noted.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from contract.errors import InputError
from training.models import language_models, nf4
from training.models.model_shapes import ALL, NF4_BLOCK, NOTHING_TO_PACK, target_names
from training.models.nf4 import PackedLinear

#: Tokens of the pass: as many as the largest of the usual convolutions of state-space models.
_LENGTH: Final = 8
#: Names of the layer that chooses the experts of a token, beside "router".
_GATES: Final = frozenset({"gate", "wg"})
_aten: Final = torch.ops.aten

# Reasons against adapters, after the names of matrices. Fine-tuning leaves routers as they are, but
# they may be named.
_ROUTER: Final = "chooses experts"
_READ: Final = (
    "is never called, since the model computes with its weight itself: adapters would not be "
    "trained"
)
_REFUSED: Final = "gets none from peft in models of this kind"
_MORE: Final = "does more than a product, to which those of adapters could be added"


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix of a model's blocks."""

    name: str
    """Last part of its name, such as ``q_proj``."""
    is_packed: bool
    """``--lora-bits 4`` keeps its weight in four bits."""
    is_read: bool
    """The model accesses its weight, and does not only call it."""
    reason: str = ""
    """Against adapters, unless they are asked for by name, or even then."""


@dataclass(kw_only=True, slots=True)
class _Use:
    """Accesses to a layer in a pass."""

    is_called: bool = False
    is_read: bool = False
    """Something other than the layer itself accessed its weight."""
    is_inside: bool = False


def matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """Each matrix of the blocks of a model on the meta device, by its name within the blocks.

    Adapters and peft's wrappers around a matrix are not included, so that the result is the same
    before and after ``lora.add``.
    """
    layers = dict(language_models.matrices(model))
    uses = _uses(model, layers)
    refused = _refused(model, {_last(name) for name in layers})
    found = {}
    for name, layer in layers.items():
        use = uses.get(name, _Use(is_called=True))
        is_linear = isinstance(layer, nn.Linear | PackedLinear)
        is_plain = is_linear and nf4.is_plain(layer)
        of: Any = layer
        reason = ""
        if use.is_read and not use.is_called:
            reason = _READ
        elif _last(name) in refused:
            reason = _REFUSED
        elif is_linear and not is_plain:
            reason = _MORE
        elif _is_router(model, name, of.out_features if is_linear else of.weight.shape[1]):
            reason = _ROUTER
        found[name] = Matrix(
            name=_last(name),
            is_packed=is_plain and of.in_features % NF4_BLOCK == 0,
            is_read=use.is_read,
            reason=reason,
        )
    return found


def with_adapters(matrices: Mapping[str, Matrix], targets: str) -> list[str]:
    """Names of the matrices that adapters stand beside.

    Args:
        targets: last parts of names, separated by commas; or ``all``, which is all but those with a
            reason against it.

    Raises:
        InputError: there are none of such a name, or adapters beside them are impossible.
    """
    names = target_names((each.name for each in matrices.values()), targets)
    allowed = ("",) if targets == ALL else ("", _ROUTER)
    possible = {name: each for name, each in matrices.items() if each.reason in allowed}
    chosen = [name for name, each in possible.items() if each.name in names]
    if targets != ALL and (none := sorted(names - {_last(name) for name in chosen})):
        why = next(each.reason for each in matrices.values() if each.name == none[0])
        rest = sorted({each.name for each in possible.values()})
        raise InputError(
            f"--lora-targets names {none[0]!r}, which {why}: choose of {', '.join(rest)}"
        )
    if not chosen:
        raise InputError("this model's blocks have no matrices for adapters: leave --lora-rank out")
    return chosen


def left_out(matrices: Iterable[Matrix], targets: str) -> str:
    """The matrices that ``all`` leaves out, and the reasons, for the user; empty if none."""
    if targets != ALL:
        return ""
    names: dict[str, set[str]] = {}
    for each in matrices:
        if each.reason:
            names.setdefault(each.reason, set()).add(each.name)
    order = (_MORE, _READ, _REFUSED, _ROUTER)
    parts = [f"{', '.join(sorted(names[why]))} ({why})" for why in order if why in names]
    return f"no adapters are put beside {'; '.join(parts)}" if parts else ""


def why_not_packed(matrices: Iterable[Matrix]) -> str:
    """The reason to refuse ``--lora-bits 4`` for a model with these matrices; empty if none."""
    packed = [each for each in matrices if each.is_packed]
    read = next((each.name for each in packed if each.is_read), "")
    if read:
        return nf4.reads_weight(read)
    return "" if packed else NOTHING_TO_PACK


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_router(model: Any, name: str, outputs: int) -> bool:
    """Tell by its name, or its size and place, that a matrix chooses the experts of a token."""
    parts = name.split(".")
    if any("router" in part for part in parts):
        return True
    return not _GATES.isdisjoint(parts) and outputs == language_models.num_experts(model.config)


def _refused(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Last names for which peft refuses adapters in models of this kind: state-space models, some
    of whose layers are read by the CUDA kernels of mamba-ssm. peft's own check raises for those."""
    # Importing peft takes seconds, and other models have no such layer.
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
    """Accesses to each layer that is not packed: packed ones refuse to be read.

    If a model cannot finish such a pass, each layer counts as called.
    """
    found = {name: _Use() for name in layers if not isinstance(layers[name], PackedLinear)}
    tokens = torch.zeros((1, _LENGTH), dtype=torch.long, device="meta")
    watched = _watched([(layers[name], use) for name, use in found.items()])
    plausible = _Plausible()  # type: ignore[no-untyped-call]
    with watched, plausible, torch.no_grad():
        try:
            model(input_ids=tokens)
        except Exception:  # models may do anything with values that do not exist
            for use in found.values():
                use.is_called = True  # or would have been
    return found


@contextmanager
def _watched(layers: list[tuple[nn.Module, _Use]]) -> Iterator[None]:
    """Note calls of layers, and accesses to their weights."""
    kinds = [type(layer) for layer, _ in layers]
    for layer, use in layers:
        layer.__class__ = _watching(type(layer), use)
    try:
        yield
    finally:
        for (layer, _), kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


def _watching(kind: Any, use: _Use) -> Any:
    """A class like ``kind`` for one layer, which notes accesses in ``use``."""

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
    """Plausible values where a model asks for some that do not exist, so that it continues: each
    number is one, nothing is true, and every element is nonzero."""

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
