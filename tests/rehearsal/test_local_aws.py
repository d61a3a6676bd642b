"""The local AWS starts, says what is missing, and leaves no process, however it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rehearsal.local_aws import LocalAws, LocalAwsError, is_healthy, local_aws
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def workers(aws: LocalAws) -> list[str]:
    """Command lines of the processes in the server's group, without the server."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat=,args="], check=True, capture_output=True, text=True
    )
    rows = [line.split(None, 3) for line in listing.stdout.splitlines()]
    return [
        row[3]
        for row in rows
        if int(row[1]) == aws.pid and int(row[0]) != aws.pid and not row[2].startswith("Z")
    ]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_another_port_owner_is_named(aws: LocalAws, tmp_path: Path) -> None:
    port = int(aws.endpoint.rpartition(":")[2])
    with pytest.raises(LocalAwsError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
        local_aws(tmp_path, port=port).__enter__()


def test_missing_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalAwsError, match="run `make venv-aws`"):
        local_aws(tmp_path, python=tmp_path / "python").__enter__()


def test_another_version_of_the_emulator_is_refused(tmp_path: Path, aws: LocalAws) -> None:
    assert aws.pid  # there is an emulator, so what is refused here is its version
    python = tmp_path / "python"
    fake = tmp_path / "packages" / "ministack-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: ministack\nVersion: 9.9.9\n")
    own = ROOT / ".venv-aws" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{fake.parent}:$PYTHONPATH" exec "{own}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(LocalAwsError) as caught:
        local_aws(tmp_path / "aws", python=python).__enter__()
    message = str(caught.value)
    assert "ended with code 2" in message
    assert (
        "reaches into MiniStack 1.5.33, and this Python has 9.9.9: run `make venv-aws`" in message
    )


def test_stopping_leaves_no_process(aws: LocalAws, tmp_path: Path) -> None:
    with local_aws(tmp_path) as other:
        assert other.endpoint != aws.endpoint
        assert is_healthy(other.endpoint)
    assert not is_alive(other.pid)
    assert workers(other) == []


def test_killed_parent_leaves_no_server(aws: LocalAws, tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from rehearsal.local_aws import local_aws
        with local_aws(Path(sys.argv[1])) as aws:
            print(aws.pid, aws.endpoint, flush=True)
            time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid, endpoint = parent.stdout.readline().split()
        assert is_healthy(endpoint)
        parent.kill()
    deadline = time.monotonic() + 30
    while is_alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(pid))
    assert is_healthy(aws.endpoint)  # and only that one


def test_command_prints_what_to_export_and_ends_on_interrupt(aws: LocalAws) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rehearsal", "start", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        variables = dict(
            command.stdout.readline().strip().removeprefix("export ").split("=", 1)
            for _name in aws.environment()
        )
        endpoint = variables["AWS_ENDPOINT_URL"]
        assert variables == aws.environment() | {"AWS_ENDPOINT_URL": endpoint}
        assert is_healthy(endpoint)
        messages = command.stderr.readline()
        command.send_signal(signal.SIGINT)
        try:
            command.communicate(timeout=30)
        finally:
            command.kill()  # or leaving the block would wait for ever
    assert f"answers at {endpoint}" in messages
    assert command.returncode == 0
    assert not is_healthy(endpoint)
