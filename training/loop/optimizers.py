"""Optimizers, the parameters that they decay, and the schedule of the learning rate.

The schedule depends only on the step, so nothing of it needs saving.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW, adamw
from torch.optim.optimizer import ParamsT, StateDict

from contract.errors import InputError
from training.system import machine

# Of GPT-3 (arXiv 2005.14165, appendix B) and most since: a shorter memory of squared gradients.
_BETAS = (0.9, 0.95)
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def build(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    device: torch.device,
    offloads: bool = False,
) -> torch.optim.Optimizer:
    """AdamW of the language models, over what is trained.

    Args:
        name: ``adamw``, or ``adamw-8bit``, whose moments take a quarter of the memory.
        offloads: moments of ``adamw`` are kept in the host's memory.

    Raises:
        InputError: ``adamw-8bit`` is not available here.
    """
    groups = decay_groups(model, weight_decay)
    if offloads:
        return OffloadedAdamW(groups, lr=lr, betas=_BETAS, fused=True)
    if name == "adamw":
        fused = device.type in ("cuda", "cpu")  # one kernel over all parameters: 2-3x on both
        return torch.optim.AdamW(groups, lr=lr, betas=_BETAS, fused=fused)
    if device.type != "cuda":
        raise InputError("--optimizer is adamw-8bit, which needs a GPU: use adamw here")
    machine.check_compiler("--optimizer adamw-8bit")
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise InputError(
            "--optimizer is adamw-8bit, which needs the package torchao: install it, or use adamw"
        ) from None
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=_BETAS)
    return optimizer


def decay_groups(model: nn.Module, weight_decay: float) -> ParamsT:
    """What is trained, as an optimizer takes it: weight decay spares biases and normalization."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class OffloadedAdamW(AdamW):
    """AdamW whose moments are kept in the host's memory, and are on the device of a parameter
    only while that is updated: 8 bytes per parameter less, and twice as many to copy each step.

    It takes the same steps as AdamW, and its state is saved and loaded in the same form.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        devices: set[torch.device] = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                    devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                # The copies to the host are under way, and a checkpoint may read them next.
                torch.cuda.current_stream(device).synchronize()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = on_host(parameter)
        own, step = _local(parameter), state["step"].to(parameter.device)
        first, second = (_local(state[name]).to(own.device, non_blocking=True) for name in _MOMENTS)
        adamw(
            [own],
            [_local(parameter.grad)],
            [first],
            [second],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        state["step"].copy_(step)
        for name, moment in zip(_MOMENTS, (first, second), strict=True):
            _local(state[name]).copy_(moment, non_blocking=True)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state into the host's memory; AdamW's own way is through the device's."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            values = state_dict["state"].get(key)
            if not values:
                continue
            self.state[parameter] = {"step": torch.as_tensor(values["step"]).float().cpu().clone()}
            for name in _MOMENTS:
                self.state[parameter][name] = moment = on_host(parameter)
                _local(moment).copy_(_local(values[name]))
        for group, values in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})


def on_host(parameter: Tensor) -> Tensor:
    """Zeros in the host's memory for what this process holds of a parameter; sharded as it is."""
    is_on_gpu = parameter.device.type == "cuda"
    return torch.zeros_like(parameter, device="cpu", pin_memory=is_on_gpu, requires_grad=False)


def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def warmup_cosine(
    step: int, total_steps: int, *, peak: float, warmup_fraction: float, floor: float = 0.0
) -> float:
    """Learning rate of ``step`` (counted from 0): a linear rise to ``peak``, then half a cosine to
    ``floor``.

    With a floor of 0 it is the one-cycle policy of Smith and Topin (arXiv 1708.07120) without its
    momentum cycle.
    """
    done = (step + 0.5) / total_steps
    if done < warmup_fraction:
        return peak * done / warmup_fraction
    left = 0.5 * (1 + math.cos(math.pi * (done - warmup_fraction) / (1 - warmup_fraction)))
    return floor + (peak - floor) * left
