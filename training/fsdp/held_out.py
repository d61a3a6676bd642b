"""The FSDP recipe's evaluation: the loss over what no step trains on, source by source."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from contract.errors import InputError
from training.bookkeeping import Score
from training.data.feed import NOTHING
from training.data.mixed_feed import Part
from training.fsdp.passes import on_device
from training.fsdp.settings import FsdpConfig
from training.loop import metrics
from training.loop.worker import Pulse, Worker
from training.models import language_models
from training.models.language_models import WithLoss
from training.record.result import HeldOutText


class HeldOut:
    """The sequences that no step trains on, and the loss over them."""

    def __init__(self, parts: Sequence[Part], config: FsdpConfig) -> None:
        """
        Raises:
            InputError: the held-out part of a source is shorter than a sequence.
        """
        self._parts, self._at_once = parts, config.sequences_per_pass
        self._num, self._num_tokens = [], []
        for part in parts:
            held_out = part.feed.held_out
            if held_out.num_sequences < 1:
                of_source = f" of {part.label}" if len(parts) > 1 else ""
                raise InputError(
                    f"the held-out part{of_source} has {len(part.store.held_out):,} tokens, less "
                    f"than a sequence of {config.seq_len}: give more text, a smaller "
                    "--held-out-every or --seq-len"
                )
            num = min(held_out.num_sequences, config.eval_sequences or held_out.num_sequences)
            self._num.append(num)
            self._num_tokens.append(held_out.num_labels(np.arange(num)))
        self.num_tokens = sum(self._num_tokens)

    def evaluate(self, trained: WithLoss, worker: Worker) -> Score:
        """Evaluate all held-out sequences with all ranks; all get the same result.

        Returns:
            The mean loss per token in nats, of a mixture weighted by the shares of its sources;
            perplexity, and of a mixture the loss of each source.
        """
        totals = torch.zeros(len(self._parts), dtype=torch.float64, device=worker.device)
        pulse = Pulse(worker)
        trained.eval()
        with torch.no_grad():
            for number in range(len(self._parts)):
                totals[number] = self._loss_sum(number, trained, worker, pulse)
        language_models.reshard(trained)
        trained.train()
        if worker.world_size > 1:
            dist.all_reduce(totals)
        means = [total / num for total, num in zip(totals.tolist(), self._num_tokens, strict=True)]
        loss = sum(part.share * mean for part, mean in zip(self._parts, means, strict=True))
        perplexity = metrics.perplexity(loss)
        measures = {"perplexity": perplexity}
        if len(means) > 1:
            measures |= {
                f"loss_{part.label}": mean for part, mean in zip(self._parts, means, strict=True)
            }
        details = HeldOutText(loss=loss, perplexity=perplexity, num_tokens=self.num_tokens)
        return Score(loss=loss, measures=measures, details=details)

    def _loss_sum(self, number: int, trained: WithLoss, worker: Worker, pulse: Pulse) -> Tensor:
        """This rank's part of the summed loss over a source's tokens, a scalar."""
        world_size, feed, num = worker.world_size, self._parts[number].feed, self._num[number]
        total = torch.zeros((), dtype=torch.float64, device=worker.device)
        per_round = world_size * self._at_once
        for first in range(0, num, per_round):
            pulse.beat()
            mine = np.arange(first, min(first + per_round, num))[worker.rank :: world_size]
            # All ranks gather the weights together, so one without a part computes in vain.
            batch = feed.held_out.batch(mine if len(mine) else np.array([NOTHING]))
            # Compiled for fewer sequences, the blocks would be compiled for any number of them.
            is_whole = len(batch.tokens) == self._at_once
            with torch.compiler.set_stance("default" if is_whole else "force_eager"):
                loss = trained(*on_device(batch, worker.device))
            total += loss.double() * batch.num_labels
        return total
