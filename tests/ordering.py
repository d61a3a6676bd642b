"""Start the longest files of tests first, and show what each file took.

``--dist loadfile`` hands out whole files, by itself those with the most tests first; with
``--no-loadscope-reorder`` it keeps the order in which they are collected. Files that share what is
slow to make go to one worker, as if they were a single file.

``make test-slow ARGS=--table=FILE`` shows what each file takes. Nobody has to write that down: long
files take long, so the longest text comes first.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Container
from pathlib import Path
from typing import Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_MARKERS: Final = ("night", "long", "slow")
#: Files of quick tests that share what takes six seconds to start.
_TOGETHER: Final = (
    # The CDK's process, and templates; test_deploy has deployments of its own.
    re.compile(r"tests/stacks/test_(?!deploy\.py)"),
    # The process with torch that others are forked from.
    re.compile(r"tests/training/test_(ddp|lease|metrics|process_group|recipe_steps)\.py"),
)

_seconds: defaultdict[str, float] = defaultdict(float)
_outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
_figures: dict[str, object] = {}  # what tests have measured, by ``record_property``


def _key(nodeid: str, keywords: Container[str]) -> str:
    file = nodeid.partition("::")[0]
    return " ".join([file, *[each for each in _MARKERS if each in keywords][:1]])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ordering of files")
    group.addoption("--table", metavar="FILE", help="append what each file of tests took")


def unit(nodeid: str) -> str:
    """Name of what one worker gets with a test: its file, or several."""
    file = nodeid.partition("::")[0]
    return next((each.pattern for each in _TOGETHER if each.match(file)), file)


class _ByUnit(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByUnit | None:
    return _ByUnit(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # once the tests that are left out are gone
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    # A single process keeps the order of names, which the tests in containers depend on.
    if hasattr(config, "workerinput"):
        sizes: Counter[str] = Counter()
        for path, nodeid in {(item.path, item.nodeid.partition("::")[0]) for item in items}:
            sizes[unit(nodeid)] += path.stat().st_size
        items.sort(key=lambda item: -sizes[unit(item.nodeid)])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    key = _key(report.nodeid, report.keywords)
    _seconds[key] += report.duration
    _figures.update(report.user_properties)
    if report.when == "call" or report.outcome != "passed":
        _outcomes[key][report.outcome] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if table := config.getoption("table"):
        with Path(table).open("a") as file:
            for key, found in sorted(_outcomes.items()):
                cells = key.split()[0], sum(found.values()), found["passed"], found["failed"]
                file.write(f"| {' | '.join(map(str, cells))} | {_seconds[key]:.0f} |\n")
            for name, figures in _figures.items():
                file.write(f"| {name}: {figures} | | | | |\n")
