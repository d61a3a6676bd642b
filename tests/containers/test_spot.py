"""A worker hears of its host's end from the instance itself, and tells Ray once.

The metadata service is a real HTTP server that asks for version 2's token, as instances do.
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from containers import spot
from containers.spot import Instance, Notice
from contract import times
from tests.eventually import eventually
from tests.loopback import answering

NOTICE = '{"action": "terminate", "time": "2026-11-21T09:32:00Z"}'


class Metadata:
    """The instance's metadata."""

    notice = ""
    asked = 0
    tokens = 0
    refuses = 0
    throttles = 0
    endpoint = ""

    def answer(self, request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str]:
        if request.command == "PUT":
            assert request.path == "/latest/api/token"
            assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 60
            if self.throttles:
                self.throttles -= 1
                return 503, ""
            self.tokens += 1
            return 200, f"token-{self.tokens}"
        assert request.path == "/latest/meta-data/spot/instance-action"
        self.asked += 1
        token = request.headers.get("X-aws-ec2-metadata-token")
        if token != f"token-{self.tokens}" or self.refuses:
            self.refuses = 0
            return 401, ""
        return (200, self.notice) if self.notice else (404, "not found")


@pytest.fixture
def server() -> Iterator[Metadata]:
    found = Metadata()
    with answering(found.answer) as found.endpoint:
        yield found


def test_a_notice_says_what_happens_and_when() -> None:
    began = 1_795_253_400.0  # 09:30:00
    in_two_minutes = Notice(action="terminate", at=began + 120)
    assert spot.parse(NOTICE, now=began) == in_two_minutes
    for odd in ("", "{}", '{"action": "stop", "time": "soon"}', "[1]"):
        assert spot.parse(odd, now=began) == in_two_minutes
    assert Notice(action="stop", at=time.time() + 60).seconds() in (59, 60)
    assert Notice(action="stop", at=time.time() - 60).seconds() == 0, "never before now"


def test_without_a_notice_there_is_none_and_the_token_is_kept(server: Metadata) -> None:
    instance = Instance(server.endpoint)
    assert [instance.notice() for _ in range(3)] == [None] * 3
    assert (server.tokens, server.asked) == (1, 3)
    server.notice = NOTICE
    notice = instance.notice()
    assert notice is not None
    assert notice.action == "terminate"


class Watch:
    """A watch that runs until it ends by itself."""

    def __init__(self, server: Metadata, *answers: bool) -> None:
        """``answers``: Ray's."""
        self.told: list[Notice] = []
        self.said: list[str] = []

        def drain(notice: Notice) -> bool:
            self.told.append(notice)
            return answers[len(self.told) - 1]

        options = {"endpoint": server.endpoint, "poll_s": 0.01}
        given = (drain, self.said.append, threading.Event())
        self._thread = threading.Thread(target=spot.watch, args=given, kwargs=options, daemon=True)
        self._thread.start()

    def wait(self) -> int:
        """How often Ray was told."""
        self._thread.join(10)
        assert not self._thread.is_alive()
        return len(self.told)


def test_ray_is_told_once_and_again_only_if_it_did_not_listen(server: Metadata) -> None:
    server.notice = json.dumps({"action": "terminate", "time": "2000-01-01T00:00:00Z"})
    once = Watch(server, True)
    assert once.wait() == 1
    (said,) = once.said
    assert said.endswith(" terminate in 0 s")
    assert Watch(server, False, False, True).wait() == 3


def test_an_instance_that_does_not_answer_at_first_is_asked_until_it_does(server: Metadata) -> None:
    """Metadata that are late or throttled when a container starts hide no later notice."""
    server.throttles = 20
    server.notice = NOTICE
    late = Watch(server, True)
    assert late.wait() == 1
    (silent, notice) = late.said
    assert "HTTP 503" in silent
    assert " terminate " in notice


def test_an_instance_that_has_answered_and_then_refuses_its_token_is_asked_again(
    server: Metadata,
) -> None:
    watch = Watch(server, True)
    eventually("questions", lambda: server.asked >= 3, every_s=0.01)
    server.refuses = 1
    server.notice = NOTICE
    assert watch.wait() == 1
    assert server.tokens == 2


def test_ray_ends_a_node_before_its_host_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="of-this-node\n")

    monkeypatch.setattr(subprocess, "run", run)
    drain = spot.Drain(head="10.0.0.5", address="10.0.0.6", environment={}, say=pytest.fail)
    assert drain(Notice(action="terminate", at=time.time() + 100))
    _, told = commands
    assert told[told.index("--node-id") + 1] == "of-this-node"
    left = int(told[told.index("--deadline-remaining-seconds") + 1])
    assert 100 - times.SPOT_MARGIN_S - 5 < left <= 100 - times.SPOT_MARGIN_S


def test_the_watch_ends_with_its_node(server: Metadata) -> None:
    ended = threading.Event()
    ended.set()
    spot.watch(lambda _: True, lambda _: None, ended, endpoint=server.endpoint, poll_s=5)
    assert server.asked == 0
