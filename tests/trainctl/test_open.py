"""``trainctl open`` and ``trainctl report``: pages about a deployment and a run, or a program."""

import json
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.aws.deployment import LOCAL_ACCOUNT
from trainctl.setup.plugin import free_port
from training.record.events import Evaluation, to_json
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


def test_the_report_of_a_program_has_its_scalars_with_axes(
    account: Account, cli: Cli, tmp_path: Path
) -> None:
    name = "train/loss <i>"
    lines = [Evaluation(step=step, epoch=0, measures={name: 2 / step}) for step in (1, 8)]
    content = "\n".join(json.dumps(to_json(line)) for line in lines)
    account.objects["runs/own/metrics.jsonl"] = content.encode()
    cli("report own --no-browser")
    page = Frame(tmp_path / "own-report.html").page
    assert page
    assert "Train/loss &lt;i&gt;" in page
    assert re.findall("<i>(.*?)</i>", page) == ["2", "0.25", "step 1", "8"]
    assert ".plot svg{" in page
    assert not re.search("<script|<link|src=", page), "it is opened without them"


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


def test_a_notebook_opens_where_its_program_runs_with_its_token_and_terms(
    account: Account, cli: Cli
) -> None:
    account.account_id = LOCAL_ACCOUNT
    account.add("job")
    account.change_order("job", on="nodes", hang_s=600)
    account.add_head("job", "head")
    address = {"name": "privateIPv4Address", "value": "10.0.0.7"}
    account.add_worker("w7", "RUNNING", attachments=[{"details": [address]}])
    activity = json.dumps(Activity(nodes=("10.0.0.7",)).to_json())
    account.objects["runs/r1/jobs/job.activity"] = activity.encode()
    # As Jupyter Lab 4.6 prints it.
    page = f":8888/lab?token={'0a1b2c3d4e5f6071' * 3}"
    line = f"[I 19:34:02.123 ServerApp] http://localhost{page}"
    account.logs["worker/ray/w7"] = [line, "token=8888"]
    said = cli("open r1 --port 8888")
    assert said.out == f"http://10.0.0.7{page}\n"
    assert re.search(r"\$.* an hour .* 10 min 0 s without a connection", said.err)


def test_a_port_that_is_taken_here_has_a_stand_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert free_port(taken) != taken
