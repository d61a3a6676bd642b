"""Start-up check that our forward pass matches transformers'.

transformers has hundreds of kinds of models. Each may do something between its blocks and its
logits, or with the positions of packed documents, that training here does not do: the run would
learn from a wrong loss, and nothing would fail. A few tokens, in one pass, or in three where
documents are isolated, tell; and the documents of the first batch, together and each alone.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contract.errors import InputError
from training.loop.losses import IGNORE
from training.models import language_models
from training.models.language_models import WithLoss

#: Documents of the first batch that are compared, and the time that this may take.
_NUM_DOCUMENTS: Final = 8
_MAX_S: Final = 30.0
#: Tokens of each of the two documents that are compared.
_LENGTH: Final = 8
#: Largest difference of two losses in nats, and of logits as a part of their own deviation, that is
#: rounding: in fp32, and in arithmetic that is less exact (bf16, TF32).
_PACKED: Final = (
    "packing does not keep documents apart in models of type {kind!r} ({reason}): leave "
    "--isolate-documents out, give --no-packing for conversations, or choose another model"
)
_EXACT: Final = (1e-4, 1e-3)
_ROUNDED: Final = (2e-2, 5e-2)


def check(
    trained: WithLoss,
    *,
    device: torch.device,
    isolates: bool,
    is_exact: bool,
    longest: float = math.inf,
) -> None:
    """Fail unless loss and attention of a model with weights are those of transformers.

    Every rank of a sharded model takes part. The model is in evaluation mode afterwards.

    Args:
        isolates: documents that are packed into a sequence must not see each other.
        is_exact: the model computes in fp32.
        longest: tokens of a sequence.

    Raises:
        InputError: they are not; it names the kind of model and the difference.
    """
    of: Any = trained.model
    kind = of.config.model_type
    loss_limit, logits_limit = _EXACT if is_exact else _ROUNDED
    generator = torch.Generator().manual_seed(0)
    vocab = of.config.get_text_config().vocab_size
    first, second, third = torch.randint(vocab, (3, _LENGTH), generator=generator).to(device)
    trained.eval()
    with torch.no_grad():
        try:
            # The last token of a sequence is only a label.
            pairs = torch.stack([torch.cat([first, each, each[:1]]) for each in (second, third)])
            loss, logits = trained.compare(pairs)
        except InputError:
            raise  # it says already what is wrong
        except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError) as error:
            raise InputError(
                f"models of type {kind!r} cannot be trained here, they fail on plain text "
                f"({type(error).__name__}: {error}): choose another model"
            ) from error
        expected = F.cross_entropy(logits.flatten(0, 1), pairs[:, 1:].flatten()).item()
        if not abs(loss.item() - expected) <= loss_limit * max(1.0, abs(expected)):
            raise InputError(
                f"models of type {kind!r} cannot be trained here: the loss of a few tokens is "
                f"{loss.item():.6f}, and {expected:.6f} by the logits of transformers; choose "
                "another model"
            )
        # Both begin with the same document.
        one, other = logits[:, :_LENGTH]
        if not (found := _difference(one, other)) <= logits_limit:  # NaN is no agreement
            raise InputError(
                f"models of type {kind!r} cannot be trained here: what they predict depends on the "
                f"tokens that follow (by {found:.1%}); choose another model"
            )
        if isolates:
            if longest > (short := language_models.short_length(of.config)) > 0:
                # Just beyond the border, dynamic NTK changes little.
                size = int(min(longest, 2 * short))
                first = torch.randint(vocab, (size,), generator=generator).to(device)
            _check_isolation(trained, kind, first, second, logits_limit)


def _check_isolation(
    trained: WithLoss, kind: str, first: Tensor, second: Tensor, limit: float
) -> None:
    """Compare two packed documents with each by itself."""
    reason = "their attention takes no positions"
    positions = torch.cat(
        [torch.arange(len(each), device=first.device) for each in (first, second)]
    )
    last = second[:1]
    found = math.inf
    try:
        _, packed = trained.compare(torch.cat([first, second, last])[None], positions[None])
        alone = [trained.compare(torch.cat([each, last])[None])[1][0] for each in (first, second)]
    except TypeError:
        pass
    else:
        found = _difference(packed[0, len(first) :], alone[1])
        found = max(found, _difference(packed[0, : len(first)], alone[0]))
        reason = f"two that are packed differ by {found:.1%} from each by itself"
    # With random weights they show too little of what they do.
    if any(isinstance(each, nn.Conv1d) for each in trained.modules()):
        found, reason = math.inf, "their convolutions reach back"
    if not found <= limit:
        raise InputError(_PACKED.format(kind=kind, reason=reason))


def check_documents(trained: WithLoss, inputs: Sequence[Tensor | None], *, is_exact: bool) -> None:
    """Fail unless some documents of a pass are learned as each is that is alone in a pass.

    Every rank of a sharded model takes part, with the same pass. The model is in evaluation mode
    afterwards.

    Args:
        inputs: of the pass, the arguments of ``WithLoss``.

    Raises:
        InputError: they are not.
    """
    of: Any = trained.model
    tokens, positions, labels = inputs
    assert tokens is not None
    assert labels is not None
    trained.eval()
    places = [*_documents(positions, labels)][:_NUM_DOCUMENTS]
    begin = time.monotonic()
    alone = []
    with torch.no_grad():
        together = trained.losses(tokens, positions, labels, places)
        for row, first, end in places:
            own = tokens[[row], first : end + 1], None, labels[[row], first:end]
            alone.append(trained.losses(*own, [(0, 0, end - first)]))
            is_late = torch.tensor(time.monotonic() - begin > _MAX_S, device=tokens.device)
            if dist.is_initialized():  # all ranks stop together
                dist.broadcast(is_late, src=0)
            if is_late:
                break
    expected = torch.cat(alone)
    apart = together[: len(alone)] - expected
    # Rounding has no direction.
    found = (apart.abs().max() if is_exact else apart.mean().abs()).item()
    limit, _ = _EXACT if is_exact else _ROUNDED
    if not found <= limit * max(1.0, expected.max().item()):
        reason = (
            f"losses of the first batch differ by {found:.2g} nats from those of each by itself"
        )
        raise InputError(_PACKED.format(kind=of.config.model_type, reason=reason))


def _documents(positions: Tensor | None, labels: Tensor) -> Iterator[tuple[int, int, int]]:
    """Sequence, begin and end of each document that has labels."""
    for row, own in enumerate((labels != IGNORE).cpu()):
        begins = [0]
        if positions is not None:
            begins = (positions[row].cpu() == 0).nonzero().flatten().tolist()
        for first, end in pairwise([*begins, len(own)]):
            if len(learned := own[first:end].nonzero()):
                # One that has a sequence to itself is followed by padding.
                yield row, first, first + int(learned[-1]) + 1


def _difference(one: Tensor, other: Tensor) -> float:
    """Root mean square of what two sets of logits differ by, as a part of their deviation."""
    size = other.std().clamp(min=1e-12)
    return ((one - other).square().mean().sqrt() / size).item()
