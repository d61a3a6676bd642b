"""Start of a worker process, of a reader's and of a preparation's. Standard library only."""

import gc
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


def begin(_worker: int = 0) -> None:
    """Leave Ctrl-C and SIGTERM, which reach the whole process group, to the parent, which may
    still need this process until it has saved a checkpoint; and end when the parent is gone."""
    # What is inherited is not to be collected here: that would touch its memory, and the end of a
    # process group waits for threads that a fork does not copy.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
