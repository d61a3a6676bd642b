"""ImageNet recipe: ResNet50 and EfficientNets on pictures of any size, a whole model per worker.

Pictures are decoded by processes beside each worker and cut, resized and mirrored on the
device. To step through it on a laptop, without AWS, a GPU or data:

    python -m training.launch imagenet --local               (under Ray Train)
    torchrun --standalone --nproc-per-node 2 -m training.launch -- imagenet    (without Ray)

``train`` below is the algorithm; what follows each step is in ``training.bookkeeping``. A
run may be restarted at any step and on any number of workers: which pictures step N sees, and which
part of each, depends only on N and the seed.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from contract.errors import InputError
from contract.text import counted
from training.bookkeeping import Bookkeeping, Score, check_longer
from training.checkpoint import checkpoints
from training.data import augmentation
from training.data.pictures import library, mirror
from training.data.pictures.batches import PictureBatch, PictureReader, rank_part, rank_plan
from training.data.pictures.picture import canvas_side
from training.data.small_images import BatchOrder
from training.imagenet.inputs import num_decoders
from training.imagenet.settings import MIDDLE, STEPS, SYNTHETIC, ImagenetConfig
from training.loop import metrics
from training.loop.optimizers import decay_groups
from training.loop.worker import Pulse, Worker, uses_bf16
from training.models import classifiers as models
from training.models import picture_models, replicas
from training.models.average import WeightAverage
from training.record.events import Noted, Warned, phase
from training.system.copies import to_device

#: Pictures that a worker evaluates at a time, at most: more would take the host's memory, for they
#: are decoded ahead, and gain nothing without a backward pass.
_EVALUATED_AT_ONCE = 64
_EPOCHS_PER_TENTH = 30


def train(worker: Worker, config: ImagenetConfig) -> None:
    """Train until the last epoch, or until the run is asked to stop; continues what is there."""
    try:
        with contextlib.ExitStack() as stack:  # ends the decoders
            _train(worker, config, stack)
    except torch.OutOfMemoryError as error:
        advice = config.less_memory(worker.world_size)
        raise checkpoints.out_of_memory(error, worker, advice=advice) from None


def _train(worker: Worker, config: ImagenetConfig, stack: contextlib.ExitStack) -> None:
    rank, world_size, device = worker.rank, worker.world_size, worker.device
    on_gpu = device.type == "cuda"
    use_bf16 = uses_bf16(config.precision, device)
    torch.manual_seed(config.seed)
    if on_gpu:
        # cuDNN's convolutions use TF32 in any case, as the reference's do.
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True

    found = open_pictures(config, worker, stack)
    worker.emit(*(Noted(message=each) for each in found.notes))
    order = BatchOrder(
        num_images=found.num_train, global_batch=config.images_per_step, seed=config.seed
    )
    if order.smallest_batch < 4 * world_size:
        raise InputError(
            f"{config.data} is too small for {counted(world_size, 'worker')}: a step of "
            f"{order.smallest_batch} pictures leaves a worker with fewer than four; use fewer "
            "workers, or more pictures"
        )
    total_steps = config.num_steps(order.steps_per_epoch)

    model = picture_models.build(config.model, classes=found.classes)
    model.to(device)
    if on_gpu:
        models.channels_last(model)
    average = WeightAverage(model, decay=config.ema) if config.ema else None
    sizes = [config.size_in(epoch) for epoch in range(config.epochs)]
    flops = models.forward_flops(model, image_size=config.full_size)
    course = metrics.Course(
        items="images",
        items_per_step=order.global_batch,
        global_batch=order.global_batch,
        steps_per_epoch=order.steps_per_epoch,
        total_steps=total_steps,
        learning_rate=lambda step: learning_rate(config, step, order.steps_per_epoch),
        # Backward costs twice the forward pass, which grows with the area of the pictures.
        flops_per_item=3
        * flops
        * sum((size / config.full_size) ** 2 for size in sizes)
        / len(sizes),
        world_size=world_size,
        device=device,
    )
    optimizer = torch.optim.SGD(
        decay_groups(model, config.weight_decay),
        lr=config.lr,
        momentum=0.9,
        nesterov=True,
        fused=device.type in ("cuda", "cpu"),
    )

    # Resume
    saver = checkpoints.Saver(
        worker,
        model,
        optimizer,
        settings=config.to_json(),
        data=found.fingerprint,
        keep=config.checkpoints_to_keep,
        processor=models.processor(
            config.full_size, mean=augmentation.MEAN, std=augmentation.STD, share=MIDDLE
        ),
        average=average.state if average is not None else None,
    )
    position = saver.resume(from_scratch=config.from_scratch)
    check_longer(config, saver.recorded, position, order.steps_per_epoch)

    worker.emit(phase("model_ready"))
    shapes = {*sizes[position.step // order.steps_per_epoch :]}
    reason = course.why_not_compile(position.step, num_shapes=len(shapes))
    if config.compile and reason:
        worker.emit(Noted(message=f"the model is not compiled: {reason}"))
    forward = replicas.distribute(model, compiles=config.compile and not reason)
    num_parameters = models.num_parameters(model)
    worker.emit(course.start(model, step=position.step, parameters=num_parameters, bf16=use_bf16))

    def settle() -> None:
        buffers = [*model.buffers()]
        if average is not None:
            buffers += average.buffers(model)
        replicas.average_over_workers(buffers, world_size)

    books = Bookkeeping(
        worker,
        config,
        course,
        lr=config.lr,
        position=position,
        evaluate_every=order.steps_per_epoch,
        evaluate=partial(evaluate, model, average, found, config, worker=worker, use_bf16=use_bf16),
        save_every=config.checkpoint_every_epochs * order.steps_per_epoch,
        save=saver.save,
        keep=saver.keep,
        settle=settle,
        warnings=partial(found.newly_damaged, world_size),
    )
    timer = books.timer
    model.train()
    steps_to_do = books.steps
    plan = rank_plan(order, steps=steps_to_do, rank=rank, world_size=world_size)
    batches = found.train.batches(plan)
    for step in steps_to_do:
        with books.step(step):
            # Learning rate
            for group in optimizer.param_groups:
                group["lr"] = course.learning_rate(step)

            # Pictures of this worker, cut, resized and mirrored on the device
            batch = next(batches)
            boxes = augmentation.random_boxes(
                batch.samples, seed=config.seed, step=step, least_area=config.least_area
            )
            pixels = augmentation.random_views(
                batch.pictures, batch.extents, boxes, size=sizes[step // order.steps_per_epoch]
            )
            # Damaged pictures are missing: only all workers together know how many there are.
            num_present = torch.full((), float(len(batch.samples)), device=device)
            if world_size > 1:
                dist.all_reduce(num_present)
            timer.mark("data")

            # Forward. Seed dropout by the step, so that a resumed run draws the same; each rank
            # draws its own.
            torch.manual_seed(config.seed + 1_000_003 * step + rank)
            with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
                logits = forward(pixels).logits
            loss_sum = F.cross_entropy(
                logits.float(),
                batch.labels,
                reduction="sum",
                label_smoothing=config.label_smoothing,
            )
            timer.mark("forward")

            # Backward. DDP averages gradients over the workers, whose shares may differ by some
            # pictures: this gives every picture of the global batch the same weight.
            (loss_sum * (world_size / num_present)).backward()
            timer.mark("backward")

            # Update
            norm = replicas.update(model, optimizer, max_grad_norm=config.max_grad_norm)
            if average is not None:
                average.update(model, num_updates=step)
            size = len(order.indices(step))
            # As if the missing ones were like the others.
            books.done(
                loss_sum=loss_sum.detach() * (size / num_present),
                norm=norm,
                size=size,
                items=len(batch.samples),
            )

        # Report, save, evaluate
        if not books.after(step):
            break
    books.finish(restore=saver.restore, publish=saver.publish)


def learning_rate(config: ImagenetConfig, step: int, steps_per_epoch: int) -> float:
    """Learning rate of ``step`` (counted from 0)."""
    if config.schedule == STEPS:
        return config.peak_lr * 0.1 ** (step // steps_per_epoch // _EPOCHS_PER_TENTH)
    return config.rate(step, config.epochs * steps_per_epoch, peak=config.peak_lr)


@dataclass(kw_only=True)
class Pictures:
    """Both splits of the data, as one worker reads them."""

    train: "PictureReader | Synthetic"
    val: "PictureReader | Synthetic"
    num_train: int
    num_val: int
    classes: tuple[str, ...]
    fingerprint: str
    readers: tuple[PictureReader, ...]
    """Where the pictures come from files."""
    notes: tuple[str, ...] = ()
    """Notes on the data: which pictures were held out, and which files are unused."""
    reported: set[str] = field(default_factory=set)
    """The damaged pictures that were reported."""

    def newly_damaged(self, world_size: int) -> list[Warned]:
        """An event for each damaged picture that any worker met since the last call; every rank
        calls this."""
        mine = {f"{name}: {why}" for reader in self.readers for name, why in reader.damaged.items()}
        everyones: list[set[str]] = [set() for _ in range(world_size)]
        dist.all_gather_object(everyones, mine - self.reported)
        new = set().union(*everyones) - self.reported
        self.reported |= new
        return [Warned(message=f"a damaged picture is left out: {each}") for each in sorted(new)]


def open_pictures(config: ImagenetConfig, worker: Worker, stack: contextlib.ExitStack) -> Pictures:
    """Open the data, fetched to this node's disk where it is in S3, and start the decoders of this
    worker; they end with ``stack``."""
    device = worker.device
    if config.data == SYNTHETIC:
        synthetic = Synthetic(canvas=canvas_side(config.size_of(0)), device=device)
        num_train, num_val = config.synthetic_images, max(20, config.synthetic_images // 10)
        return Pictures(
            train=synthetic,
            val=synthetic,
            num_train=num_train,
            num_val=num_val,
            classes=tuple(f"pattern {number}" for number in range(NUM_CLASSES)),
            fingerprint=f"{SYNTHETIC}:{num_train}",
            readers=(),
        )
    found = mirror.on_disk(library.open_set(config.data))
    train, val = (
        stack.enter_context(
            PictureReader(
                found,
                split,
                size=config.size_of(found.index.size),
                batch=most(config, worker.world_size),
                device=device,
                decoders=num_decoders(config, worker.world_size),
            )
        )
        for split, most in ((found.train, most_per_worker), (found.val, most_evaluated))
    )
    return Pictures(
        train=train,
        val=val,
        num_train=len(found.train),
        num_val=len(found.val),
        classes=found.classes,
        fingerprint=found.fingerprint,
        readers=(train, val),
        notes=found.notes,
    )


def most_per_worker(config: ImagenetConfig, world_size: int) -> int:
    """The most pictures that a worker has in a step: the last one of an epoch may be a quarter
    larger."""
    return math.ceil(config.images_per_step * 1.25 / world_size)


def most_evaluated(config: ImagenetConfig, world_size: int) -> int:
    """The most pictures that a worker evaluates at a time."""
    return min(_EVALUATED_AT_ONCE, most_per_worker(config, world_size))


def evaluate(
    model: nn.Module,
    average: WeightAverage | None,
    found: Pictures,
    config: ImagenetConfig,
    *,
    worker: Worker,
    use_bf16: bool,
) -> Score:
    """Evaluate every picture once, each worker its part; all get the exact same result.

    The average of the weights is evaluated where there is one: it is what is saved as the model.
    """
    device = worker.device
    weights = average.state if average is not None else model.state_dict()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device)  # first, among five, all
    model.eval()
    plan = rank_part(
        found.num_val,
        batch=most_evaluated(config, worker.world_size),
        rank=worker.rank,
        world_size=worker.world_size,
    )
    pulse = Pulse(worker)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
        for batch in found.val.batches(plan):
            pulse.beat()
            if not len(batch.samples):
                continue
            pixels = augmentation.middle_views(
                batch.pictures, batch.extents, size=config.full_size, share=MIDDLE
            )
            logits = torch.func.functional_call(model, weights, (pixels,)).logits.float()
            loss_sum += F.cross_entropy(logits, batch.labels, reduction="sum")
            likely = logits.topk(min(5, logits.shape[1]), dim=1).indices
            hits = likely == batch.labels[:, None]
            counts += torch.stack(
                [hits[:, 0].sum(), hits.sum(), torch.full_like(counts[2], len(hits))]
            )
    model.train()
    dist.all_reduce(loss_sum)
    dist.all_reduce(counts)
    first, among_five, num = counts.tolist()
    if not num:
        raise InputError(f"all pictures of {config.data}/val are damaged: prepare the set again")
    measures = {"accuracy": first / num}
    if len(found.classes) > 5:
        measures["top5"] = among_five / num
    return Score(loss=loss_sum.item() / num, measures=measures)


NUM_CLASSES = 10
_NUM_NOISES = 64


class Synthetic:
    """Pictures that are made on the device, any number of them, as ``PictureReader`` gives those of
    files: a pattern for each class, under noise."""

    def __init__(self, *, canvas: int, device: torch.device) -> None:
        """
        Args:
            canvas: pixels of a side; all pictures fill it.
        """
        self._device = device
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randint(0, 192, (NUM_CLASSES, 3, 2, 2), generator=generator)
        patterns = torch.nn.functional.interpolate(coarse.float(), size=canvas)
        self._patterns = patterns.to(torch.uint8).permute(0, 2, 3, 1).contiguous().to(device)
        shape = (_NUM_NOISES, canvas, canvas, 3)
        noises = torch.randint(0, 64, shape, generator=generator, dtype=torch.uint8)
        self._noises = noises.to(device)

    def batches(self, plan: Iterable[torch.Tensor]) -> Iterator[PictureBatch]:
        """A batch for each part of the plan, int64 ``[n]``, in its order."""
        for samples in plan:
            labels = to_device(samples % NUM_CLASSES, self._device)
            noises = to_device(samples * 7 % _NUM_NOISES, self._device)
            pictures = self._patterns[labels] + self._noises[noises]
            yield PictureBatch(
                pictures=pictures,
                extents=torch.full((len(samples), 2), pictures.shape[1], device=self._device),
                labels=labels,
                samples=samples,
            )
