"""DDP recipe: ResNet18 (or a small network) on small images, the whole model on every worker.

Use it when model, gradients and optimizer fit on one GPU; it communicates least then. To step
through it on a laptop, without AWS and without a GPU:

    python -m training.launch ddp --local                    (under Ray Train)
    torchrun --standalone --nproc-per-node 2 -m training.launch -- ddp    (without Ray)

``train`` below is the algorithm; what follows each step is in ``training.bookkeeping``. A
run may be restarted at any step and on any number of workers: the batch of step N depends only on N
and the seed (see ``training.data.small_images``).
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from contract.errors import InputError
from contract.text import counted
from training.bookkeeping import Bookkeeping, Score, check_longer
from training.checkpoint import checkpoints
from training.data import small_images
from training.ddp.settings import SMALL, DdpConfig
from training.loop import metrics
from training.loop.optimizers import decay_groups
from training.loop.worker import Pulse, Worker, uses_bf16
from training.models import classifiers as models
from training.models import replicas
from training.models.resnet import ResNet18
from training.models.small import Small
from training.record.events import phase
from training.record.result import Table

_EVALUATION_BATCH = 500


def train(worker: Worker, config: DdpConfig) -> None:
    """Train until the last epoch, or until the run is asked to stop; continues what is there."""
    world_size, device = worker.world_size, worker.device
    on_gpu = device.type == "cuda"
    use_bf16 = uses_bf16(config.precision, device)
    torch.manual_seed(config.seed)
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True

    image_set = small_images.load(config.data)
    train_set = small_images.DeviceImages(image_set, device)
    test_set = small_images.DeviceImages(image_set, device, is_test=True)
    order = small_images.BatchOrder(
        num_images=len(train_set), global_batch=config.images_per_step, seed=config.seed
    )
    if order.smallest_batch < 2 * world_size:
        raise InputError(
            f"{config.data} is too small for {counted(world_size, 'worker')}: a step of "
            f"{order.smallest_batch} images leaves a worker with fewer than two; use fewer workers"
        )
    total_steps = config.num_steps(order.steps_per_epoch)

    kind = Small if config.model == SMALL else ResNet18
    model = kind(image_set.class_names)
    num_parameters = models.num_parameters(model)
    # At 28 x 28, 62.2 % of this model's gradient elements are always zero: do not send them.
    models.keep_live_taps(model, image_size=small_images.IMAGE_SIZE)
    course = metrics.Course(
        items="images",
        items_per_step=order.global_batch,
        global_batch=order.global_batch,
        steps_per_epoch=order.steps_per_epoch,
        total_steps=total_steps,
        learning_rate=lambda step: learning_rate(config, step, total_steps),
        # Backward costs twice the forward pass.
        flops_per_item=3 * models.forward_flops(model, image_size=small_images.IMAGE_SIZE),
        world_size=world_size,
        device=device,
    )
    model.to(device)
    if on_gpu:
        models.channels_last(model)
    optimizer = build_optimizer(model, config, device)

    # Resume
    saver = checkpoints.Saver(
        worker,
        model,
        optimizer,
        settings=config.to_json(),
        data=image_set.fingerprint,
        keep=config.checkpoints_to_keep,
        processor=models.processor(
            small_images.IMAGE_SIZE, mean=[image_set.mean], std=[image_set.std]
        ),
    )
    position = saver.resume(from_scratch=config.from_scratch)
    check_longer(config, saver.recorded, position, order.steps_per_epoch)

    worker.emit(phase("model_ready"))
    forward = replicas.distribute(model, compiles=config.compile, has_graphs=True)
    worker.emit(course.start(model, step=position.step, parameters=num_parameters, bf16=use_bf16))
    books = Bookkeeping(
        worker,
        config,
        course,
        lr=config.lr,
        position=position,
        evaluate_every=order.steps_per_epoch,
        evaluate=partial(evaluate, model, image_set, test_set, worker=worker, use_bf16=use_bf16),
        save_every=config.checkpoint_every_epochs * order.steps_per_epoch,
        save=saver.save,
        keep=saver.keep,
        settle=lambda: replicas.average_over_workers(model.buffers(), world_size),
    )
    timer = books.timer
    model.train()
    for step in books.steps:
        with books.step(step):
            # Learning rate
            for group in optimizer.param_groups:
                group["lr"] = course.learning_rate(step)

            # This worker's part of the batch
            pixels, labels, size = _batch(train_set, order, config, step, worker)
            timer.mark("data")

            # Forward
            if config.compile:
                replicas.begin_step()
            with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
                logits = forward(pixels).logits
            loss_sum = F.cross_entropy(
                logits.float(), labels, reduction="sum", label_smoothing=config.label_smoothing
            )
            timer.mark("forward")

            # Backward. DDP averages gradients over the workers, whose shares may differ by an
            # image: this gives every image of the global batch the same weight.
            (loss_sum * (world_size / size)).backward()
            timer.mark("backward")

            # Update
            norm = replicas.update(model, optimizer, max_grad_norm=config.max_grad_norm)
            books.done(loss_sum=loss_sum, norm=norm, size=size, items=len(labels))

        # Report, save, evaluate
        if not books.after(step):
            break
    books.finish(restore=saver.restore, publish=saver.publish)


def learning_rate(config: DdpConfig, step: int, total_steps: int) -> float:
    """Learning rate of ``step`` (counted from 0)."""
    return config.rate(step, total_steps, peak=config.lr)


def build_optimizer(
    model: nn.Module, config: DdpConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Adam; weight decay, where there is any, spares biases and normalisation."""
    groups = decay_groups(model, config.weight_decay)
    fused = device.type in ("cuda", "cpu")  # one kernel over all parameters: 2-3x on both
    return torch.optim.AdamW(groups, lr=config.lr, fused=fused)


