"""Parts of a training loop: losses, optimizers, metrics, and the worker that runs it."""
