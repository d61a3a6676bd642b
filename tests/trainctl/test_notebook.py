"""``trainctl notebook``: started through Ray's dashboard on the head, opened through a tunnel.

A small server stands for the head: Ray's jobs and the page. The tunnel is a real process, which
forwards a port as the Session Manager plug-in does.
"""

import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from contract import exits, nodes
from tests.loopback import answering
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl import notebooks
from trainctl.__main__ import main
from trainctl.plugin import free_port, is_free

TOKEN = "the-token-of-ray"
PAGE_TOKEN = nodes.page_token(TOKEN)
READY = f"node: installing\nnode: {nodes.NOTEBOOK_READY}\n"

#: Forwards the session's local port to the head's server; ends when "broken" says so.
PLUGIN = """#!{python}
import json, socket, sys, threading

answer, region, operation, profile, request, endpoint = sys.argv[1:]
assert json.loads(answer)["TokenValue"] == "of-the-session", answer
assert (region, operation) == ("{region}", "StartSession")
assert endpoint == "https://ssm.us-east-1.example"
if {broken}:
    sys.exit("SessionManagerPlugin: the agent is away")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(json.loads(request)["Parameters"]["localPortNumber"][0])))
server.listen()


def pump(one, other):
    while data := one.recv(65536):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)


while True:
    near, _ = server.accept()
    far = socket.create_connection(("127.0.0.1", {port}))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


class Head:
    """Ray's dashboard and the page, at one port; what they were asked is kept."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: list[dict[str, Any]] = []
        self.becomes, self.log = "RUNNING", READY
        """State and log of a job once it has been submitted."""
        self.token = TOKEN
        self.refusals = 0
        """So many orders are refused: the agent has not started."""
        self.port = 0

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str]:
        if request.path.startswith("/lab"):
            return 200, f"page {request.path.partition('token=')[2]}"
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, "Unauthorized"
        _, _, name, what = (request.path.strip("/") + "//").split("/")[:4]
        if request.command == "POST" and not name:
            self.refusals -= 1
            if self.refusals >= 0:
                return 500, "No available agent to submit job, please try again later."
            order = json.loads(body)
            self.submitted.append(order)
            job = {"submission_id": order["submission_id"], "status": self.becomes}
            self.jobs[job["submission_id"]] = job
            return 200, json.dumps({"submission_id": job["submission_id"]})
        if not name:
            return 200, json.dumps([{"submission_id": None, "status": "RUNNING"}, *self.all()])
        if what == "logs":
            return 200, json.dumps({"logs": self.log})
        if what == "stop":
            self.jobs[name]["status"] = "STOPPED"
        return 200, json.dumps(self.jobs[name])

    def all(self) -> list[dict[str, Any]]:
        return [*self.jobs.values()]


@pytest.fixture
def head(account: Account) -> Iterator[Head]:
    """The head of a standing cluster on AWS."""
    account.wanted["head-service"] = 1
    found = Head()
    with answering(found.answer) as address:
        found.port = int(address.rpartition(":")[2])
        yield found


