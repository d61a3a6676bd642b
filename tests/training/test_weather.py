"""Proves that a run gets over an S3 that refuses every request, or answers none, for longer than
it is asked again."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from contract.nodes import ENV_S3_TIMEOUT
from tests.training.local_runs import Command, launcher
from tests.training.test_data import write_images
from training.checkpoint import checkpoints
from training.record import reader
from training.record.events import Step
from training.system import storage

pytestmark = [pytest.mark.slow, pytest.mark.night]

BUCKET = "s3://weather-test"


class Weather:
    """An S3 in front of the real one, as good as it is told to be."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = urlsplit(endpoint)
        self.is_refusing = self.is_silent = False
        self.ended = threading.Event()


@contextmanager
def served(weather: Weather) -> Iterator[str]:
    """The address of such an S3."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if weather.is_silent:
                weather.ended.wait(30)
                self.close_connection = True
                return
            if weather.is_refusing:
                slow_down = b"<Error><Code>SlowDown</Code><Message>Please wait.</Message></Error>"
                self.reply(503, {"Content-Type": "application/xml"}, slow_down)
                return
            upstream = HTTPConnection(weather.endpoint.netloc, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers))
            found = upstream.getresponse()
            content = found.read()
            self.reply(found.status, dict(found.getheaders()), content)
            upstream.close()

        def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            if "content-length" not in map(str.lower, headers):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

        def handle(self) -> None:
            with suppress(OSError):  # who asked has given up
                super().handle()

        def log_message(self, *_given: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        address_family = socket.AF_INET

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        weather.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    with launcher(tmp_path, "ddp") as run:
        yield run


def test_a_run_gets_over_an_s3_that_refuses_and_one_that_says_nothing(
    start: Callable[..., Command], s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_images(tmp_path / "data", num_train=480)
    run = f"{BUCKET}/runs/storm"
    storage.filesystem("s3://").mkdir(BUCKET)
    weather = Weather(s3_endpoint)
    with served(weather) as address, monkeypatch.context() as patch:
        # Minutes, scaled to seconds: two tries, each of them twice.
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_MAX_ATTEMPTS", "2")
        patch.setenv(ENV_S3_TIMEOUT, "5")
        # An epoch's end waits for the save of the one before. The first save is refused, the second
        # or third done, the next one meets silence, which the epoch after that tells; and one more.
        words = ["--data", str(data), "--epochs", "6", "--workers", "1"]
        command = start("storm", *words, "--storage", f"{BUCKET}/runs")
        patch.undo()

        def steps() -> int:
            return max((each.step for each in reader.read_metrics(run).of(Step)), default=0)

        said = ""

        def failed_saves() -> int:
            nonlocal said
            assert command.process.stderr is not None
            with suppress(BlockingIOError):
                said += os.read(command.process.stderr.fileno(), 1 << 16).decode()
            return said.count("could not be saved")

        assert command.process.stderr is not None
        os.set_blocking(command.process.stderr.fileno(), False)
        command.wait_until(lambda: steps() >= 1)
        weather.is_refusing = True
        command.wait_until(lambda: failed_saves() == 1)  # it has used all of its tries
        weather.is_refusing = False
        before = checkpoints.names(run)
        command.wait_until(lambda: checkpoints.names(run) != before)
        weather.is_silent = True
        command.wait_until(lambda: failed_saves() == 2)
        weather.is_silent = False
        code, _, err = command.end()
        err = said + err
    assert code == 0, err
    assert f"the record cannot be written to {run} for now" in err
    assert "Traceback" not in err
    assert "resuming" not in err, "nothing was lost, and nothing was trained again"
    result = reader.read_result(run)
    assert result is not None
    assert (result.status, result.resumed_from) == ("succeeded", None), err
    found = [each.step for each in reader.read_metrics(run).of(Step)]
    assert found == [*range(1, result.steps + 1)]
    assert storage.exists(f"{run}/report.html")
    assert storage.exists(f"{run}/checkpoints/step-{result.steps:08d}/manifest.json")
