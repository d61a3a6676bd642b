"""A session's token reaches the plug-in by its environment, which other users cannot read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainctl.aws.errors import CliError
from trainctl.aws.sessions import PluginCall, Sessions
from trainctl.setup.plugin import require_plugin

TOKEN = "of-the-session"


@pytest.mark.parametrize("kind", ["shell", "tunnel"])
def test_no_argument_of_the_plug_in_has_the_sessions_token(kind: str) -> None:
    ecs = {"session": {"sessionId": "s", "streamUrl": "wss://s", "tokenValue": TOKEN}}
    ssm = {"SessionId": "s", "StreamUrl": "wss://s", "TokenValue": TOKEN}
    clients: Any = SimpleNamespace(
        ecs=SimpleNamespace(execute_command=lambda **_: ecs),
        ssm=SimpleNamespace(
            meta=SimpleNamespace(endpoint_url="https://ssm"), start_session=lambda **_: ssm
        ),
    )
    sessions = Sessions(clients, cluster="c", region="us-west-2", profile=None)
    task: Any = SimpleNamespace(id="t", runtime_id="r")
    call: PluginCall = (
        sessions.shell(task, "bash")
        if kind == "shell"
        else sessions.tunnel(task, port=1, local_port=2)
    )
    assert TOKEN not in " ".join(call.arguments)
    assert TOKEN in call.variables[call.arguments[0]], "its first argument names the variable"


@pytest.mark.parametrize(
    ("version", "is_refused"), [("1.2.536.0", False), ("1.2.497.0", True), ("", True)]
)
def test_a_plug_in_that_takes_the_token_as_an_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    plugin = tmp_path / "session-manager-plugin"
    plugin.write_text(f"#!/bin/sh\necho {version}\n")
    plugin.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if not is_refused:
        assert require_plugin() == str(plugin)
        return
    with pytest.raises(CliError, match=r"1\.2\.536\.0"):
        require_plugin()