@pytest.fixture
def plugin(
    head: Head, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], None]:
    """Install the plug-in; it is one that works unless told otherwise."""
    monkeypatch.setattr(notebooks, "POLL_S", 0.01)

    def install(broken: bool = False) -> None:
        program = tmp_path / "session-manager-plugin"
        values = {"region": account.region, "port": head.port, "broken": broken}
        program.write_text(PLUGIN.format(python=sys.executable, **values))
        program.chmod(0o755)
        monkeypatch.setattr("shutil.which", lambda _name, **_: str(program))

    install()
    return install


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the browser was shown, through the tunnel; then Ctrl-C is pressed."""
    found: list[str] = []
    pressed: list[threading.Timer] = []

    def opened(address: str) -> None:
        with urllib.request.urlopen(address, timeout=10) as answer:
            found.append(answer.read().decode())
        pressed.append(threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)))
        pressed[-1].start()

    monkeypatch.setattr("webbrowser.open", opened)
    yield found
    for each in pressed:
        each.cancel()
        each.join()


@pytest.mark.usefixtures("plugin")
def test_it_starts_on_the_head_and_opens_through_a_tunnel_until_ctrl_c(
    head: Head, account: Account, pages: list[str], cli: Cli
) -> None:
    port = free_port()
    captured = cli("notebook", "--port", str(port), "--env", "PIP_INDEX_URL=https://mine")
    assert captured.out == f"http://localhost:{port}/lab?token={PAGE_TOKEN}\n"
    assert pages == [f"page {PAGE_TOKEN}"]
    (order,) = head.submitted
    assert order["submission_id"] == "notebook-1"
    # Nothing outside the container reaches it: the tunnel ends inside.
    assert order["entrypoint"] == "python -m containers.notebook --address 127.0.0.1"
    assert order["runtime_env"]["env_vars"] == {
        "PIP_INDEX_URL": "https://mine",
        "RAY_JOB_STOP_WAIT_TIME_S": "300",
    }
    assert "The tunnel is closed; the notebook runs on: trainctl notebook" in captured.err
    assert "trainctl notebook --stop" in captured.err
    assert TOKEN not in captured.out + captured.err
    ports = [each["Parameters"]["portNumber"] for each in account.sent("start_session")]
    assert ports == [["8265"], ["8888"]]
    assert head.jobs["notebook-1"]["status"] == "RUNNING"


@pytest.mark.usefixtures("plugin", "head")
def test_ctrl_c_while_the_page_is_being_opened_closes_the_tunnel_too(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert (
        "The tunnel is closed; the notebook runs on"
        in cli("notebook", "--port", str(free_port())).err
    )


@pytest.mark.usefixtures("plugin", "head")
def test_the_dashboard_is_opened_once_its_tunnel_is_there(
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    port, opened = free_port(), []

    def look(address: str) -> None:
        opened.append((address, is_free(port)))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("webbrowser.open", look)
    said = cli("open", "--port", str(port))
    assert opened == [(f"http://localhost:{port}", False)]
    assert said.out == f"http://localhost:{port}\n"
    with socket.create_server(("127.0.0.1", port)):
        account.calls.clear()
        said = cli("open", "--port", str(port), code=exits.BAD_INPUT)
    assert f"port {port} of this machine is in use: give another one" in said.err
    assert account.changes == []


@pytest.mark.usefixtures("plugin", "pages")
def test_one_that_runs_is_opened_again_and_one_that_was_stopped_is_started_anew(
    head: Head, cli: Cli
) -> None:
    port = str(free_port())
    assert main(["notebook", "--port", port]) == 0
    captured = cli("notebook", "--port", port, "--json", "--env", "A=1")
    assert json.loads(captured.out.partition("\n")[2]) == {
        "address": f"http://localhost:{port}/lab?token={PAGE_TOKEN}",
        "files": "s3://bucket/runs/notebook/output/",
        "run": "notebook",
    }
    assert "--env counts after trainctl notebook --stop" in captured.err
    assert "Stopped. Its files: trainctl download notebook" in cli("notebook", "--stop").err
    assert "No notebook is running." in cli("notebook", "--stop").err
    assert main(["notebook", "--port", port]) == 0
    assert [each["submission_id"] for each in head.submitted] == ["notebook-1", "notebook-2"]


@pytest.mark.usefixtures("plugin")
def test_a_start_that_fails_shows_the_end_of_its_log(head: Head, cli: Cli) -> None:
    head.becomes = "FAILED"
    head.log = "node: installing requirements.txt\nnode: error: no index answers\n"
    said = cli("notebook", "--no-browser", code=exits.FAILED)
    assert "JupyterLab does not start on the head (FAILED):" in said.err
    assert "node: error: no index answers" in said.err
    assert said.out == ""


@pytest.mark.usefixtures("plugin")
def test_a_head_that_has_just_started_is_asked_again(
    head: Head, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.refusals, head.becomes = 2, "FAILED"
    assert main(["notebook", "--no-browser"]) == exits.FAILED
    assert len(head.submitted) == 1
    monkeypatch.setattr(notebooks, "AGENT_S", 0.0)
    head.refusals = 100
    assert "Ray refuses POST /api/jobs/ (500): No available agent" in cli.refuses(
        "notebook", "--no-browser", code=exits.FAILED
    )


@pytest.mark.usefixtures("plugin")
def test_a_start_that_takes_too_long_is_left_to_go_on(
    head: Head, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "START_S", 0.1)
    head.becomes, head.log = "PENDING", "node: installing requirements.txt\n"
    said = cli.refuses("notebook", "--no-browser", code=exits.FAILED)
    assert "is not up after 0 min: installing requirements.txt. It keeps starting" in said
    assert head.jobs["notebook-1"]["status"] == "PENDING"


@pytest.mark.usefixtures("plugin")
def test_a_token_that_has_changed_since_the_start_is_told(head: Head, cli: Cli) -> None:
    head.token = "an older one"
    assert "the head refuses the deployment's token" in cli.refuses(
        "notebook", "--no-browser", code=exits.FAILED
    )
    assert head.submitted == []


def test_a_tunnel_that_does_not_open_tells_what_the_plug_in_says(
    plugin: Callable[[bool], None], head: Head, cli: Cli
) -> None:
    plugin(True)
    said = cli.refuses("notebook", "--no-browser", code=exits.FAILED)
    assert "the tunnel to the head does not open: SessionManagerPlugin: the agent is away" in said
    assert head.submitted == []


@pytest.mark.parametrize(
    ("arguments", "head_runs", "exit_code", "message"),
    [
        ([], False, exits.FAILED, "the standing cluster is down: trainctl cluster up"),
        (["--stop"], False, exits.FAILED, "the standing cluster is down"),
        ([], True, exits.FAILED, "session-manager-plugin is not installed"),
        (["--env", "=1"], True, exits.BAD_INPUT, "--env is '=1': it must be NAME=VALUE"),
    ],
)
def test_what_is_lacking_is_one_sentence(
    account: Account,
    cli: Cli,
    arguments: list[str],
    head_runs: bool,
    exit_code: int,
    message: str,
) -> None:
    account.wanted["head-service"] = int(head_runs)
    said = cli("notebook", *arguments, code=exit_code)
    assert message in said.err
    assert said.out == ""
    assert account.changes == []
