"""The process of the local AWS. Runs inside ``.venv-aws``, usually as a child process.

    PYTHONPATH=. .venv-aws/bin/python -m rehearsal.ministack.server

It is MiniStack, configured by the environment that MiniStack itself reads (GATEWAY_PORT, BIND_HOST
...), with the changes of ``rehearsal.ministack.install`` and the modules that AWS gives Lambda
functions. ``rehearsal.local_aws`` starts it.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

WATCH_PARENT = "--end-with-parent"
SECONDS_TO_STOP = 10


def end_with_parent() -> None:
    """End this process and its children as soon as standard input closes.

    The parent holds the other end of that pipe. The system closes it however the parent ends, so
    a killed test run leaves no server behind.
    """
    own_group = os.getpgrp()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(own_group, signal.SIGTERM)
        time.sleep(SECONDS_TO_STOP)
        os.killpg(own_group, signal.SIGKILL)

    if own_group != os.getpid():
        raise SystemExit(f"error: {WATCH_PARENT} is for a process that leads its own group")
    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main() -> None:
    arguments = sys.argv[1:]
    if arguments not in ([], [WATCH_PARENT]):
        print(f"error: the only argument is {WATCH_PARENT}; see the environment", file=sys.stderr)
        raise SystemExit(2)
    if WATCH_PARENT in arguments:
        end_with_parent()

    # Lambda workers inherit this: they get what AWS has, and not the modules of this project.
    modules = Path(__file__).parent / "lambda_modules"
    os.environ["PYTHONPATH"] = str(modules)
    os.environ["NODE_OPTIONS"] = f'--require "{modules / "aws_sdk.js"}"'
    os.environ["REHEARSAL_PYTHON"] = sys.executable  # for aws_sdk.js
    sys.argv = sys.argv[:1]  # MiniStack parses what is left

    try:
        from rehearsal.ministack import internals
    except ImportError as error:  # the message says what is missing, and what to do
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from rehearsal.ministack.install import install

    install()
    internals.app.main()


if __name__ == "__main__":
    main()
