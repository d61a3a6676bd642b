"""``trainctl ui`` and ``trainctl top``: who may read the pages, what they show, what they cost."""

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from contract.text import percent
from tests.aws.calls import refused
from tests.eventually import eventually
from tests.trainctl.account import Account
from tests.trainctl.browser import Browser, browser
from tests.trainctl.conftest import Cli
from tests.training import test_report as sample
from tests.training.test_report import Page
from trainctl.aws.deployment import Deployment
from trainctl.runs.curves import Curve, LiveRecord
from trainctl.ui.pages import Pages
from trainctl.ui.server import Server
from training.record.events import Step, to_json

#: What a job may put where a page shows it: markup, an end of an attribute, a turn of the text.
HOSTILE = """"><img src=x onerror="document.title='owned'">'{{ 7 * 7 }}\u202e\x1b[2J"""
#: A job's id that Step Functions takes, and that a shell would take apart.
ODD = "it's-(odd)!@run"
RUNNING = "resnet-275-lusab-babad"


def many(account: Account, number: int = 300, *, running: int = 8, queued: int = 20) -> None:
    """Jobs of two people, up to resnet-299; of those that have ended each third has failed."""
    account.shape |= {"max_heads": running, "max_workers": 100}
    for each in range(300 - number, 300):
        job, age = f"resnet-{each:03}-lusab-babad", timedelta(minutes=10 * (300 - each))
        began = account.now - age
        is_over, is_queued = each < 300 - queued - running, each >= 300 - queued
        more: dict[str, Any] = {}
        if is_over:
            more = {"status": "SUCCEEDED", "stopDate": began + timedelta(minutes=8)}
            if not each % 3:
                cause = {"status": "failed", "reason": "failed: user code exit 1", "exit_code": 1}
                more |= {"status": "FAILED", "cause": json.dumps(cause)}
            stamps = {"pullStartedAt": began, "stoppedAt": more["stopDate"]}
            event = {"taskArn": f"t/h{each}", "group": f"job:{job}", "startedBy": "AWS Step"}
            account.task_events.append(event | {key: at.isoformat() for key, at in stamps.items()})
        account.add(job, run=f"resnet-{each:03}", startDate=began, **more)
        who = ("anna", "bernhard")[each % 2]
        account.change_order(job, nodes="1", submitter=f"{who}@example.com")
        if not (is_over or is_queued):
            account.add_head(job, f"head{each}", pullStartedAt=began, startedAt=began)
            account.add_worker(f"w{each}", "RUNNING", job=job, group=f"job:{job}")
            reached = {"time": 1, "job": job, "step": 30 + each % 7 * 9, "total_steps": 120}
            key = f"runs/resnet-{each:03}/progress.json"
            account.objects[key] = json.dumps(reached).encode()


def record(account: Account, run: str = "resnet-275", *, epochs: int = 3, steps: int = 20) -> None:
    """The record of a run of two ranks, and lines of its log."""
    content = "".join(f"{json.dumps(to_json(each))}\n" for each in sample.epochs(epochs, steps))
    account.objects[f"runs/{run}/metrics.jsonl"] = content.encode()
    account.objects[f"runs/{run}/result.json"] = b'{"status": "stopped"}'
    account.objects[f"runs/{run}/report.html"] = b"<script>document.title='owned'</script>"
    account.logs["job/ray/head275"] = ["epoch 1", HOSTILE]


