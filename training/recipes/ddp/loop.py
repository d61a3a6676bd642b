"""DDP recipe: ResNet18 on small images, the whole model on every worker.

Use it when model, gradients and optimizer fit on one GPU; it communicates least then. To step
through it on a laptop, without AWS and without a GPU:

    python -m training.launch ddp --local                    (under Ray Train)
    torchrun --standalone --nproc-per-node 2 -m training.launch -- ddp    (without Ray)

``train`` below is the whole recipe. It may be restarted at any step and on any number of workers:
the batch of step N depends only on N and the seed (see ``training.data.images``).
"""

import base64
import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from contract.errors import InputError
from training import machine, metrics
from training.checkpoint import checkpoints
from training.checkpoint.timetable import Timetable
from training.data import images
from training.models import classifiers as models
from training.models import replicas
from training.recipes.ddp.settings import DdpConfig
from training.record.events import Evaluating, Finished, Stopped, phase
from training.record.result import Classification, ImageSample
from training.schedule import warmup_cosine
from training.worker import Worker

_EVALUATION_BATCH = 500
_NUM_SAMPLES = 36


def train(worker: Worker, config: DdpConfig) -> None:
    """Train until the last epoch, or until the run is asked to stop; continues what is there."""
    rank, world_size, device = worker.rank, worker.world_size, worker.device
    on_gpu = device.type == "cuda"
    use_bf16 = config.precision == "bf16" or (config.precision == "auto" and on_gpu)
    torch.manual_seed(config.seed)
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True

    image_set = images.load(config.data)
    train_set = images.DeviceImages.train_split(image_set, device, border=config.shift)
    test_set = images.DeviceImages.test_split(image_set, device)
    order = images.BatchOrder(
        num_images=len(train_set), global_batch=config.images_per_step, seed=config.seed
    )
    if order.smallest_batch < 2 * world_size:
        raise InputError(
            f"{config.data} is too small for {world_size} workers: a step of "
            f"{order.smallest_batch} images leaves a worker with fewer than two; use fewer workers"
        )
    total_steps = config.num_steps(order.steps_per_epoch)

    model = models.resnet18(stem=config.stem, width=config.width)
    num_parameters = models.num_parameters(model)
    # At 28 x 28, 62.2 % of this model's gradient elements are always zero: do not send them. With
    # the small stem there are none.
    keep_all = config.layout == "full"
    cut = {} if keep_all else models.keep_live_taps(model, image_size=images.IMAGE_SIZE)
    course = metrics.Course(
        items="images",
        items_per_step=order.global_batch,
        global_batch=order.global_batch,
        steps_per_epoch=order.steps_per_epoch,
        total_steps=total_steps,
        learning_rate=lambda step: learning_rate(config, step, total_steps),
        # Backward costs twice the forward pass.
        flops_per_item=3 * models.forward_flops(model, image_size=images.IMAGE_SIZE),
        world_size=world_size,
        device=device,
    )
    model.to(device)
    if on_gpu:
        models.channels_last(model)
    optimizer = build_optimizer(model, config, device)

    position = checkpoints.Position()
    snapshot = checkpoints.shared_newest(worker)
    if snapshot is not None:
        snapshot.check_data(image_set.fingerprint, run=config.run, data=config.data)
        checkpoints.apply(snapshot, model, optimizer, cut=cut)
        position = snapshot.position
    start_step = position.step

    worker.emit(phase("model_ready"))
    replica = replicas.distribute(
        model, compression=config.gradient_compression, bucket_mb=config.bucket_mb
    )
    forward: nn.Module = replica
    if config.compile:
        machine.check_compiler("--compile")
        forward = cast("nn.Module", torch.compile(replica))
    resumed = snapshot is not None
    worker.emit(
        course.start(
            model, step=start_step, resumed=resumed, parameters=num_parameters, bf16=use_bf16
        )
    )

    phases = ("data", "forward", "backward", "optimizer")
    timer = metrics.StepTimer(phases, device)
    log = metrics.StepLog(device)
    clock = metrics.Clock(earlier_s=position.seconds)
    timetable = Timetable(config.checkpoint_minutes)
    evaluation: Evaluation | None = None
    model.train()
    for step in range(start_step, total_steps):
        timer.start()
        for group in optimizer.param_groups:
            group["lr"] = course.learning_rate(step)
        pixels, labels, size = _batch(train_set, order, config, step, worker)
        timer.mark("data")

        with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
            logits = forward(pixels).logits
        loss_sum = F.cross_entropy(
            logits.float(), labels, reduction="sum", label_smoothing=config.label_smoothing
        )
        timer.mark("forward")

        # DDP averages gradients over the workers, whose shares may differ by an image: this
        # gives every image of the global batch the same weight.
        (loss_sum * (world_size / size)).backward()
        timer.mark("backward")

        limit = config.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.add(loss_sum=loss_sum, norm=norm, size=size)
        timer.mark("optimizer", items=len(labels))

        num_done = step + 1
        epoch = step // order.steps_per_epoch + 1
        end_of_epoch = num_done % order.steps_per_epoch == 0
        last = num_done == total_steps
        evaluates = end_of_epoch or last
        if not evaluates and num_done % config.report_every:
            continue

        # One small reduction per report: the losses since the last one, and whether any worker
        # was asked to stop or has a checkpoint due, so that all of them do so at the same step.
        steps, stopping = log.collect(stop=worker.stop_requested(), save=timetable.is_due())
        # Checked before every save, so a diverged model never becomes a checkpoint.
        checkpoints.stop_if_diverged(steps, num_done - len(steps) + 1, lr=config.lr, worker=worker)
        position.advance(num_done, steps)
        worker.emit(*course.steps(steps, last=num_done))

        # With a node about to go, every report is saved: what is lost is what comes after it.
        saves_now = worker.is_losing_a_node() or log.save_asked
        due = last or saves_now or (end_of_epoch and epoch % config.checkpoint_every_epochs == 0)
        if evaluates or stopping or saves_now:
            replicas.average_over_workers(model.buffers(), world_size)
        if evaluates:
            done = epoch if end_of_epoch else num_done / order.steps_per_epoch
            ranks = course.ranks(timer.means(), step=num_done, epoch=done)
            worker.emit(Evaluating())
            evaluation = evaluate(model, test_set, worker=worker, use_bf16=use_bf16)
            evaluated = course.evaluation(
                ranks,
                loss=evaluation.loss,
                measures={"accuracy": evaluation.accuracy},
                train_loss=position.take_train_loss(),
                seconds=clock.seconds(),
                memory_bytes=metrics.peak_memory(device) if on_gpu else None,
            )
            worker.emit(*ranks, evaluated)
        if due or stopping:
            timetable.saved()
            position.seconds = clock.seconds()
            if rank == 0:
                snapshot = checkpoints.take_snapshot(
                    model,
                    optimizer,
                    cut=cut,
                    position=position,
                    config=config.to_json(),
                    data=image_set.fingerprint,
                )
            checkpoints.save_in_background(worker, snapshot, keep=config.checkpoints_to_keep)
        if stopping and not last:
            worker.finish_saves(retry=True)
            worker.emit(Stopped(step=num_done))
            return

    if evaluation is None:  # resumed after the last step was saved and before the end was noted
        evaluation = evaluate(model, test_set, worker=worker, use_bf16=use_bf16)
    worker.finish_saves(retry=True)
    if rank == 0:
        assert snapshot is not None
        checkpoints.publish_model(worker.run_uri, snapshot)
        worker.emit(
            Finished(
                step=total_steps,
                loss=evaluation.loss,
                measures={"accuracy": evaluation.accuracy},
                seconds=clock.seconds(),
                evaluation=describe(evaluation, image_set),
            )
        )


