"""The FSDP recipe's evaluation: the loss over what no step trains on."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from contract.errors import InputError
from training.bookkeeping import Score
from training.data.feed import NOTHING, Feed
from training.data.rows import TokenStore
from training.fsdp.passes import on_device
from training.fsdp.settings import FsdpConfig
from training.loop import metrics
from training.loop.worker import Pulse, Worker
from training.models import language_models
from training.models.language_models import WithLoss
from training.record.result import HeldOutText


class HeldOut:
    """The sequences that no step trains on, and the loss over them."""

    def __init__(self, feed: Feed, store: TokenStore, config: FsdpConfig) -> None:
        """
        Raises:
            InputError: the held-out part is shorter than a sequence.
        """
        self._sequences, self._at_once = feed.held_out, config.sequences_per_pass
        num = self._sequences.num_sequences
        if num < 1:
            raise InputError(
                f"the held-out part has {len(store.held_out):,} tokens, less than a sequence of "
                f"{config.seq_len}: give more text, a smaller --held-out-every or --seq-len"
            )
        self._num = min(num, config.eval_sequences or num)
        self.num_tokens = self._sequences.num_labels(np.arange(self._num))

    def evaluate(self, trained: WithLoss, worker: Worker) -> Score:
        """Evaluate all held-out sequences with all ranks; all get the same result.

        Returns:
            The mean loss per token in nats, and perplexity.
        """
        trained.eval()
        with torch.no_grad():
            total = self._loss_sum(trained, worker)
        language_models.reshard(trained)
        trained.train()
        if worker.world_size > 1:
            dist.all_reduce(total)
        loss = total.item() / self.num_tokens
        perplexity = metrics.perplexity(loss)
        details = HeldOutText(loss=loss, perplexity=perplexity, num_tokens=self.num_tokens)
        return Score(loss=loss, measures={"perplexity": perplexity}, details=details)

    def _loss_sum(self, trained: WithLoss, worker: Worker) -> Tensor:
        """This rank's part of the summed loss over all tokens, a scalar."""
        world_size, num = worker.world_size, self._num
        total = torch.zeros((), dtype=torch.float64, device=worker.device)
        pulse = Pulse(worker)
        per_round = world_size * self._at_once
        for first in range(0, num, per_round):
            pulse.beat()
            mine = np.arange(first, min(first + per_round, num))[worker.rank :: world_size]
            # All ranks gather the weights together, so one without a part computes in vain.
            batch = self._sequences.batch(mine if len(mine) else np.array([NOTHING]))
            # Compiled for fewer sequences, the blocks would be compiled for any number of them.
            is_whole = len(batch.tokens) == self._at_once
            with torch.compiler.set_stance("default" if is_whole else "force_eager"):
                loss = trained(*on_device(batch, worker.device), plain=True)
            total += loss.double() * batch.num_labels
        return total
