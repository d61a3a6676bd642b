"""A model of the Hugging Face Hub without weights is refused on the laptop; what the Hub does not
tell is left to the node. The Hub is a server on loopback."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from tests.loopback import answering
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli

FILES = {
    "owner/good": ["config.json", "model.safetensors"],
    "owner/old": ["config.json", "pytorch_model.bin"],
    "owner/none": ["config.json", "tf_model.h5"],
}
SUBMIT = ["submit", "fsdp", "--yes", "--data", "s3://bucket/text", "--model"]


def of_the_hub(request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str]:
    name, _, revision = request.path.removeprefix("/api/models/").partition("/revision/")
    if name == "owner/garbled":
        request.wfile.write(b"no HTTP at all\r\n\r\n")
    if name not in FILES or revision not in ("main", "v1"):
        return 401, ""
    return 200, json.dumps({"siblings": [{"rfilename": each} for each in FILES[name]]})


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with answering(of_the_hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield


@pytest.mark.parametrize("model", ["owner/none", "owner/none@v1"])
def test_a_model_without_weights_is_refused_before_a_host_starts(
    account: Account, cli: Cli, model: str
) -> None:
    assert model in cli.refuses("submit fsdp --yes --data s3://bucket/text --model", model)
    assert account.changes == []


@pytest.mark.parametrize(
    "model",
    [
        *("owner/good", "owner/old", "owner/private", "owner/garbled"),
        *("s3://bucket/model", "new:tiny"),
    ],
)
def test_what_has_weights_or_cannot_be_looked_at_is_left_to_the_node(
    account: Account, model: str, cli: Cli
) -> None:
    cli("submit fsdp --yes --data s3://bucket/text --model", model)
    assert account.sent("start_execution")


@pytest.mark.parametrize(
    ("variable", "value"), [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")]
)
def test_without_a_way_to_the_hub_nothing_is_refused(
    account: Account, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, cli: Cli
) -> None:
    monkeypatch.setenv(variable, value)
    cli("submit fsdp --yes --data s3://bucket/text --model owner/none")
    assert account.sent("start_execution")
