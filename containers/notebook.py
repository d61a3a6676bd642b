"""JupyterLab on the head of a standing cluster: ``python -m containers.notebook``.

``trainctl notebook`` submits it to Ray as a job. Its packages are installed into the host's cache
when it first starts there. The folder that it shows is kept like the files of a run: copied into
the bucket while it runs and when it ends, and restored at the next start, on any host.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

from containers.host import machine
from containers.host.machine import say
from containers.node import TOKEN
from containers.program import requirements
from containers.program.code import RAY_VARIABLE
from containers.program.files import Mirror, open_mirror
from containers.program.process import Program
from contract import exits, faults, nodes, runs
from contract.errors import InputError
from contract.files import WORK
from contract.nodes import ENV_NOTICE, ENV_STORAGE
from contract.requirements import REQUIREMENTS_TXT

#: The page's folder is below it, always at the same path, because notebooks contain paths.
PLACE: Final = Path("/tmp/notebook")
#: Folder for `%pip install` in a cell: the image's own folder cannot be written.
ADDED: Final = Path("/tmp/notebook-packages")
LOOPBACK: Final = "127.0.0.1"

#: What is installed.
LIST: Final = Path(__file__).with_name("notebook-requirements.txt")
_POLL_S: Final = 0.2
_START_S: Final = 120.0  # a first start reads a few thousand files
_END_S: Final = 5.0  # JupyterLab ends its kernels
_SAVE_S: Final = 10.0  # the last copy of the files, on a node that has to end
_SAVE_LONG_S: Final = 280.0  # on any other: Ray waits 300 s for a job that was told to stop


@faults.command(say=say)
def main(arguments: Sequence[str]) -> int:
    """Run until told to stop; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m containers.notebook")
    parser.add_argument("--address", default=LOOPBACK, help="where the page answers")
    given = parser.parse_args(arguments)
    server = Notebook(address=given.address)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.stop())
    try:
        return server.run()
    except requirements.Stopped:
        return exits.TERMINATED