def evaluate(
    model: nn.Module,
    image_set: small_images.ImageSet,
    test_set: small_images.DeviceImages,
    *,
    worker: Worker,
    use_bf16: bool,
) -> Score:
    """Evaluate every test image once, each worker its part; all get the exact same result."""
    num, device = len(test_set), worker.device
    first, end = small_images.shard_bounds(num, rank=worker.rank, world_size=worker.world_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    predictions = torch.zeros(num, dtype=torch.int64, device=device)
    num_correct = torch.zeros((), dtype=torch.int64, device=device)
    pulse = Pulse(worker)
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
        for start in range(first, end, _EVALUATION_BATCH):
            pulse.beat()
            part = slice(start, min(start + _EVALUATION_BATCH, end))
            pixels, labels = test_set.batch(torch.arange(part.start, part.stop))
            logits = model(pixels).logits.float()
            loss_sum += F.cross_entropy(logits, labels, reduction="sum")
            predictions[part] = logits.argmax(dim=1)
            num_correct += (predictions[part] == labels).sum()
    model.train()
    for part_of_all in (loss_sum, num_correct, predictions):
        dist.all_reduce(part_of_all)  # the others' parts are zeros here
    return Score(
        loss=loss_sum.item() / num,
        measures={"accuracy": num_correct.item() / num},
        details=confusion_of(image_set, predictions.cpu()),
    )


def confusion_of(image_set: small_images.ImageSet, predictions: torch.Tensor) -> Table:
    """Confusion matrix of the test split.

    Args:
        predictions: int64 ``[num]`` on the host.
    """
    labels = torch.tensor(image_set.test_labels, dtype=torch.int64)
    num_classes = small_images.NUM_CLASSES
    counts = torch.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    names = tuple(image_set.class_names)
    return Table(
        title="Confusion matrix: a row per true class, a column per predicted one",
        heads=names,
        names=names,
        rows=tuple(map(tuple, counts.view(num_classes, num_classes).tolist())),
    )


def _batch(
    train_set: small_images.DeviceImages,
    order: small_images.BatchOrder,
    config: DdpConfig,
    step: int,
    worker: Worker,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This worker's part of the batch of ``step``, and the size of the whole batch."""
    indices = order.indices(step)
    first, end = small_images.shard_bounds(
        len(indices), rank=worker.rank, world_size=worker.world_size
    )
    own = slice(first, end)
    mirrored = None
    if config.flip:
        mirrored = small_images.mirrored(seed=config.seed, step=step, num=len(indices))[own]
    return *train_set.batch(indices[own], mirrored=mirrored), len(indices)
