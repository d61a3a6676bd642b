"""In the command or the node: the first server is started here, and ends with this process."""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from training.runtime.forkserver.client import PREFIX
from training.runtime.forkserver.fitness import READ_ONCE

#: "0" switches forking off.
SWITCH: Final = "TRAIN_FORK"
#: Without Ray. torch._dynamo is imported by torch's optimizers and by DDP anyway.
WITHOUT_RAY = ("torch", "torch.distributed", "numpy", "pandas", "pyarrow.fs", "fsspec")
#: What the server itself needs instead of what its environment says.
OF_SERVER = {
    "OMP_NUM_THREADS": "1",  # no pool of threads before the fork
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks the driver's library, does not initialize CUDA
}
#: Carries the environment that the first server was given, before ``OF_SERVER`` was added.
GIVEN: Final = "TRAIN_FORK_GIVEN"

_ROOT: Final = Path(os.path.abspath(__file__)).parents[3]
# Not as a script, which would have this file's folder in its path and itself twice.
_COMMAND: Final = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
    "from training.runtime.forkserver import main; sys.exit(main(sys.argv[1:]))"
)


class ForkServer:
    """The first server, started by this process, with which it ends."""

    def __init__(
        self,
        *,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        show_log: bool = False,
    ) -> None:
        """Start it; it imports while this process goes on.

        Call it in the main thread: the server ends with the thread that has started it.

        Args:
            modules: what to import besides ``WITHOUT_RAY``; nothing that imports Ray.
            environment: what Ray will be started with; by default this process's own.
            show_log: let it write to stderr instead of keeping that for ``complaint``.

        Raises:
            OSError: it cannot be started.
        """
        self.name = f"train-fork-{secrets.token_hex(8)}"
        self._log = -1 if show_log else os.memfd_create("fork-server-log")
        output = 2 if show_log else self._log
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + self.name)
            listener.listen(256)
            environment = dict(os.environ if environment is None else environment)
            given = {name: v for name, v in environment.items() if name.startswith(READ_ONCE)}
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _COMMAND),
                    *(str(listener.fileno()), str(os.getpid())),
                    *dict.fromkeys((*WITHOUT_RAY, *modules)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                env=environment | OF_SERVER | {GIVEN: json.dumps(given)},
            )

    @classmethod
    def start(
        cls,
        *,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        show_log: bool = False,
    ) -> Self | None:
        """Like the constructor; None where there is none: switched off, not Linux, too old."""
        if os.environ.get(SWITCH) == "0" or not hasattr(os, "pidfd_open"):
            return None
        try:
            os.close(os.pidfd_open(os.getpid()))
            return cls(modules=modules, environment=environment, show_log=show_log)
        except OSError:
            return None

    @property
    def pid(self) -> int:
        return self._process.pid

    def complaint(self) -> str | None:
        """Why it has ended, or did not fork, in its own words; None while all is well."""
        said = os.pread(self._log, 1 << 16, 0).decode(errors="replace") if self._log >= 0 else ""
        refusals = [line for line in said.splitlines() if line.startswith(PREFIX)]
        if refusals:
            return refusals[-1].removeprefix(PREFIX)
        code = self._process.poll()
        return None if code is None else f"it has ended with exit code {code}"

    def close(self) -> None:
        """End it, and with it the processes that it has forked."""
        self._process.kill()
        self._process.wait()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
