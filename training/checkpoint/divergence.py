"""End of a run whose loss is no longer a number: what led there is set aside, never removed."""

from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

from contract.errors import InputError
from contract.runs import checkpoint_key
from store import storage
from training.checkpoint import checkpoints
from training.loop.metrics import StepMetrics
from training.loop.worker import Worker
from training.system import lease

_DIVERGED: Final = "diverged-"


def stop_if_diverged(
    steps: Sequence[StepMetrics],
    first_step: int,
    *,
    lr: float,
    worker: Worker,
    in_a_row: int = 0,
    limit: int = 1,
) -> int:
    """End the run once so many steps in a row had a loss or gradient that is not a number.

    Args:
        in_a_row: how many did before these steps.
        limit: so many in a row end the run. A recipe that allows more than one skips their updates.

    Returns:
        How many did at the end of these steps.

    Raises:
        InputError: the limit is reached.
    """
    for number, found in enumerate(steps, start=first_step):
        in_a_row = 0 if found.is_finite else in_a_row + 1
        if in_a_row >= limit:
            before = f", the last of {limit}" if limit > 1 else ""
            what = f"at step {number}{before}: loss {found.loss}, gradient norm {found.grad_norm}"
            raise diverged(worker, what, lr=lr, after=number - in_a_row)
    return in_a_row


def diverged(worker: Worker, what: str, *, lr: float, after: int) -> InputError:
    """Error of a run whose loss is no longer a number; every rank calls this.

    The checkpoints of step ``after`` and later hold the very weights that led there, whatever the
    learning rate: rank 0 sets them aside.

    Args:
        after: the last step whose loss was a number.
    """
    worker.saves.finish()
    if checkpoints.is_distributed():
        dist.barrier()  # the last save is whole once every rank has written its part
    run_uri = worker.run_uri

    def set_aside() -> str:
        if worker.rank:
            return ""
        lease.check(run_uri, worker.fence)
        bad = [
            name
            for name in checkpoints.names(run_uri)
            if (checkpoint_key(name) or (0,))[0] >= after
        ]
        for name in bad:
            storage.rename_folder(
                checkpoints.place_of(run_uri, name), checkpoints.place_of(run_uri, _DIVERGED + name)
            )
        aside = f"; set aside as what led there: {', '.join(bad)}" if bad else ""
        also = " and --from-scratch" if bad and not checkpoints.names(run_uri) else ""
        advice = f"Give the same --run a lower --lr (now {lr:g}){also}"
        return f"{aside}. {advice}: {checkpoints.continues(run_uri)}"

    return InputError(f"training diverged {what}{checkpoints.on_all_ranks(set_aside)[0]}")
