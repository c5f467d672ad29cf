"""`pytest --promises`: which promises have a passing test, which have only failing or skipped ones, and which have none."""

from __future__ import annotations

import textwrap

import pytest

from tests.promise_list import IDS, read_promises


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promises", action="store_true", help="after the run, print which promises have a passing test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(PromiseReport(), "promise-report")


def promised_by(item: pytest.Item) -> list[str]:
    return [id_ for mark in item.iter_markers("promise") for id_ in mark.args]


class PromiseReport:
    def __init__(self) -> None:
        self._promised: dict[str, list[str]] = {}  # by test node
        self._outcomes: dict[str, str] = {}  # by test node

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ids = promised_by(item)
            if unknown := [id_ for id_ in ids if id_ not in IDS]:
                raise pytest.UsageError(f"{item.nodeid} is marked with {unknown}, which tests/promises.txt lacks.")
            if ids:
                self._promised[item.nodeid] = ids

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._promised:
            return
        # The three phases of a test are reported one by one; a failure in any phase is the test's.
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self._outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")

    def by_id(self) -> dict[str, set[str]]:
        outcomes: dict[str, set[str]] = {id_: set() for id_ in IDS}
        for nodeid, outcome in self._outcomes.items():
            for id_ in self._promised[nodeid]:
                outcomes[id_].add(outcome)
        return outcomes

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if not config.getoption("--promises"):
            return
        outcomes = self.by_id()
        # One failing test is enough to doubt a promise that its other tests keep.
        broken = [id_ for id_ in IDS if "failed" in outcomes[id_]]
        kept = [id_ for id_ in IDS if outcomes[id_] >= {"passed"} and id_ not in broken]
        skipped = [id_ for id_ in IDS if outcomes[id_] == {"skipped"}]
        none = [id_ for id_ in IDS if not outcomes[id_]]
        written = {promise.id for promise in read_promises() if promise.node}
        terminalreporter.section("promises")
        for title, ids in (
            ("have a passing test", kept),
            ("have a failing test", broken),
            ("have only skipped tests", skipped),
            ("have no test in this run", none),
            ("pass here, but promises.txt says not yet", [id_ for id_ in kept if id_ not in written]),
        ):
            terminalreporter.write_line(f"{len(ids):4d} of {len(IDS)} {title}")
            for line in textwrap.wrap(" ".join(ids), 100):
                terminalreporter.write_line(f"       {line}")
