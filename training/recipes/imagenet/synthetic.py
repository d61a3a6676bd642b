"""Pictures that are made on the device: to try the recipe, and to time it without its data path.

Each class is a pattern of its own under noise, so a model can learn it. No file is read.
"""

from collections.abc import Iterable, Iterator

import torch

from training.data.pictures.reader import Batch

NUM_CLASSES = 10
_NUM_NOISES = 64


class Synthetic:
    """A split of such pictures, numbered from 0; it gives what ``pictures.reader.Reader`` gives."""

    def __init__(self, num: int, *, canvas: int, device: torch.device) -> None:
        """
        Args:
            num: of pictures.
            canvas: pixels of a side; all pictures fill it.
        """
        self._num = num
        self._device = device
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randint(0, 192, (NUM_CLASSES, 3, 2, 2), generator=generator)
        patterns = torch.nn.functional.interpolate(coarse.float(), size=canvas)
        self._patterns = patterns.to(torch.uint8).permute(0, 2, 3, 1).contiguous().to(device)
        shape = (_NUM_NOISES, canvas, canvas, 3)
        noises = torch.randint(0, 64, shape, generator=generator, dtype=torch.uint8)
        self._noises = noises.to(device)

    def __len__(self) -> int:
        return self._num

    def batches(self, plan: Iterable[torch.Tensor]) -> Iterator[Batch]:
        """A batch for each part of the plan, int64 ``[n]``, in its order."""
        for samples in plan:
            labels = (samples % NUM_CLASSES).to(self._device, non_blocking=True)
            noises = (samples * 7 % _NUM_NOISES).to(self._device, non_blocking=True)
            pictures = self._patterns[labels] + self._noises[noises]
            yield Batch(
                pictures=pictures,
                extents=torch.full((len(samples), 2), pictures.shape[1], device=self._device),
                labels=labels,
                samples=samples,
                places=torch.arange(len(samples)),
                num_planned=len(samples),
            )
