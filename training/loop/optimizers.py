"""Optimizers, and the parameters that they decay."""

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from contract.errors import InputError
from training.system import devices

# Of GPT-3 (arXiv 2005.14165, appendix B) and most since: a shorter memory of squared gradients.
_BETAS = (0.9, 0.95)


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
    """Trainable parameters in two groups for an optimizer: weight decay applies to matrices, not to
    biases and normalization."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    kinds = {each.dtype for each in parameters}
    assert kinds <= {torch.float32}, f"the optimizer would update weights in {kinds}"
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
