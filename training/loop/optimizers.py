"""Optimizers, and the parameters that they decay."""

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

#: Of language models, after GPT-3 (arXiv 2005.14165, appendix B): a shorter memory of squared
#: gradients than Adam's own.
TEXT_BETAS = (0.9, 0.95)


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    device: torch.device,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    fused = device.type in ("cuda", "cpu")  # one kernel over all parameters: 2-3x on both
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=lr, betas=betas, fused=fused)


def decay_groups(model: nn.Module, weight_decay: float) -> ParamsT:
    """What is trained, as an optimizer takes it: weight decay spares biases and normalization."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    kinds = {each.dtype for each in parameters}
    assert kinds <= {torch.float32}, f"the optimizer would update weights in {kinds}"
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
