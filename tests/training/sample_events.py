"""Events as a small run of the DDP recipe emits them, for tests of what becomes of them."""

from training.record.events import Start, Step


def start(step: int = 0, *, resumed: bool = False) -> Start:
    """Two workers on CPUs, two epochs of four steps."""
    return Start(
        step=step,
        resumed=resumed,
        world_size=2,
        global_batch=64,
        items="images",
        items_per_step=64,
        steps_per_epoch=4,
        total_steps=8,
        parameters=1200,
        trained_parameters=1200,
        device="CPU",
        precision="fp32",
    )


def step(number: int, loss: float = 1.0) -> Step:
    """A step of it, done in the second of its number."""
    return Step(step=number, epoch=1, loss=loss, lr=0.1, grad_norm=2.0, time=float(number))
