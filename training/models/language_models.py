"""Causal language models of transformers: built without weights, sharded, and given a loss.

A model is made on the meta device, sharded there, and only then given memory and filled
(``training.models.model_weights``). Its own loss is not used, because that stores the logits.
"""

import functools
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from contract.errors import InputError
from training.loop.losses import IGNORE, Bend, linear_cross_entropy
from training.models.estimates import logit_tokens
from training.models.nf4 import PackedLinear, num_weights
from training.models.replicas import keep_shapes_exact
from training.system import devices

#: What the name of each weight of an expert has in it, in transformers.
_EXPERTS: Final = ".experts."
#: Keys of ``config.json`` for terms of the loss that transformers does not compute.
_OF_OTHER_LOSSES: Final = (
    *("aux_loss_alpha", "aux_loss_coef", "moe_loss_weight", "router_z_loss_coef"),
    *("z_loss_coefficient", "z_loss_coef", "z_loss_weight", "label_smoothing"),
    *("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
)
_aten: Final = torch.ops.aten
# What selective recomputation keeps: all that takes more than a pass over memory.
_KEPT: Final = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


#: Kinds of devices on which blocks are compiled.
COMPILED: Final = ("cuda",)


class WithLoss(nn.Module):
    """A model whose call is its loss: what DDP and FSDP2 must see of a step passes through here.

    The model's own forward runs, but its output embedding only notes what it is given, and the
    loss is computed from that without storing logits. What the model does with the products of its
    output embedding, such as scaling them, is found out in the first pass; whether that is all is
    for ``training.models.agreement`` to find out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        #: What the model computes in, where that is not the type of its weights (``shard``).
        self.autocast: torch.dtype | None = None
        self.compiles = False
        """Compile what the loss does with logits (``compile_parts``)."""
        self._bend: Bend | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        last: Tensor | None = None,
        divisor: float = 0.0,
        plain: bool = False,
    ) -> Tensor:
        """Mean loss, in nats per token, of predicting each token from those before it.

        Args:
            tokens: ids ``[num_sequences, seq_len + 1]``: inputs and labels overlap in all but one.
            positions: of the inputs within their documents, ``[num_sequences, seq_len]``;
                attention then stays within a document. Without them it reaches over the whole
                sequence.
            labels: ``[num_sequences, seq_len]``, ids, or ``losses.IGNORE`` where nothing is
                learned: the loss is the mean over the others. Without them all tokens are learned.
            last: place of the last token of each sequence, ``[num_sequences]``: return the logits
                of the token after it instead, ``[num_sequences, vocab]`` in fp32; ``tokens`` are
                then only inputs.
            divisor: divide the summed loss by this instead (0: the mean).
            plain: leave out what the router of a mixture adds to the loss.

        Raises:
            InputError: this kind of model computes its logits in a way that is not known here.
        """
        hidden, bend, found = self._run(tokens[:, :-1] if last is None else tokens, positions)
        if last is not None:
            rows = torch.arange(len(hidden), device=hidden.device)
            head = self._head()
            bias = None if head.bias is None else head.bias.to(hidden.dtype)
            return bend(F.linear(hidden[rows, last], head.weight.to(hidden.dtype), bias).float())
        labels = tokens[:, 1:] if labels is None else labels
        loss = self._loss(hidden, bend, labels, divisor)
        extra = getattr(found, "aux_loss", None)
        if plain or not isinstance(extra, Tensor):
            return loss
        # Of this pass, as in transformers; the passes of a step count by their labels.
        share = (labels != IGNORE).sum() / divisor if divisor else 1.0
        return loss + extra.to(loss) * share * router_coefficient(self.model)

    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Input of the output embedding, ``[num_sequences, seq_len, width]``."""
        return self._run(tokens, positions)[0].float()

    def compare(self, tokens: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss as ``forward`` has it, and the logits that the model itself computes in the same
        pass, ``[num_sequences, seq_len, vocab]`` in fp32. They are stored: for a few tokens."""
        hidden, bend, found = self._run(tokens[:, :-1], positions, with_logits=True)
        return self._loss(hidden, bend, tokens[:, 1:]), found.logits[:, :-1].float()

    def _loss(self, hidden: Tensor, bend: Bend, labels: Tensor, divisor: float = 0.0) -> Tensor:
        head, flat = self._head(), hidden.flatten(0, 1)
        weight = head.weight.to(flat.dtype)
        bias = None if head.bias is None else head.bias.to(flat.dtype)
        # Compiled, nothing of a chunk is in fp32: twice as many tokens take as much memory.
        is_narrow = self.compiles and flat.element_size() == 2
        return linear_cross_entropy(
            flat,
            weight,
            labels.flatten(),
            bias=bias,
            bend=bend,
            chunk_tokens=logit_tokens(len(weight)) * (2 if is_narrow else 1),
            divisor=divisor,
            compiles=self.compiles,
        )

    def _head(self) -> Any:
        of: Any = self.model  # transformers' own method
        return of.get_output_embeddings()

    def _run(
        self, inputs: Tensor, positions: Tensor | None, *, with_logits: bool = False
    ) -> tuple[Tensor, Bend, Any]:
        """Input of the output embedding, the ``Bend`` that turns its products into logits, and what
        the model returned, whose last logits are those of a probe."""
        head = self._head()
        own = head.forward
        captured: list[Tensor] = []
        probe = _probe(head.weight)

        def noting(hidden: Tensor) -> Tensor:
            captured.append(hidden)
            if not with_logits:
                return probe
            products = own(hidden)
            return torch.cat([products.float(), probe.expand(len(products), 1, -1)], dim=1)

        head.forward = noting
        arguments = {} if positions is None else {"position_ids": positions}
        try:
            with self._arithmetic(inputs.device), _packing_known(positions is not None):
                returned = self.model(input_ids=inputs, **arguments)
        finally:
            head.forward = own
        logits: Tensor = returned.logits
        if self._bend is None:
            found = None
            if len(captured) == 1 and logits.shape[-1] == probe.shape[-1]:
                found = _fit(probe.flatten(), logits[0, -1].float())
            if found is None:
                raise InputError(
                    f"{type(self.model).__name__} computes its logits in a way that is not known "
                    "here: choose another model"
                )
            self._bend = found
        hidden = captured[0] if self.autocast is None else captured[0].to(self.autocast)
        return hidden, self._bend, returned

    def _arithmetic(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)


@contextmanager
def _packing_known(is_packed: bool) -> Iterator[None]:
    """Keep transformers from reading positions on the device to find out whether documents are
    packed, for which the host would wait in each pass."""
    from transformers import masking_utils as masks

    def documents(position_ids: Tensor) -> Tensor | None:
        return torch.cumsum(position_ids == 0, dim=-1) if is_packed else None

    own = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = documents
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = own


def _probe(weight: Tensor) -> Tensor:
    """Stands for the products of an output embedding, ``[1, 1, vocab]`` in fp32: from a value so
    small that nothing bends it to one so large that a cap is all that is left of it."""
    size = torch.logspace(-3, 4, len(weight), device=weight.device)
    return size.view(1, 1, -1)


def _fit(products: Tensor, logits: Tensor) -> Bend | None:
    """The bend that makes ``logits`` of the ``products`` of a probe, if there is one."""
    scale, largest = (logits[0] / products[0]).item(), logits[-1].item()
    is_capped = abs(largest - scale * products[-1].item()) > 1e-3 * abs(largest)
    found = Bend(scale=1.0 if abs(scale - 1) < 1e-5 else scale, cap=largest if is_capped else 0.0)
    is_it = torch.allclose(found(products), logits, rtol=1e-4, atol=0)
    return found if is_it else None


def build_on_meta(config: Any) -> nn.Module:
    """A causal language model of a transformers configuration, without memory for its weights.

    Its weights are fp32, whatever the configuration says, which is the type of the files: an update
    of a bf16 weight at a usual learning rate rounds to nothing.

    Raises:
        InputError: transformers has no causal language model of that kind, or none of these sizes.
    """
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    try:
        with torch.device("meta"):
            # A copy: transformers notes the type of the model in the configuration.
            model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                deepcopy(config), dtype=torch.float32
            )
    except Exception as error:  # of a configuration that lacks or mistakes something, any
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise InputError(
            f"transformers cannot build a causal language model of type {config.model_type!r} "
            f"({reason}): choose another model, or compare its config.json with a published one"
        ) from None
    return model


def blocks(model: nn.Module) -> nn.ModuleList:
    """The stack of transformer blocks, which are sharded, and recomputed, one at a time."""
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    if not stacks:
        raise InputError(
            f"{type(model).__name__} has no stack of blocks to shard: choose another model"
        )
    return max(stacks, key=lambda each: sum(p.numel() for p in each.parameters()))


def matrices(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of each matrix of the blocks that is multiplied as a whole: candidates for
    adapters. The matrices of adapters themselves are not included."""
    from transformers.pytorch_utils import Conv1D

    return [
        (name.removesuffix(".base_layer"), module)
        for name, module in blocks(model).named_modules()
        if isinstance(module, nn.Linear | Conv1D | PackedLinear) and "lora_" not in name
    ]


def state_space_layers(model: nn.Module) -> set[str]:
    """Names, within the blocks, of the layers of a state-space model, such as Mamba. They read some
    of their weights instead of calling the matrices; linear attention calls them, and has no D."""
    return {
        name
        for name, layer in blocks(model).named_modules()
        if hasattr(layer, "conv1d") and hasattr(layer, "D")
    }


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, shared ones counted once."""
    return sum(num_weights(parameter) for parameter in model.parameters())


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Floating-point operations of one forward and backward pass, per token.

    Six per parameter that multiplies, four where it is frozen and has no gradient, and the
    products of attention, which no parameter stands for: 12 per block, position and width (PaLM,
    appendix B). The input embedding is looked up and not multiplied, and of experts a token passes
    through those that are chosen for it. Recomputation is not counted: it is no progress.
    """
    of: Any = model  # transformers' own methods
    looked_up, output = of.get_input_embeddings().weight, of.get_output_embeddings().weight
    idle = idle_part(of.config)
    products = sum(
        (6 if parameter.requires_grad else 4)
        * num_weights(parameter)
        * (1 - idle * (_EXPERTS in name))
        for name, parameter in model.named_parameters()
        if parameter is not looked_up or output is looked_up
    )
    width = attention_width(of.config)
    return float(products + 12 * int(of.config.num_hidden_layers) * width * seq_len)


def attention_width(config: Any) -> int:
    """Width of all attention heads of a block together."""
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    return int(heads * head_dim if heads and head_dim else config.hidden_size)


def idle_part(config: Any) -> float:
    """Part of the experts of a block that is not chosen for a token."""
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    num = num_experts(config)
    return 1 - chosen / num if chosen and num else 0.0


def num_experts(config: Any) -> int:
    """Experts of a block; 0 without any."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(each) for name in names if (each := getattr(config, name, None))), 0)


def router_coefficient(model: Any) -> float:
    """Weight of what the router of a mixture adds to the loss; 0 where ``config.json`` leaves it
    out, as transformers does."""
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    return float(getattr(model, "router_aux_loss_coef", 0.0))


def of_the_loss(model: Any) -> list[str]:
    """Sentences on the keys of a model's ``config.json`` that change its loss."""
    notes = []
    if weight := router_coefficient(model):
        notes.append(
            f"the loss has {weight:g} times the router's load-balancing term, as config.json wants "
            "(output_router_logits): it is that of a pass, and depends on --microbatch"
        )
    if unused := [key for key in _OF_OTHER_LOSSES if getattr(model.config, key, None)]:
        notes.append(
            f"keys of config.json that add to the loss elsewhere, and not here: {', '.join(unused)}"
        )
    return notes


def short_length(config: Any) -> int:
    """Length beyond which one document changes the rope of all documents of a pass (LongRoPE and
    dynamic NTK, of which transformers computes one for a pass); 0 without such a border."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    border = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    key = border.get(rope.get("rope_type", ""), "")
    return int(rope.get(key) or getattr(config, key, 0) or 0)


def compile_parts(trained: WithLoss) -> str:
    """Compile each block, and the loss, when it is first used; what torch cannot compile runs as it
    is. Return what to tell the user."""
    if not devices.has_compiler():
        return "there is no C compiler here, which torch.compile needs: training is slower"
    torch._dynamo.config.suppress_errors = True
    keep_shapes_exact()
    for block in blocks(trained.model):
        block.compile()
    trained.compiles = True
    return "the blocks are compiled in the first step, which takes some minutes"


def recompute(model: nn.Module, mode: str) -> None:
    """Compute activations again in backward instead of keeping them.

    Args:
        mode: ``none``; ``selective``, which keeps what matrix products and attention give and
            makes the cheap rest again; or ``full``, which keeps only each block's input.
    """
    if mode == "none":
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [*_KEPT])
    of: Any = model  # transformers' own method
    of.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)


def shard(
    trained: WithLoss,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    reduce_bf16: bool = False,
) -> None:
    """Shard a model block by block over ``mesh``, so that only one block is ever whole.

    Embeddings that are not tied are shards of their own: the input embedding is whole while tokens
    are looked up, and its backward pass needs no weights; the output embedding from the loss until
    its gradient is reduced, beside the blocks' backward passes.

    One process has nothing to share: its weights stay as they are, and what FSDP would do at each
    block is left out, which a small model would wait for longer than for its GPU.

    Args:
        mesh: one dimension of all processes.
        bf16: compute in bf16; what is kept is fp32 either way.
        reduce_bf16: reduce gradients in bf16 and not in fp32, which sends half.
    """
    of: Any = trained.model  # transformers' own methods
    first, last = of.get_input_embeddings(), of.get_output_embeddings()
    if mesh.size() == 1:
        if bf16:
            trained.autocast = torch.bfloat16
            # What goes from block to block, too, as with FSDP: autocast alone leaves it in fp32.
            first.register_forward_hook(_in_bf16)
        return
    settings: Any = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.bfloat16 if reduce_bf16 else torch.float32,
        ),
    }
    stack: list[Any] = [*blocks(trained.model)]
    for block in stack:
        fully_shard(block, **settings)
    # Ask for the next block while this one computes, and not only once it is due.
    for block, after in pairwise(stack):
        block.set_modules_to_forward_prefetch([after])
    for block, before in pairwise(reversed(stack)):
        block.set_modules_to_backward_prefetch([before])
    if first.weight is not last.weight:
        fully_shard(first, **settings)
        first.set_unshard_in_backward(False)
        first.set_modules_to_forward_prefetch(stack[:1])
        # The loss takes its weights after it has been called.
        fully_shard(last, **settings, reshard_after_forward=False)
        stack[-1].set_modules_to_forward_prefetch([last])
    fully_shard(trained, **settings)  # last: takes what the others left over
    for method in ("compare", "features"):
        register_fsdp_forward_method(trained, method)


def _in_bf16(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


def stay_whole(trained: Any, *, weights: bool, gradients: bool) -> None:
    """Decide whether a sharded model's weights and gradients stay whole after its next pass."""
    trained.set_reshard_after_forward(False)
    trained.set_reshard_after_backward(not weights)
    trained.set_requires_gradient_sync(not gradients)


def reshard(trained: nn.Module) -> None:
    """Free the weights that stay whole after a pass without gradients."""
    for module in trained.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def generate(
    trained: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    num: int,
    seed: int,
    stops: Sequence[int] = (),
    greedy: bool = False,
    device: torch.device,
) -> list[list[int]]:
    """Continue each prompt by ``num`` tokens drawn from the model's own distribution.

    All prompts are one batch: shorter ones are padded at their end, which no token before sees.

    Args:
        trained: a ``WithLoss``; where it is sharded, every rank calls this and gets the same.
        prompts: ids.
        seed: of the draws.
        stops: ids of which each ends a continuation: once all have one, no more is drawn.
        greedy: take the likeliest token instead of drawing one.

    Returns:
        The ids that follow each prompt, ``num`` or fewer where all have ended. Each is a pass over
        all so far: for samples, not for serving.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training = trained.training
    trained.eval()
    lengths = [len(each) for each in prompts]
    longest = max(lengths)
    tokens = torch.tensor(
        [[*each, *[0] * (longest - len(each))] for each in prompts], device=device
    )
    last = torch.tensor(lengths, device=device) - 1
    ended = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    ends = torch.tensor(stops, device=device)
    num_drawn = 0
    # Compiled for these few tokens, the blocks would be compiled for any length from then on.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        while num_drawn < num and not ended.all():
            # A model that has diverged continues a text with anything.
            logits = trained(tokens, last=last).float().cpu().nan_to_num()
            if greedy:
                drawn = logits.argmax(dim=1, keepdim=True)
            else:
                drawn = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)
            drawn = drawn.to(device)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(drawn, src=0)  # hosts may round differently
            last, num_drawn = last + 1, num_drawn + 1
            tokens = F.pad(tokens, (0, 1)).scatter(1, last[:, None], drawn)
            ended |= torch.isin(drawn[:, 0], ends)
    trained.train(was_training)
    return [
        each[length : length + num_drawn]
        for each, length in zip(tokens.tolist(), lengths, strict=True)
    ]


def keep_in_bf16(model: nn.Module, *, only_frozen: bool) -> None:
    """Keep weights in bf16, for a model that computes in it: those that are not trained, because no
    update needs more, or all. The model is on the meta device, without memory yet."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not (only_frozen and parameter.requires_grad):
            parameter.data = parameter.data.to(torch.bfloat16)


def local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
    return part
