"""Copies to a GPU for which the host does not wait."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's, on a device.

    A GPU takes it from pinned memory while the host goes on. From other memory it would do so only
    after all that it was asked for before, and the host would wait for that in each step.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