class Notebook:
    """One start of JupyterLab, and the copy of its files."""

    def __init__(
        self,
        *,
        address: str = LOOPBACK,
        port: int = nodes.NOTEBOOK_PORT,
        environment: Mapping[str, str] | None = None,
        place: Path = PLACE,
        make_mirror: Callable[[dict[str, Path], str], Mirror] = open_mirror,
    ) -> None:
        """Args:
        address: where the page answers; the port is reachable from nowhere else.
        environment: of the node; this process's by default.
        make_mirror: of the folders and the address.
        """
        self._address, self._port, self._place = address, port, place
        self._environment = {**os.environ} if environment is None else dict(environment)
        self._make_mirror = make_mirror
        self._is_stopped = False

    def run(self) -> int:
        """Install, restore, serve, save; return the exit code.

        Raises:
            InputError: the packages cannot be installed, or the files not be restored.
            requirements.Stopped: told to stop meanwhile.
        """
        cluster_token = self._environment.get(TOKEN, "")
        if not cluster_token:
            raise InputError(f"{TOKEN} is missing: the page would be open to all")
        packages = self._place.with_name("notebook-environment")
        install(packages, self._environment, should_stop=self._must_end)
        folder = self._new_folder()
        mirror = self._mirror(folder)
        if mirror is not None:
            mirror.restore(should_stop=self._must_end)
            mirror.start()
        process = Program(
            (sys.executable, "-m", "jupyterlab", *self._options(folder)),
            folder=folder,
            environment=jupyter_environment(
                self._environment, packages, nodes.page_token(cluster_token)
            ),
        )
        try:
            code = self._serve(process)
        finally:
            is_saved = self._end(process, mirror)
        return code if is_saved else exits.FAILED

    def stop(self) -> None:
        """Have ``run`` save and return."""
        self._is_stopped = True

    def _mirror(self, folder: Path) -> Mirror | None:
        storage = self._environment.get(ENV_STORAGE, "")
        if not storage.startswith("s3://"):
            say(f"{ENV_STORAGE} names no bucket: notebooks end with this container")
            return None
        prefix = runs.output_prefix(nodes.NOTEBOOK_RUN)
        return self._make_mirror({WORK: folder}, f"{storage}/{prefix}")

    def _new_folder(self) -> Path:
        folder = self._place / WORK
        if folder.exists():
            # The bucket has what was saved of it; this is for what was not.
            kept = self._place.with_name(f"{self._place.name}-before-{time.time_ns()}")
            self._place.rename(kept)
            say(f"the folder of a notebook that was killed is kept as {kept}")
        folder.mkdir(parents=True)
        return folder

    def _options(self, folder: Path) -> list[str]:
        options = {
            "ServerApp.ip": self._address,
            "ServerApp.port": str(self._port),
            "ServerApp.port_retries": "0",  # another port would not be the one that is tunneled
            "ServerApp.open_browser": "False",
            "ServerApp.root_dir": str(folder),
            # No news and no update hints: this project pins the version.
            "LabApp.news_url": "None",
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "LabApp.extension_manager": "readonly",
        }
        return [f"--{name}={value}" for name, value in options.items()]

    def _serve(self, process: Program) -> int:
        """Wait until it answers, and then for its end; return the exit code."""
        began, is_ready = time.monotonic(), False
        while process.poll() is None:
            if self._must_end():
                return exits.OK
            if not is_ready and self._answers():
                is_ready = True
                say(nodes.NOTEBOOK_READY)
            if not is_ready and time.monotonic() - began > _START_S:
                say(f"error: JupyterLab does not answer after {_START_S:.0f} s")
                return exits.FAILED
            time.sleep(_POLL_S)
        code = process.poll()
        if code and not is_ready:
            say(f"error: JupyterLab has ended with exit code {code}; see above")
        return exits.FAILED if code else exits.OK

    def _answers(self) -> bool:
        try:
            status, _ = machine.ask(f"{self._address}:{self._port}", "/api", timeout_s=2)
        except OSError:
            return False
        return status == HTTPStatus.OK

    def _must_end(self) -> bool:
        return self._is_stopped or self._has_notice()

    def _has_notice(self) -> bool:
        """True if the node has to end."""
        notice = self._environment.get(ENV_NOTICE)
        return notice is not None and Path(notice).exists()

    def _end(self, process: Program, mirror: Mirror | None) -> bool:
        """End it and save its files; whether all of them are saved, where there is a place."""
        process.terminate()
        is_hurried = self._has_notice()
        if mirror is not None and is_hurried:
            # Save at once: the page's files are on the disk, and the node may have a second left.
            mirror.save(_SAVE_S)
        until = time.monotonic() + _END_S
        process.wait(lambda: until)
        process.end()
        if mirror is None:
            return True
        is_saved = mirror.save(_SAVE_S if is_hurried else _SAVE_LONG_S)
        mirror.close()
        if is_saved:
            shutil.rmtree(self._place, ignore_errors=True)
        return is_saved


def install(
    packages: Path,
    environment: Mapping[str, str],
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Install JupyterLab into an environment of its own.

    Raises:
        InputError, requirements.Stopped: as ``requirements.install``.
    """
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        shutil.copyfile(LIST, Path(folder, REQUIREMENTS_TXT))
        given = {k: v for k, v in environment.items() if k.startswith(requirements.PREFIXES)}
        requirements.install(Path(folder), packages, environment=given, should_stop=should_stop)


def jupyter_environment(
    environment: Mapping[str, str], packages: Path, token: str
) -> dict[str, str]:
    """Variables of JupyterLab and of its kernels, which find what ``%pip`` installed first.

    Args:
        environment: of this process.
        packages: where they are installed.
        token: that the page asks for.
    """
    sites = [str(requirements.site_packages(folder)) for folder in (ADDED, packages)]
    own = {
        "JUPYTER_TOKEN": token,  # an option would be seen by all who list processes
        "JUPYTER_PATH": str(packages / "share" / "jupyter"),
        "JUPYTER_CONFIG_PATH": str(packages / "etc" / "jupyter"),
        "JUPYTERLAB_DIR": str(packages / "share" / "jupyter" / "lab"),
        "PYTHONPATH": os.pathsep.join(filter(None, [*sites, environment.get("PYTHONPATH", "")])),
        "PIP_PREFIX": str(ADDED),
        "PATH": os.pathsep.join([str(packages / "bin"), environment.get("PATH", os.defpath)]),
    }
    # Each kernel is a program of its own for Ray, and no part of the job that runs this.
    rest = {name: value for name, value in environment.items() if name != RAY_VARIABLE}
    return {**rest, **own}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
