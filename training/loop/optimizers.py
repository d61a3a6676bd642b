"""Optimizers, and the parameters that they decay."""

import re

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from contract.errors import InputError
from training.system import devices

# Of GPT-3 (arXiv 2005.14165, appendix B) and most since: a shorter memory of squared gradients.
_BETAS = (0.9, 0.95)
# Besides vectors: biases of fused experts, and what a state-space layer's authors exclude. The
# first two are what transformers goes by.
_KEPT = re.compile("bias|norm|A_log")


def build(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """AdamW of the language models, over what is trained.

    Args:
        name: ``adamw``, or ``adamw-8bit``, whose moments take a quarter of the memory.

    Raises:
        InputError: ``adamw-8bit`` is not available here.
    """
    groups = decay_groups(model, weight_decay)
    if name == "adamw":
        fused = device.type in ("cuda", "cpu")  # one kernel over all parameters: 2-3x on both
        return torch.optim.AdamW(groups, lr=lr, betas=_BETAS, fused=fused)
    if device.type != "cuda":
        raise InputError("--optimizer is adamw-8bit, which needs a GPU: use adamw here")
    devices.check_compiler("--optimizer adamw-8bit")
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise InputError(
            "--optimizer is adamw-8bit, which needs the package torchao: install it, or use adamw"
        ) from None
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=_BETAS)
    return optimizer


def decay_groups(model: nn.Module, weight_decay: float) -> ParamsT:
    """Trainable parameters in two groups for an optimizer: weight decay applies to what multiplies,
    not to biases, normalization and the time constants of state-space layers."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    kinds = {each.dtype for each in parameters.values()}
    assert kinds <= {torch.float32}, f"the optimizer would update weights in {kinds}"
    kept = {name for name, each in parameters.items() if each.ndim < 2 or _KEPT.search(name)}
    groups = [
        {
            "params": [each for name, each in parameters.items() if (name in kept) == is_kept],
            "weight_decay": 0.0 if is_kept else weight_decay,
        }
        for is_kept in (False, True)
    ]
    return [group for group in groups if group["params"]]
