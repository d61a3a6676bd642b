"""A tiny model of each shape of ``models.json``, trained beside transformers.

A pair of processes loads each from files as they are published, trains it beside transformers and
plain AdamW, saves it, resumes it whole in each process, exports it, and lets transformers load
that. A model is right if all losses on the way are those of transformers.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import rank_groups
from contract.errors import InputError
from contract.runs import RunPaths
from store import storage
from tests.published.models import VOCAB, from_pretrained, publish
from training import export
from training.checkpoint import checkpoints, sharded_checkpoints
from training.checkpoint.dcp import Share
from training.models import agreement, language_models, model_weights, pretrained
from training.models.language_models import WithLoss

#: Largest difference between a loss here and that of transformers, in nats.
TOLERANCE: Final = 1e-4
_STEPS: Final = 2
_CPU: Final = torch.device("cpu")
_LR: Final = 3e-3


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of one model."""

    name: str
    difference: float = 0.0
    """Largest difference between a loss here and that of transformers, in nats."""
    refused: str = ""
    """Reason why it is not trained; empty if it is."""
    packs: bool = False
    """Packed documents are kept apart."""
    note: str = ""
    """What the user is told about the files."""

    @property
    def is_right(self) -> bool:
        return not self.refused and self.difference <= TOLERANCE

    def compare(self, found: float, expected: float) -> None:
        """Compare two losses."""
        gap = abs(found - expected)
        self.difference = max(self.difference, gap if gap == gap else float("inf"))


def measure(names: Iterable[str], folder: Path) -> list[Outcome]:
    """Try models of ``ROWS`` one after the other, in a pair of processes.

    Args:
        folder: for models, checkpoints and exports; it stays as small as one of them.
    """
    found: list[Outcome] = rank_groups.run(2, _pair, tuple(names), folder)[0]
    return found


def _pair(names: tuple[str, ...], folder: Path) -> list[Outcome]:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    found = []
    for number, name in enumerate(names):
        outcome, place = Outcome(name=name), folder / str(number)
        try:
            _try(outcome, place, group)
        except InputError as error:
            outcome.refused = str(error)
        found.append(outcome)
        dist.barrier()
        if dist.get_rank() == 0:
            storage.remove_folder(str(place))
    return found


def _try(outcome: Outcome, folder: Path, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    base = str(folder / "base")
    if rank == 0:
        publish(outcome.name, folder / "base")
    dist.barrier()
    reference = _Reference(from_pretrained(base, has_more=True))
    plain = torch.optim.AdamW(reference.parameters(), lr=_LR)
    values = pretrained.model_config(base, runs="").to_dict()

    def build(shape: tuple[int, ...]) -> tuple[WithLoss, torch.optim.Optimizer]:
        trained = WithLoss(language_models.build_on_meta(pretrained.model_config(base, runs="")))
        if shape:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard",))
            language_models.shard(trained, mesh, bf16=False)
        model_weights.allocate(trained.model, _CPU)
        return trained, torch.optim.AdamW(trained.model.parameters(), lr=_LR)

    trained, optimizer = build((2,))
    outcome.note = model_weights.load(trained.model, folder / "base")
    assert {each.dtype for each in trained.parameters()} == {torch.float32}
    agreement.check(trained, device=_CPU, isolates=False, is_exact=True)
    outcome.packs = _packs(trained)
    outcome.compare(_loss(trained), _loss(reference))
    for step in range(_STEPS):
        _step(trained, optimizer, _tokens(step)[rank::2])
        _step(reference, plain, _tokens(step))
    after = _loss(trained)
    outcome.compare(after, _loss(reference))

    state = {"position": asdict(checkpoints.Position(step=_STEPS)), "config": {"recipe": "fsdp"}}
    uri = sharded_checkpoints.write_checkpoint(
        str(folder),
        _STEPS,
        Share().copy(sharded_checkpoints.state_of(trained.model, optimizer)),
        files={
            "state.json": json.dumps(state).encode(),
            "config.json": json.dumps(values).encode(),
        },
        group=group,
    )
    dist.barrier()
    found = sharded_checkpoints.ShardedCheckpoint(uri)
    whole, its_optimizer = build(())
    found.load(whole.model, its_optimizer)
    outcome.compare(_loss(whole), after)
    _step(trained, optimizer, _tokens(_STEPS)[rank::2])
    _step(whole, its_optimizer, _tokens(_STEPS))
    outcome.compare(_loss(whole), _loss(trained))
    if rank == 0:
        place = export.export(found, str(folder / "exported"), dtype=torch.float32)
        outcome.compare(_loss(_Reference(from_pretrained(place))), after)
    assert RunPaths(str(folder)).checkpoint(_STEPS) == uri


class _Reference(nn.Module):
    """A model of transformers, which returns the loss of tokens as ``WithLoss`` does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def _packs(trained: WithLoss) -> bool:
    try:
        agreement.check(trained, device=_CPU, isolates=True, is_exact=True)
    except InputError:
        return False
    return True


def _loss(trained: nn.Module) -> float:
    trained.eval()
    with torch.no_grad():
        loss = float(trained(_tokens(0)))
    reshard = getattr(trained, "reshard", None)
    if reshard is not None:  # what the root keeps whole is stale after the next step
        reshard()
    return loss


def _step(trained: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    trained.eval()  # no dropout: the steps are to be the same
    trained(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, VOCAB, (4, 25), generator=generator)
