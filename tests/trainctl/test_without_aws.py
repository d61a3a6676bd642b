"""A laptop without an account or a network reports that in one sentence, within two seconds.

botocore's own defaults wait for over a minute where packets vanish. Nothing waits here: the time
limits of all connections that a command tries, and its pauses between them, are added up.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    ReadTimeoutError,
)
from urllib3.util import connection

from contract import exits
from tests.trainctl.conftest import Cli
from trainctl.aws.clients import Clients

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
REGION = {"AWS_REGION": "us-east-1"}
ROLE = "[default]\nrole_arn = arn:aws:iam::123456789012:role/x\ncredential_source = Environment\n"
COMMANDS = (
    *("ls", "cost mine", "show mine", "runs", "data ls", "cluster status", "open", "doctor"),
    *("plan ddp", "submit ddp --yes", "logs mine --follow", "stop mine --yes", "download mine"),
)
#: Of two seconds; the rest is the start of Python.
MOST_S = 1.5


class Nowhere:
    """Network in which nothing answers, and a clock that nobody waits for."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def connect(self, _address: Any, timeout: float | None = None, *_: Any, **__: Any) -> Any:
        assert timeout is not None
        self.waited_s += timeout
        raise TimeoutError


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nowhere:
    """No configuration of AWS, and no network."""
    found = Nowhere()
    for name in (*KEYS, "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(connection, "create_connection", found.connect)

    def sleep(seconds: float) -> None:
        found.waited_s += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.chdir(tmp_path)  # where there are no runs
    return found


@pytest.mark.parametrize("variables", [{}, REGION], ids=["nothing", "region"])
@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize("words", COMMANDS)
def test_without_an_account_every_command_names_the_way_out(
    nowhere: Nowhere,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    is_doctor = words == "doctor"
    said = cli(*words.split(), code=exits.FAILED if is_doctor else exits.BAD_INPUT)
    assert (said.out == "") is not is_doctor
    assert 0 < nowhere.waited_s <= MOST_S  # EC2's own credentials are looked for


@pytest.mark.usefixtures("nowhere")
def test_without_an_account_the_runs_of_this_machine_are_shown(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    said = cli("ls")
    assert said.out == "No runs. Start one: trainctl run ddp\n"
    assert "No AWS account is set up here" in said.err


@pytest.mark.parametrize("is_role", [False, True], ids=["keys", "role"])
@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize("words", COMMANDS)
def test_without_a_network_every_command_fails_at_its_first_request(
    nowhere: Nowhere,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    is_role: bool,
) -> None:
    for name, value in {**KEYS, **REGION}.items():
        monkeypatch.setenv(name, value)
    if is_role:  # whose own request comes before the first
        (tmp_path / "config").write_text(ROLE)
        monkeypatch.setenv("AWS_PROFILE", "default")
    said = cli(*words.split(), code=exits.FAILED if words == "doctor" else exits.STORAGE)
    assert "Connect timeout" in said.out + said.err, "botocore's own words"
    assert 0 < nowhere.waited_s <= MOST_S


@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        # TLS that takes longer than the connection may is a timeout of reading, in urllib3.
        (ReadTimeoutError(endpoint_url="https://sts.us-east-1.amazonaws.com"), True),
        (ConnectionClosedError(endpoint_url="https://sts.us-east-1.amazonaws.com"), True),
        (ConnectTimeoutError(endpoint_url="https://sts.us-east-1.amazonaws.com"), False),
    ],
)
def test_a_slow_network_that_is_reached_gets_the_time_of_all_other_requests(
    error: Exception, is_repeated: bool
) -> None:
    first, patient = Mock(), Mock()
    first.get_caller_identity.side_effect = error
    session = Mock(client=lambda _, config=None: patient if config else first)
    with nullcontext() if is_repeated else pytest.raises(ConnectTimeoutError):
        assert Clients(session).caller is patient.get_caller_identity.return_value
    assert patient.get_caller_identity.call_count == is_repeated
