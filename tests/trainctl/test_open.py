"""``trainctl open`` and ``trainctl report``: pages about a deployment and a run, or a program."""

import json
import re
import socket
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.aws.deployment import LOCAL_ACCOUNT
from training.record.goodput import Activity


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the browser was sent to; commands write to a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    monkeypatch.setattr("webbrowser.open", found.append)
    return found


# --- report
class Frame(HTMLParser):
    """What a file with a report consists of."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def page(self) -> str | None:
        ((_, frame),) = [each for each in self.tags if each[0] == "iframe"]
        assert frame["sandbox"] is None, "nothing is allowed in it"
        return frame["srcdoc"]


def test_a_page_that_another_job_has_put_there_can_run_and_send_nothing(
    account: Account, tmp_path: Path, cli: Cli
) -> None:
    hostile = """"></iframe><script>fetch('//evil')</script>'<img src=//evil> &quot; \xff"""
    account.objects["runs/first/report.html"] = hostile.encode("latin-1")
    cli("report first --no-browser")
    found = Frame(tmp_path / "first-report.html")
    assert found.page == hostile.replace("\xff", "\ufffd"), "it stays inside"
    assert [tag for tag, _ in found.tags] == ["meta", "meta", "title", "iframe"]
    # Which the frame inherits.
    policy = found.tags[1][1]["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_a_report_is_fetched_and_opened(
    account: Account, cli: Cli, opened: list[str], tmp_path: Path
) -> None:
    account.objects["runs/first/report.html"] = b"<html>first"
    assert cli("report first").out == "first-report.html\n"
    file = tmp_path / "first-report.html"
    assert Frame(file).page == "<html>first"
    assert opened == [file.as_uri()]
    # Written again when the run goes on; the newest one counts.
    account.objects["runs/first/report.html"] = b"<html>more"
    cli("report first --no-browser")
    assert Frame(file).page == "<html>more"
    assert len(opened) == 1


# --- open
def test_the_token_is_printed_for_other_commands(account: Account, cli: Cli) -> None:
    assert cli("open --token").out == "the-token-of-ray\n"
    assert account.changes == []


@pytest.mark.parametrize(
    ("region", "page"),
    [
        ("eu-west-1", "https://eu-west-1.console.aws.amazon.com/cloudwatch/home?region=eu-west-1"),
        ("cn-north-1", "https://console.amazonaws.cn/cloudwatch/home?region=cn-north-1"),
        ("us-gov-west-1", "https://console.amazonaws-us-gov.com/cloudwatch/home?region=us-gov-w"),
    ],
)
def test_the_cloudwatch_dashboard_opens_in_the_console_of_the_region(
    account: Account,
    cli: Cli,
    opened: list[str],
    region: str,
    page: str,
) -> None:
    account.region = region
    shown = cli("open --dashboard").out.strip()
    assert shown.startswith(page)
    assert shown.endswith("#dashboards/dashboard/training")
    assert opened == [shown]
    cli("open --dashboard --no-browser")
    assert len(opened) == 1


def test_a_local_deployment_needs_no_tunnel(account: Account, cli: Cli) -> None:
    """Its nodes are containers of this machine."""
    account.account_id = LOCAL_ACCOUNT
    account.wanted["head-service"] = 1
    assert cli("open").out == "http://10.0.0.0:8265\n"


#: Carries a tunnel until its first connection, as the plug-in would.
PLUGIN = """#!{python}
import json, socket, sys
if "--version" in sys.argv:
    sys.exit(print("1.2.700.0"))
request = json.loads(sys.argv[5])
print(request["Target"], request["Parameters"]["portNumber"], flush=True, file=open({log!r}, "w"))
port = int(request["Parameters"]["localPortNumber"][0])
socket.create_server(("127.0.0.1", port)).accept()
"""
#: What Jupyter Lab 4.6 prints.
PRINTED = "[I 19:34:02.123 ServerApp] http://localhost:{port}/lab?token={token}"
TOKEN = "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f6071"


@pytest.mark.parametrize("on", ["nodes", "head"])
def test_a_notebook_opens_where_its_program_runs_with_its_token_and_terms(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on: str
) -> None:
    account.add("job")
    account.change_order("job", on=on, hang_s=600)
    account.add_head("job", "head", containers=[{"runtimeId": "r0"}])
    address = {"name": "privateIPv4Address", "value": "10.0.0.7"}
    containers = [{"runtimeId": "r7"}]
    account.add_worker("w7", "RUNNING", attachments=[{"details": [address]}], containers=containers)
    activity = Activity(nodes=("10.0.0.7",))
    account.objects["runs/r1/jobs/job.activity"] = json.dumps(activity.to_json()).encode()
    stream, target = ("job/ray/head", "head_r0") if on == "head" else ("worker/ray/w7", "w7_r7")
    plugin = tmp_path / "session-manager-plugin"
    plugin.write_text(PLUGIN.format(python=sys.executable, log=str(tmp_path / "asked")))
    plugin.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(plugin))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by a notebook of this machine
        port = taken.getsockname()[1]
        account.logs[stream] = [PRINTED.format(port=port, token=TOKEN), "token=8888"]
        said = cli(f"open r1 --port {port}", code=1)  # the tunnel ends
    found = re.fullmatch(rf"http://localhost:(\d+)/lab\?token={TOKEN}\n", said.out)
    assert found
    assert int(found[1]) != port
    assert (tmp_path / "asked").read_text() == f"ecs:cluster_{target} ['{port}']\n"
    assert re.search(r"\$.* an hour .* 10 min 0 s without a connection", said.err)
