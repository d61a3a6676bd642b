"""Start-up check that our forward pass matches transformers'.

transformers has hundreds of kinds of models. Each may do something between its blocks and its
logits, or with the positions of packed documents, that training here does not do: the run would
learn from a wrong loss, and nothing would fail. A few tokens, in one pass, or in three where
documents are isolated, tell; and the documents of the first batch, together and each alone.
"""

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
from training.models.language_models import WithLoss

#: Documents of the first batch that are compared, and the time that this may take.
_NUM_DOCUMENTS: Final = 8
_MAX_S: Final = 30.0
#: Tokens of each of the two documents that are compared.
_LENGTH: Final = 8
#: Largest difference of two losses in nats, and of logits as a part of their own deviation, that is
#: rounding: in fp32, and in arithmetic that is less exact (bf16, TF32).
_EXACT: Final = (1e-4, 1e-3)
_ROUNDED: Final = (2e-2, 5e-2)


def check(
    trained: WithLoss,
    *,
    device: torch.device,
    isolates: bool,
    is_exact: bool,
) -> None:
    """Fail unless loss and attention of a model with weights are those of transformers.

    Every rank of a sharded model takes part. The model is in evaluation mode afterwards.

    Args:
        isolates: documents that are packed into a sequence must not see each other.
        is_exact: the model computes in fp32.

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
        positions = torch.arange(_LENGTH, device=device).repeat(2)
        tokens = torch.cat([first, second, first[:1]])[None]
        check_documents(trained, (tokens, positions[None], tokens[:, 1:]), is_exact=is_exact)


def check_documents(trained: WithLoss, inputs: Sequence[Tensor | None], *, is_exact: bool) -> None:
    """Fail unless a model computes of documents of a pass what it computes of each alone.

    Every rank of a sharded model takes part, with the same pass. The model is in evaluation mode
    afterwards. Inputs of the output embedding are compared: where they are equal, so are the losses
    of the tokens. A router's loss is left out, because it is that of a pass, whose documents it
    weighs together, in transformers too.

    Args:
        inputs: of the pass, the arguments of ``WithLoss``.

    Raises:
        InputError: it does not; it names the kind of model and the difference.
    """
    of: Any = trained.model
    tokens, positions, labels = inputs
    assert tokens is not None
    assert labels is not None
    trained.eval()
    begin = time.monotonic()
    reason, limit, measure = "", _EXACT[1], _difference
    if not is_exact:
        # Where rounding lets a few tokens choose other experts, it is no more than a few.
        limit, measure = _ROUNDED[1], _usual_difference
    # With random weights they show too little of what they do.
    if positions is not None and any(isinstance(each, nn.Conv1d) for each in trained.modules()):
        reason = "their convolutions reach back"
    try:
        with torch.no_grad():
            together = trained.features(tokens[:, :-1], positions)
            for row, first, end in [*_documents(positions, labels)][:_NUM_DOCUMENTS]:
                alone = trained.features(tokens[[row], first:end])
                found = measure(together[[row], first:end], alone)
                if not found <= limit:
                    reason = f"one beside others differs by {found:.1%} from itself alone"
                is_late = torch.tensor(time.monotonic() - begin > _MAX_S, device=tokens.device)
                if dist.is_initialized():  # all ranks stop together
                    dist.broadcast(is_late, src=0)
                if reason or is_late:
                    break
    except TypeError:
        reason = "their attention takes no positions"
    if reason:
        raise InputError(
            f"packing does not keep documents apart in models of type {of.config.model_type!r} "
            f"({reason}): leave --isolate-documents out, give --no-packing for conversations, or "
            "choose another model"
        )


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


def _usual_difference(one: Tensor, other: Tensor) -> float:
    """Median over the tokens of what two of them differ by, as a part of their size."""
    apart = (one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-12)
    return float(apart.median())