class Served(NamedTuple):
    """A server on loopback."""

    account: Account
    server: Server

    def get(self, path: str = "", *, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
        """Status, text and headers of an answer."""
        asked = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        whole = path if path.startswith("/") else f"/{self.server.token}/{path}"
        asked.request(method, whole, headers=headers)
        answer = asked.getresponse()
        found = answer.status, answer.read().decode(), answer.headers
        asked.close()
        return found


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def deployment(account: Account) -> Deployment:
    session: Any = SimpleNamespace(region_name="us-east-1", client=lambda *_, **__: account)
    return Deployment(session)


@contextmanager
def serving(account: Account) -> Iterator[Served]:
    with Server(Pages(deployment(account))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield Served(account, server)
        server.shutdown()


@pytest.fixture
def served(account: Account) -> Iterator[Served]:
    many(account)
    record(account)
    with serving(account) as found:
        yield found


# --- who may read ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("", {}, 200),
        ("", {"Host": "localhost:{port}"}, 200),
        ("", {"Host": "evil.example:{port}"}, 403),  # a name that resolves to this machine
        ("", {"Host": "127.0.0.1"}, 403),
        ("/", {}, 404),
        ("/jobs/x", {}, 404),
        ("/A{token}/", {}, 404),
        ("/%C3%A9/", {}, 404),
    ],
)
def test_only_who_has_the_address_reads_a_page(
    served: Served, path: str, headers: dict[str, str], status: int
) -> None:
    given = {"port": served.server.server_port, "token": served.server.token}
    headers = {name: text.format(**given) for name, text in headers.items()}
    found, page, sent = served.get(path.format(**given), **headers)
    assert (found, "resnet" in page) == (status, status == 200)
    assert served.server.server_address[0] == "127.0.0.1"
    policy = sent["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (sent["Referrer-Policy"], sent["Cache-Control"]) == ("no-referrer", "no-store")
    assert len(served.server.token) >= 22, "128 random bits"
    assert served.get(path, method="POST")[0] == 501


def test_the_address_is_printed_and_opened_until_ctrl_c(
    account: Account, cli: Cli, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def interrupt(_server: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupt)
    shown = [""]

    def look(address: str) -> None:
        file = Path(address.removeprefix("file://"))
        assert file.stat().st_mode & 0o77 == 0, "only its user reads where it leads"
        shown.append(file.read_text().partition("url=")[2].rstrip('">'))
        opened.append(address)

    monkeypatch.setattr("webbrowser.open", look)
    assert cli("ui").out.splitlines() == shown[1:] != []
    token = shown[1].split("/")[3]
    assert token not in opened[0], "all users of a machine see what a browser is started with"
    # A tunnel or a bookmark holds: port and token stay.
    assert cli("ui --no-browser").out.split() == shown[1:]
    assert (state / "trainctl" / "ui-token").stat().st_mode & 0o77 == 0
    assert account.changes == []


# --- what is shown --------------------------------------------------------------------------------
def test_the_list_has_what_ls_prints(served: Served, cli: Cli) -> None:
    page = Page(served.get()[1])
    printed = cli("ls --limit 300").out.splitlines()
    shown = [a["href"] for tag, a in page.elements if tag == "a" and "data-run" in a]
    # Running before queued before ended, each the newest first.
    printed = [f"jobs/{line.split()[0]}" for line in printed[1:]]
    assert shown == printed[20:28] + printed[:20] + printed[28:]
    for word in ("queued 20", "running", "failed (1)", "anna", "bernhard", "$0.0",
                 "8 running, 20 queued, $"):  # fmt: skip
        assert word in page.text, word
    assert not re.search(r"\$0(?!\.)", page.text), "what has not cost anything yet has no price"
    assert "status bad" in served.get()[1]
    # What has ended since does not stay as it was.
    cause = {"status": "stopped", "reason": "stopped by user", "exit_code": 143}
    ended = {"status": "FAILED", "cause": json.dumps(cause), "stopDate": served.account.now}
    served.account.executions[RUNNING] |= ended
    assert "stopped" not in page.text
    assert "stopped" in served.get()[1]


def test_a_job_is_shown_with_curves_nodes_lines_and_commands(served: Served) -> None:
    page = Page(served.get(f"jobs/{RUNNING}")[1])
    for words in ("training 0.", "Accuracy 90.00%", "rank 1 0.2", "36.67%", "12.0 GB",
                  "head275", "epoch 1", f"trainctl logs {RUNNING} --follow"):  # fmt: skip
        assert words in page.text, words
    assert re.search("progress step.*cost .*epoch 1.*Loss.*Job .*Nodes", page.text), "the order"
    lines = [tag["points"] for name, tag in page.elements if name == "polyline"]
    assert len(lines) == 2 + 1 + 3 + 1 + 1 + 2 + 2
    assert all(line and re.fullmatch(r"(\d+\.\d,\d+\.\d ?)+", line) for line in lines)
    assert ("a", {"href": "../report/resnet-275"}) in page.elements
    failed = served.get("jobs/resnet-000-lusab-babad")[1]
    assert "failed: user code exit 1" in failed
    assert "data-over" in failed
    assert "none" in served.get("jobs/none")[1]


def test_a_chart_has_axes_and_shares_begin_at_zero() -> None:
    shares = {"rank 0": [(1, 0.99), (51, 0.99)], "rank 1": [(1, 0.79), (51, 0.79)]}
    curve = Curve("GPU utilization", percent, shares)
    chart = curve.chart()
    assert chart[1:] == (("99.00%", "0.00%"), ("1", "51"))
    assert [points for *_, points, _ in chart.lines] == ["0.0,0.0 300.0,0.0", "0.0,18.2 300.0,18.2"]
    assert curve._replace(from_zero=False).chart().ticks == ("99.00%", "79.00%")


@pytest.mark.parametrize("steps", [100, pytest.param(4_000, marks=pytest.mark.night)])
def test_two_hundred_thousand_steps_draw_in_a_second(account: Account, steps: int) -> None:
    record(account, epochs=50, steps=steps)
    key = "runs/resnet-275/metrics.jsonl"
    live = LiveRecord(deployment(account).bucket, "resnet-275")
    # One more step, which stands out, the next two, and one that is still being written.
    for step, loss in enumerate((9.0, 0.1, 0.1), 50 * steps + 1):
        new = Step(step=step, epoch=51, loss=loss, lr=0.1, grad_norm=1.0, time=1.8e9)
        account.objects[key] += f"{json.dumps(to_json(new))}\n".encode()
    damaged = b'{"type": "step", "loss": 1.2.3, "time": 1}\n{"type": "st'
    account.objects[key] = account.objects[key].replace(b"}\n", b', "lease": 1}\n') + damaged
    before = time.process_time()
    charts = [curve.chart() for curve in live.curves()]
    assert time.process_time() - before < 1
    assert ",0.0 " in charts[0].lines[0][2]  # what stands out
    assert charts[0].ends[1] == f"{50 * steps + 3:,}"
    assert charts[2].ticks[0] == "2"  # no step took longer
    # A record that a resumed run has cut is read from its beginning.
    record(account)
    account.modified[key] = account.now + timedelta(minutes=2)
    assert live.curves()[0].chart().ends == ("1", "60")


def test_runs_are_compared_on_one_chart(served: Served) -> None:
    record(served.account, "resnet-274", epochs=2)
    page = Page(served.get("compare?runs=resnet-275,resnet-274")[1])
    names = [tag["data-name"] for _, tag in page.elements if "data-name" in tag]
    assert (names[0], names[2]) == ("resnet-275 training", "resnet-274 training")
    assert "../../x" in served.get("compare?runs=../../x")[1], "the wrong name"


def test_what_others_have_written_is_text_and_a_report_is_in_a_sandbox(served: Served) -> None:
    account = served.account
    account.add(ODD, run="r1", status="FAILED", error="x", cause=HOSTILE)
    account.change_order(ODD, command=["echo", HOSTILE])
    account.add_head(ODD, "odd", lastStatus="STOPPED", containers=[{"reason": HOSTILE}])
    for path in ("", f"jobs/{RUNNING}", f"log/{RUNNING}", "compare?runs=resnet-275",
                 "jobs/it%27s-(odd)!@run", f"jobs/{HOSTILE[:9]}"):  # fmt: skip
        page = Page(served.get(path.replace(" ", "%20"))[1])
        names = {name for name, _ in page.elements}
        assert not names & {"img", "iframe", "form"}, path
        assert [tag for tag in page.elements if tag[0] == "script"] == [
            ("script", {"src": f"/{served.server.token}/ui.js", "defer": ""})
        ]
        assert not any(key.startswith("on") for _, tag in page.elements for key in tag)
        assert not re.search("[\u202e\x1b]", page.text)
    page = Page(served.get("jobs/it%27s-(odd)!@run")[1])
    assert """<img src=x onerror="document.title='owned'">'{{ 7 * 7 }}""" in page.text
    assert """trainctl logs 'it'"'"'s-(odd)!@run'""" in page.text, "a shell takes it as one word"
    _, _, sent = served.get("report/resnet-275")
    assert sent["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
    assert "../../x" in served.get("report/..%2F..%2Fx")[1], "the wrong name"


def test_all_pages_that_are_open_ask_aws_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server.pages, "_every_s", 60.0)

    def asked() -> int:
        before = len(served.account.calls)
        served.get()
        return len(served.account.calls) - before

    assert asked() > 300
    assert asked() == 0
    clock = time.monotonic() + 61
    monkeypatch.setattr("trainctl.ui.pages.time.monotonic", lambda: clock)
    assert asked() < 100, "what has ended stays as it is"


def test_three_hundred_jobs_cost_two_cpu_seconds_in_each(served: Served, cli: Cli) -> None:
    before = time.process_time()
    assert served.get()[0] == 200
    cli("ls --limit 300")
    assert time.process_time() - before < 4


def test_an_error_of_aws_is_a_line_on_the_page(served: Served) -> None:
    served.account.fails["list_executions"] = refused("Odd", "ListExecutions", "its own words")
    assert "its own words" in served.get()[1]


# --- top ------------------------------------------------------------------------------------------
def test_top_shows_a_job_once_where_nobody_watches(account: Account, cli: Cli) -> None:
    many(account)
    record(account)
    shown = cli("top", RUNNING).out
    for line in (
        r"job +resnet-275",
        r"state +running",
        r"cost +\$\d\.\d\d",
        r"Loss training +[▄▅]▃.* 0\.\d+",
        r"Seconds a step rank 1 +█▂▂ 0\.2",
        r"MFU +▇██ 36\.67%",
        r"GPU utilization rank 1 +▇▇▇ 79\.00%",
        r"Memory rank 1 +███ 12\.0 GB",
    ):
        assert re.search(f"(?m)^{line}", shown), (line, shown)
    found = cli.json("top", RUNNING)
    assert (found["state"], found["curves"]["Memory"]["rank 0"][0]) == ("running", [20, 11e9])
    # The steps between two reports, of which an evaluation is none.
    assert found["curves"]["Seconds a step"]["all"] == [[20, 0.5], [40, 0.5], [60, 0.5]]


# --- in a browser ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


VISIBLE = "return [...document.querySelectorAll('.jobs tbody tr')].filter(e => !e.hidden).length"


FIRST = "document.querySelector('.jobs tbody tr:not([hidden])')"
POINT = """const box = document.querySelector("svg").getBoundingClientRect();
    document.querySelector("svg").dispatchEvent(new PointerEvent("pointermove",
    {bubbles: true, clientX: box.left + box.width * 19 / 59}))"""
OUTPUT = "document.querySelector('output')"
#: Cards with more than they show, and no way to see it.
CUT = """return [...document.querySelectorAll(".card")].filter(e => e.scrollWidth > e.clientWidth
    && getComputedStyle(e).overflowX != "auto").map(e => e.innerText)"""


@pytest.mark.slow
def test_a_browser_filters_opens_a_job_and_redraws_it(served: Served, window: Browser) -> None:
    window.shows(1280)
    window.go(served.server.url)
    assert window.run(VISIBLE) == 300
    window.run("document.querySelector('input').focus()")
    window.type("failed ANNA")
    assert window.run(VISIBLE) == 46
    window.run("document.querySelectorAll('.jobs th a')[4].click()")  # by age
    eventually("the order", lambda: "by=age" in window.run("return location.search"))
    assert window.run(f"return {FIRST}.innerText").startswith("resnet-2")
    window.run(f"{FIRST}.querySelector('a').click()")
    eventually("the job", lambda: "resnet-" in window.run("return document.title"))
    window.run("document.querySelector('.over a').click()")
    eventually("the list", lambda: window.run("return document.title") == "Jobs")
    assert window.run(VISIBLE) == 46, "the filter is in the links"
    window.go(f"{served.server.url}jobs/{RUNNING}")
    shown = "return document.querySelector('.plot p').innerText"
    before = window.run(shown)
    window.run(POINT)
    assert re.match(r"step 20: training \d", window.run(f"return {OUTPUT}.innerText"))
    window.run("getSelection().selectAllChildren(document.querySelector('.card pre'))")
    chosen = window.run("return getSelection().toString()")
    record(served.account, epochs=1)
    served.account.logs["job/ray/head275"].append("epoch 2")
    key = "runs/resnet-275/metrics.jsonl"
    served.account.modified[key] = served.account.now + timedelta(minutes=1)
    eventually("the curve of today", lambda: window.run(shown) != before)
    assert window.run("return getSelection().toString()") == chosen != ""
    window.run("getSelection().removeAllRanges()")
    lines = "return document.querySelector('.card pre').innerText"
    eventually("the new line", lambda: "epoch 2" in window.run(lines))
    assert window.run("return document.title") == RUNNING, "nothing hostile has run"
    window.go(f"{served.server.url}log/{RUNNING}?find=epoch")
    assert window.run(VISIBLE.replace(".jobs", ".lines")) == 2


@pytest.mark.night
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_pages_fit_and_follow_the_theme(
    served: Served, window: Browser, tmp_path: Path, width: int, theme: str
) -> None:
    page = sample.written(tmp_path).encode()
    served.account.objects["runs/resnet-274/report.html"] = page
    window.shows(width, theme=theme)
    paths = ("", f"jobs/{RUNNING}", "jobs/resnet-000-lusab-babad", "jobs/none", f"log/{RUNNING}")
    for path in (*paths, "compare?runs=resnet-275", "report/resnet-274"):
        window.go(f"{served.server.url}{path}")
        assert window.run("return document.documentElement.scrollWidth - innerWidth") <= 0, path
        assert window.run(CUT) == [], path
        color = window.run("return getComputedStyle(document.body).backgroundColor")
        assert color == {"light": "rgb(246, 247, 249)", "dark": "rgb(15, 19, 25)"}[theme]


@pytest.mark.night
def test_a_report_of_others_runs_nothing(served: Served, window: Browser) -> None:
    window.go(f"{served.server.url}report/resnet-275")
    assert window.run("return document.title") == ""
