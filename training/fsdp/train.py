"""FSDP2 recipe: a causal language model, sharded over all workers, trained on tokens.

Use it when model plus optimizer do not fit on one GPU, or for any language model;
``training.ddp`` is for models that fit whole. To step through it on a laptop, without AWS
and without a GPU:

    python -m training.launch fsdp --local                    (under Ray Train)
    torchrun --standalone --nproc-per-node 2 -m training.launch -- fsdp    (without Ray)

``train`` below is the algorithm; what follows each step is in ``training.bookkeeping``. A
run may be restarted at any step and on any number of workers: the batch of step N depends only on N
and the seed (see ``training.data.feed``).
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from contract.errors import InputError
from training.bookkeeping import Bookkeeping, check_longer
from training.checkpoint import checkpoints, sharded_checkpoints
from training.data.feed import Feed, feed_of
from training.data.rows import TokenStore
from training.fsdp import estimate, inputs
from training.fsdp.held_out import HeldOut
from training.fsdp.model import build, describe, fill
from training.fsdp.passes import ahead, on_device
from training.fsdp.settings import FsdpConfig
from training.loop import metrics, optimizers
from training.loop.compiled import CompiledCode
from training.loop.worker import Worker, displayed, uses_bf16
from training.models import agreement, language_models, model_weights, pretrained
from training.models.language_models import WithLoss
from training.record.events import Evaluation, Loaded, Noted, Sample, Warned, phase

_NUM_PROMPTS: Final = 3
_PROMPT_TOKENS: Final = 16


def train(worker: Worker, config: FsdpConfig) -> None:
    """Train until the last step, or until the run is asked to stop; resume an earlier attempt."""
    try:
        _train(worker, config)
    except torch.OutOfMemoryError as error:
        # Rebuild the model as it was before adapters, which takes none of the GPU's memory.
        model_config = pretrained.model_config(config.model, runs=config.storage)
        advice = estimate.advice(config, language_models.build_on_meta(model_config))
        raise checkpoints.out_of_memory(error, worker, advice=advice) from None


def _train(worker: Worker, config: FsdpConfig) -> None:
    rank, world_size, device = worker.rank, worker.world_size, worker.device
    on_gpu = device.type == "cuda"
    # Fewer workers than were asked for take more passes, and no more memory for each.
    config = replace(config, num_workers=world_size)
    use_bf16 = uses_bf16(config.precision, device)
    if on_gpu:
        torch.set_float32_matmul_precision("high")

    # Data
    store = inputs.store_of(config)
    feed = _feed(store, config)
    worker.emit(*(Warned(message=each) for each in feed.notes))
    total_steps = config.num_steps(feed.steps_per_epoch)
    held_out = HeldOut(feed, store, config)

    # Model, on the meta device: each process fills its own shards only
    model, model_config, notes = build(config, store)
    keeps_whole = _keeps_whole(worker, model_config, config)
    mesh = init_device_mesh(device.type, (world_size,))
    if use_bf16:
        language_models.keep_in_bf16(model, only_frozen=True)
    language_models.recompute(model, config.recompute)
    trained = WithLoss(model)
    # Experts have other shapes in each step.
    is_static = not language_models.num_experts(model_config)
    if config.compile and is_static and device.type in language_models.COMPILED:
        worker.emit(Noted(message=language_models.compile_parts(trained)))
    language_models.shard(
        trained,
        mesh,
        bf16=use_bf16,
        reduce_bf16=config.reduce_dtype == "bf16",
    )
    model_weights.allocate(model, device)
    notes += fill(model, config)
    worker.emit(*(Warned(message=each) for each in notes))
    is_exact = not (use_bf16 or on_gpu)
    # Compiled for its few tokens first, the blocks would be compiled for any length afterwards.
    with torch.compiler.set_stance("force_eager"):
        agreement.check(
            trained,
            device=device,
            isolates=feed.isolates,
            is_exact=is_exact,
        )
    language_models.reshard(trained)

    # Optimizer
    optimizer = optimizers.build(
        model,
        config.optimizer,
        lr=config.lr,
        weight_decay=config.weight_decay,
        device=device,
    )
    course = metrics.Course(
        items="tokens",
        items_per_step=round(feed.tokens_per_step),
        global_batch=config.global_batch,
        steps_per_epoch=feed.steps_per_epoch,
        total_steps=total_steps,
        learning_rate=lambda step: learning_rate(config, step, total_steps),
        flops_per_item=displayed(
            worker, "MFU", partial(language_models.flops_per_token, model, config.seq_len)
        ),
        world_size=world_size,
        device=device,
    )

    # Resume
    saver = sharded_checkpoints.ShardedSaver(
        worker,
        model,
        optimizer,
        files=describe(config, model_config, store),
        settings=config.to_json(),
        keep=config.checkpoints_to_keep,
    )
    position = saver.resume(from_scratch=config.from_scratch)
    check_longer(config, saver.recorded, position, feed.steps_per_epoch)
    start_step = position.step
    _check_first(trained, feed, device, step=start_step, is_exact=is_exact)

    def sample() -> None:
        _sample(trained, store, config, worker, step=position.step)

    # Evaluate before the first step, with what an earlier start has compiled
    compiled = CompiledCode(worker, config.to_json())
    worker.emit(phase("model_ready"))
    num_parameters = language_models.num_parameters(model)
    worker.emit(course.start(model, step=start_step, parameters=num_parameters, bf16=use_bf16))
    score = held_out.evaluate(trained, worker)
    if start_step:
        worker.emit(Loaded(step=start_step, loss=score.loss))
    else:
        worker.emit(Evaluation(step=0, epoch=0, loss=score.loss, measures=score.measures))
        displayed(worker, "a sample", sample)

    books = Bookkeeping(
        worker,
        config,
        course,
        lr=config.lr,
        position=position,
        score=score,
        evaluate_every=config.steps_between_evaluations(total_steps, feed.steps_per_epoch),
        evaluate=partial(held_out.evaluate, trained, worker),
        save_every=config.checkpoint_every or config.evaluate_every or feed.steps_per_epoch,
        prepare=saver.prepare,
        compiled=compiled,
        save=saver.save,
        keep=saver.keep,
        num_bad_allowed=config.max_skipped_steps,
    )
    timer = books.timer
    trained.train()
    coming = ahead(feed, books.steps, worker, num_passes=config.num_microbatches)
    for step, made in zip(books.steps, coming, strict=True):
        torch.manual_seed(seed_of(config.seed, step, rank))
        with books.step(step):
            # Learning rate
            for group in optimizer.param_groups:
                group["lr"] = course.learning_rate(step)

            # This rank's part of the batch, in passes that fit into memory
            loss_sum = torch.zeros((), device=device)
            # Gradients are averaged over the workers, whose passes may have more or fewer tokens to
            # learn: this gives every such token of the step the same weight.
            divisor = made.num_labels / world_size
            for number, inputs_of_pass in enumerate(made.passes, start=1):
                if keeps_whole:
                    is_last = number == len(made.passes)
                    # Sums in bf16 would lose what each pass adds.
                    reduces = is_last or config.reduce_dtype == "bf16"
                    language_models.stay_whole(trained, weights=not is_last, gradients=not reduces)
                timer.mark("data")

                # Forward
                loss = trained(*inputs_of_pass, divisor=divisor)
                timer.mark("forward")

                # Backward
                loss.backward()
                loss_sum += loss.detach() * divisor
                timer.mark("backward")

            # Update, unless the loss or the gradient is not finite
            norm = clip(model, config.max_grad_norm)
            update(optimizer, loss_sum, norm, world_size=world_size)
            books.done(loss_sum=loss_sum, norm=norm, size=made.num_labels, items=made.num_tokens)

        # Report, save, evaluate
        if not books.after(step):
            break

    if books.steps and not books.is_stopped:
        displayed(worker, "a sample", sample)
    books.finish()


def _keeps_whole(worker: Worker, model_config: Any, config: FsdpConfig) -> bool:
    """True if all GPUs have memory left to keep weights and gradients whole between the passes of a
    step. Warn if the run does not fit its GPUs."""
    on_gpu = worker.device.type == "cuda"
    name = torch.cuda.get_device_name(worker.device) if on_gpu else ""
    fits = displayed(worker, "memory", partial(estimate.fit, model_config.to_dict(), config, name))
    tight, has_room = fits or ("", False)
    if tight:
        worker.emit(Warned(message=tight))
    return all(checkpoints.on_all_ranks(lambda: has_room))


def _check_first(
    trained: WithLoss, feed: Feed, device: torch.device, *, step: int, is_exact: bool
) -> None:
    """Compare documents of a new run's first batch with each alone, on all ranks the same."""
    if step:
        return
    with torch.compiler.set_stance("force_eager"):
        first = feed.train.batch(feed.sequences(0)[:2])
        agreement.check_documents(trained, on_device(first, device), is_exact=is_exact)
    language_models.reshard(trained)


