"""Running average of a model's weights, which is often better than the weights themselves."""

import torch
from torch import nn


class WeightAverage:
    """Exponential moving average of all of a model's parameters and buffers.

    After t updates the newest weights count at least ``1 / (10 + t)``, so that a short run is not
    judged by its first weights. The average, ``state``, is part of a checkpoint.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        """Begin with the model's present weights; ``decay`` is the part of the average that
        remains at each update."""
        self._decay = decay
        self.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        """Name -> tensor, on the model's device, as in its ``state_dict``."""

    @torch.no_grad()
    def update(self, model: nn.Module, *, num_updates: int) -> None:
        """Take the weights in, after an optimizer step.

        Args:
            num_updates: those before this one, over all attempts at the run.
        """
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        # In two kernels: one for each tensor would keep a GPU waiting for Python.
        floats: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        counts: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for name, value in model.state_dict().items():
            averages, values = floats if value.is_floating_point() else counts
            averages.append(self.state[name])
            values.append(value.detach())
        torch._foreach_lerp_(*floats, 1 - decay)
        if counts[0]:  # of the batches that normalization has seen
            torch._foreach_copy_(*counts)

    def buffers(self, model: nn.Module) -> list[torch.Tensor]:
        """The averages of the model's buffers, which each worker has its own of."""
        return [self.state[name] for name, _ in model.named_buffers()]
