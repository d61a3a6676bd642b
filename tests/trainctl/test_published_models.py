"""A model of the Hugging Face Hub without weights is refused on the laptop; what the Hub does not
tell is left to the node. The Hub is a server on loopback."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from contract import exits
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.__main__ import main

FILES = {
    "owner/good": ["config.json", "model.safetensors"],
    "owner/old": ["config.json", "pytorch_model.bin"],
    "owner/none": ["config.json", "tf_model.h5"],
}
SUBMIT = ["submit", "fsdp", "--yes", "--data", "s3://bucket/text", "--model"]


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, revision = self.path.removeprefix("/api/models/").partition("/revision/")
        if name == "owner/garbled":
            self.wfile.write(b"no HTTP at all\r\n\r\n")
            return
        if name not in FILES or revision not in ("main", "v1"):
            self.send_error(401)
            return
        body = json.dumps({"siblings": [{"rfilename": each} for each in FILES[name]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("model", ["owner/none", "owner/none@v1"])
def test_a_model_without_weights_is_refused_before_a_host_starts(
    account: Account, cli: Cli, model: str
) -> None:
    assert f"error: model {model} has no weights that can be used" in cli.refuses(*SUBMIT, model)
    assert account.changes == []


@pytest.mark.parametrize(
    "model",
    [
        *("owner/good", "owner/old", "owner/private", "owner/garbled"),
        *("s3://bucket/model", "new:tiny"),
    ],
)
def test_what_has_weights_or_cannot_be_looked_at_is_left_to_the_node(
    account: Account, model: str
) -> None:
    assert main([*SUBMIT, model]) == exits.OK
    assert account.sent("start_execution")


@pytest.mark.parametrize(
    ("variable", "value"), [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")]
)
def test_without_a_way_to_the_hub_nothing_is_refused(
    account: Account, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert main([*SUBMIT, "owner/none"]) == exits.OK
    assert account.sent("start_execution")