def _feed(store: TokenStore, config: FsdpConfig) -> Feed:
    """Sequences of a run.

    Raises:
        InputError: they do not fill a step.
    """
    try:
        return feed_of(
            store,
            seq_len=config.seq_len,
            global_batch=config.global_batch,
            seed=config.seed,
            isolates=config.isolate_documents,
            packs=config.packing,
        )
    except InputError as error:
        raise InputError(f"{config.data}: {error}") from None


def seed_of(seed: int, step: int, rank: int) -> int:
    """Seed of dropout in a step, so that a resumed run draws the same; each rank draws its own."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63  # torch takes 64 bits


def learning_rate(config: FsdpConfig, step: int, total_steps: int) -> float:
    """Learning rate of ``step`` (counted from 0)."""
    return config.rate(step, total_steps, peak=config.lr, floor=0.1 * config.lr)


def clip(model: nn.Module, limit: float) -> Tensor:
    """Clip the gradients of all shards together; return their norm before, a scalar."""
    parameters = [each for each in model.parameters() if each.grad is not None]
    norm: Any = nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def update(
    optimizer: torch.optim.Optimizer, loss_sum: Tensor, norm: Tensor, *, world_size: int
) -> None:
    """Take the optimizer's step unless loss or gradient of any rank is no number, and drop the
    gradients. Fused AdamW looks at that on the device: the host does not wait.

    Args:
        loss_sum: of this rank, a scalar.
        norm: from ``clip``, a scalar.
    """
    total = loss_sum.clone()
    if world_size > 1:
        dist.all_reduce(total)
    is_bad = (~torch.stack([total, norm]).isfinite()).any().float()
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        optimizer.step()
    elif not is_bad:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _sample(
    trained: WithLoss,
    store: TokenStore,
    config: FsdpConfig,
    worker: Worker,
    *,
    step: int,
) -> None:
    """Let the model continue the first words of some held-out documents, or answer the questions
    of some conversations, and report it."""
    if not config.num_sampled:
        return
    of: Any = trained.model
    longest = getattr(of.config, "max_position_embeddings", None) or 2**20
    candidates = store.prompts(num=_NUM_PROMPTS, length=_PROMPT_TOKENS)
    prompts = [each for each in candidates if len(each) < longest]
    if not prompts:
        return
    try:
        continued = language_models.generate(
            trained,
            prompts,
            num=min(config.num_sampled, longest - max(map(len, prompts))),
            seed=config.seed,
            stops=store.info.stops,
            device=worker.device,
        )
    finally:
        language_models.reshard(trained)
    if worker.rank:
        return
    from tokenizers import Tokenizer

    path = pretrained.tokenizer_file(config.tokenizer, config.model, runs=config.storage)
    decode = Tokenizer.from_file(str(path)).decode
    for prompt, text in zip(prompts, continued, strict=True):
        worker.emit(Sample(step=step, prompt=decode(prompt), text=decode(text)))