def learning_rate(config: DdpConfig, step: int, total_steps: int) -> float:
    """Learning rate of ``step`` (counted from 0)."""
    if config.schedule == "constant":
        return config.lr
    return warmup_cosine(step, total_steps, peak=config.lr, warmup_fraction=config.warmup_fraction)


def build_optimizer(
    model: nn.Module, config: DdpConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Adam; weight decay, where there is any, spares biases and normalisation."""
    groups = replicas.decay_groups(model, config.weight_decay)
    fused = device.type in ("cuda", "cpu")  # one kernel over all parameters: 2-3x on both
    return torch.optim.AdamW(groups, lr=config.lr, fused=fused)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result over the whole test split."""

    loss: float
    accuracy: float
    predictions: torch.Tensor
    """int64 ``[num]`` on the host."""
    confidences: torch.Tensor
    """Probability of each prediction, float32 ``[num]`` on the host."""


def evaluate(
    model: nn.Module, test_set: images.DeviceImages, *, worker: Worker, use_bf16: bool
) -> Evaluation:
    """Evaluate every test image once, each worker its part; all get the exact same result."""
    num, device = len(test_set), worker.device
    first, end = images.shard_bounds(num, rank=worker.rank, world_size=worker.world_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    predictions = torch.zeros(num, dtype=torch.int64, device=device)
    confidences = torch.zeros(num, device=device)
    num_correct = torch.zeros((), dtype=torch.int64, device=device)
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
        for start in range(first, end, _EVALUATION_BATCH):
            part = slice(start, min(start + _EVALUATION_BATCH, end))
            pixels, labels = test_set.batch(torch.arange(part.start, part.stop))
            logits = model(pixels).logits.float()
            loss_sum += F.cross_entropy(logits, labels, reduction="sum")
            confidences[part], predictions[part] = logits.softmax(dim=1).max(dim=1)
            num_correct += (predictions[part] == labels).sum()
    model.train()
    for part_of_all in (loss_sum, num_correct, predictions, confidences):
        dist.all_reduce(part_of_all)  # the others' parts are zeros here
    return Evaluation(
        loss=loss_sum.item() / num,
        accuracy=num_correct.item() / num,
        predictions=predictions.cpu(),
        confidences=confidences.cpu(),
    )


def describe(evaluation: Evaluation, image_set: images.ImageSet) -> Classification:
    """What the report shows of the test split: the confusion matrix and some predictions, the
    most confident mistakes first, then others at even distances."""
    labels = torch.tensor(image_set.test_labels, dtype=torch.int64)
    predictions = evaluation.predictions
    num_classes = images.NUM_CLASSES
    counts = torch.bincount(labels * num_classes + predictions, minlength=num_classes**2)

    wrong = (predictions != labels).nonzero().flatten()
    worst = wrong[evaluation.confidences[wrong].argsort(descending=True)]
    chosen = worst[: _NUM_SAMPLES // 2].tolist()
    right = (predictions == labels).nonzero().flatten()
    stride = max(1, len(right) // (_NUM_SAMPLES - len(chosen)))
    chosen += right[::stride][: _NUM_SAMPLES - len(chosen)].tolist()
    return Classification(
        class_names=tuple(image_set.class_names),
        confusion_matrix=tuple(map(tuple, counts.view(num_classes, num_classes).tolist())),
        samples=tuple(
            ImageSample(
                index=i,
                label=int(labels[i]),
                prediction=int(predictions[i]),
                confidence=float(evaluation.confidences[i]),
                pixels=base64.b64encode(image_set.test_images[i].tobytes()).decode(),
                height=images.IMAGE_SIZE,
                width=images.IMAGE_SIZE,
            )
            for i in chosen
        ),
    )


def _batch(
    train_set: images.DeviceImages,
    order: images.BatchOrder,
    config: DdpConfig,
    step: int,
    worker: Worker,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This worker's part of the batch of ``step``, and the size of the whole batch."""
    indices = order.indices(step)
    first, end = images.shard_bounds(len(indices), rank=worker.rank, world_size=worker.world_size)
    if not (config.flip or config.shift or config.cutout):
        return *train_set.batch(indices[first:end]), len(indices)
    shifts, mirrored = images.augmentation(
        seed=config.seed, step=step, num=len(indices), shift=config.shift, flip=config.flip
    )
    if step >= config.shift_fraction * config.epochs * order.steps_per_epoch:
        shifts.fill_(config.shift)  # the centre
    pixels, labels = train_set.augmented(
        indices[first:end], shifts=shifts[:, first:end], mirrored=mirrored[first:end]
    )
    if config.cutout:
        centers = images.cutout_centers(seed=config.seed, step=step, num=len(indices))
        pixels = images.cut_out(pixels, centers[:, first:end], size=config.cutout)
    return pixels, labels, len(indices)
