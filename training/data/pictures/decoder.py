"""A process that decodes pictures: ``python -m training.data.pictures.decoder``.

``reader`` starts several. Each takes tasks from its own connection, writes the pixels to their
places in the ring of shared memory, and answers how large they are or what is wrong with them. It
ends with its parent, because its connection does. Imports no torch.
"""

import math
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from contract.errors import InputError
from training.data.pictures import decode
from training.data.pictures.decode import Pixels
from training.data.pictures.files import Files
from training.data.pictures.index import Entry
from training.data.pictures.messages import Done, Orders, Task, Unreachable
from training.data.pictures.picture import DamagedError, canvas_side
from training.system.storage import UnreachableError


def ring_of(descriptor: int, orders: Orders) -> Pixels:
    """The shared memory as canvases: uint8 ``[capacity, side, side, 3]``."""
    side = canvas_side(orders.size)
    shape = (orders.capacity, side, side, 3)
    memory = mmap.mmap(descriptor, math.prod(shape))
    return np.frombuffer(memory, np.uint8).reshape(shape)


def fill(task: Task, orders: Orders, files: Files, ring: Pixels) -> Done:
    """Decode the pictures of a task; what a canvas has beside its picture becomes black.

    Raises:
        UnreachableError: the store does not answer.
        InputError: a line is damaged.
    """
    entries = [Entry.from_line(line) for line in task.lines]
    extents: list[tuple[int, int]] = []
    damaged: dict[int, str] = {}
    for place, (entry, content) in enumerate(zip(entries, files.read(entries), strict=True)):
        canvas = ring[task.first + place]
        try:
            if isinstance(content, DamagedError):
                raise content
            extent = decode.draw(content, entry, canvas, size=orders.size, encoding=orders.encoding)
            extents.append(extent)
        except DamagedError as error:
            damaged[place] = str(error)
            extents.append((0, 0))
    return Done(number=task.number, extents=tuple(extents), damaged=damaged)


def main(arguments: Sequence[str]) -> int:
    """Serve tasks until the connection closes.

    Args:
        arguments: the descriptors of the connection and of the ring, which this process inherits.
    """
    # Ctrl-C reaches the whole group of a terminal; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection_number, ring_number = map(int, arguments)
    with Connection(connection_number) as connection:
        try:
            orders: Orders = connection.recv()
            ring = ring_of(ring_number, orders)
            os.close(ring_number)
            files = Files(orders.root, cached=orders.cached)
            while True:
                task: Task = connection.recv()
                try:
                    connection.send(fill(task, orders, files, ring))
                except UnreachableError as error:
                    connection.send(Unreachable(message=str(error)))
                except InputError as error:
                    connection.send(Unreachable(message=str(error), is_damaged=True))
        except (EOFError, ConnectionError):
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
