"""JupyterLab on a head: installed, guarded by a token, its files saved and restored.

A small server stands for JupyterLab, as a wheel of its name that real pip installs; the real one is
started in ``tests/rehearsal/test_in_containers.py``.
"""

import hashlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from containers import notebook
from containers.program.files import open_mirror
from contract import exits, nodes
from contract.errors import InputError
from contract.nodes import ENV_NOTICE, ENV_STORAGE
from tests.conftest import write_wheel
from tests.containers.program.s3_in_memory import S3, saved_in
from trainctl.plugin import free_port

TOKEN = "0123456789abcdef"

#: Answers with what it was started with, and writes what it is sent; "end" ends it.
SERVER = """
import http.server, json, os, pathlib, sys

options = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:])


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        seen = {"options": options, "environment": dict(os.environ), "folder": os.getcwd()}
        self.answer(json.dumps(seen).encode())

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if content == b"end":
            os._exit(3)
        pathlib.Path(self.path.strip("/")).write_bytes(content)
        self.answer(b"")

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


address = options["ServerApp.ip"], int(options["ServerApp.port"])
http.server.ThreadingHTTPServer(address, Page).serve_forever()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the server as a package."""
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, name="jupyterlab", code=SERVER)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _short_list(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the packages that are installed: the first one, which stands for all."""
    first = "jupyterlab==1.0"
    assert notebook.LIST.read_text().splitlines()[2].startswith(first.partition("==")[0])
    listed = tmp_path_factory.mktemp("list") / "list.txt"
    listed.write_text(f"{first}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebook, "LIST", listed)
        yield


def pip_variables(wheels: Path) -> dict[str, str]:
    own = {"UV_CACHE_DIR": str(wheels / "uv")}
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), **own}


@dataclass
class Start:
    """One start on a head, in a thread."""

    place: Path
    s3: S3
    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = notebook.Notebook(
            port=self.port,
            environment=self.environment,
            place=self.place,
            make_mirror=lambda folders, address: open_mirror(folders, address, client=self.s3),
        )
        self.thread = threading.Thread(target=lambda: self.ended.append(self.server.run()))
        self.thread.start()

    def ask(self, path: str = "", content: str | None = None) -> Any:
        """What the page answers, as soon as it does."""
        body = None if content is None else content.encode()
        deadline = time.monotonic() + 150
        while True:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.port}/{path}", data=body, timeout=10
                ) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.URLError:
                assert time.monotonic() < deadline, "the page does not answer"
                assert self.thread.is_alive(), "the server has ended"
                time.sleep(0.1)

    def end(self) -> int:
        self.server.stop()
        return self.wait()

    def wait(self) -> int:
        self.thread.join(timeout=100)
        assert not self.thread.is_alive()
        return self.ended[0]


@pytest.fixture
def environment(wheels: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_TOKEN": TOKEN,
        ENV_STORAGE: "s3://bucket",
        ENV_NOTICE: str(tmp_path / "notice"),
        **pip_variables(wheels),
        "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}",
    }


@pytest.fixture
def s3() -> S3:
    return S3()


@pytest.fixture
def start(tmp_path: Path, s3: S3, environment: dict[str, str]) -> Iterator[Start]:
    found = Start(tmp_path / "notebook", s3, environment)
    yield found
    found.end()


def saved(s3: S3) -> dict[str, str]:
    """What is saved, according to its list."""
    return saved_in(s3, "notebook")


def test_it_listens_where_it_is_told_and_asks_for_a_token(
    start: Start, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = start.ask()
    options, variables = seen["options"], seen["environment"]
    assert options["ServerApp.ip"] == "127.0.0.1"
    assert options["ServerApp.port_retries"] == "0"
    assert seen["folder"] == options["ServerApp.root_dir"] == str(tmp_path / "notebook" / "work")
    # In a variable, because options can be read by all who list processes.
    page_token = nodes.page_token(TOKEN)
    assert variables["JUPYTER_TOKEN"] == page_token
    assert page_token not in json.dumps(options)
    assert TOKEN not in page_token
    assert len(page_token) == 40
    assert page_token != hashlib.sha256(TOKEN.encode()).hexdigest()[:40]
    assert page_token != nodes.page_token(TOKEN[::-1])
    # Kernels are programs of their own for Ray.
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in variables
    assert variables["RAY_AUTH_TOKEN"] == TOKEN
    said, deadline = "", time.monotonic() + 30
    while f"node: {nodes.NOTEBOOK_READY}" not in said.splitlines():
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
        said += capfd.readouterr().err
    assert page_token not in said


def test_its_files_are_in_the_bucket_after_a_stop_and_in_the_folder_after_a_start(
    start: Start, s3: S3, environment: dict[str, str], tmp_path: Path
) -> None:
    start.ask("first.ipynb", "one")
    assert start.end() == exits.OK
    assert saved(s3) == {"work/first.ipynb": "one"}
    assert not (tmp_path / "notebook").exists()
    again = Start(tmp_path / "notebook", s3, environment)
    try:
        again.ask()
        assert (tmp_path / "notebook" / "work" / "first.ipynb").read_text() == "one"
        again.ask("first.ipynb", "two")
    finally:
        assert again.end() == exits.OK
    assert saved(s3) == {"work/first.ipynb": "two"}


def test_what_is_there_when_the_node_is_told_to_end_is_saved(
    start: Start, s3: S3, tmp_path: Path
) -> None:
    start.ask("first.ipynb", "one")
    (tmp_path / "notice").write_text("0")
    assert start.wait() == exits.OK
    assert saved(s3) == {"work/first.ipynb": "one"}


def test_a_server_that_fails_is_reported_and_its_files_are_saved(start: Start, s3: S3) -> None:
    start.ask("first.ipynb", "one")
    with pytest.raises((OSError, AssertionError)):
        start.ask("any", "end")
    assert start.wait() == exits.FAILED
    assert saved(s3) == {"work/first.ipynb": "one"}


def test_what_could_not_be_saved_stays_beside_the_next_start(
    s3: S3, environment: dict[str, str], tmp_path: Path
) -> None:
    # As a start that was killed leaves it.
    left = tmp_path / "notebook" / "work"
    left.mkdir(parents=True)
    (left / "unsaved.ipynb").write_text("mine")
    start = Start(tmp_path / "notebook", s3, environment)
    try:
        start.ask()
        assert not (left / "unsaved.ipynb").exists()
        (kept,) = tmp_path.glob("notebook-before-*/work/unsaved.ipynb")
        assert kept.read_text() == "mine"
    finally:
        start.end()


def test_without_a_bucket_it_works_and_removes_nothing(
    s3: S3,
    environment: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    del environment[ENV_STORAGE]
    start = Start(tmp_path / "notebook", s3, environment)
    try:
        start.ask("first.ipynb", "one")
    finally:
        assert start.end() == exits.OK
    assert (tmp_path / "notebook" / "work" / "first.ipynb").read_text() == "one"
    assert s3.objects == {}
    assert "names no bucket: notebooks end with this container" in capfd.readouterr().err


def test_it_does_not_start_without_the_clusters_token(
    environment: dict[str, str], tmp_path: Path
) -> None:
    del environment["RAY_AUTH_TOKEN"]
    server = notebook.Notebook(environment=environment, place=tmp_path / "notebook")
    with pytest.raises(InputError, match="RAY_AUTH_TOKEN is missing"):
        server.run()
    assert not (tmp_path / "notebook").exists()
