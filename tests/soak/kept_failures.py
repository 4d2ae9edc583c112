"""A pytest plugin that writes each failure to a file at once, so that a run that is ended early loses none."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures-to", type=Path, help="an existing folder for a file for each failure")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers report to the process that has started them
        config.pluginmanager.register(_KeptFailures(config.getoption("--failures-to")))


class _KeptFailures:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the failure to the test's file. Its first line is the test's id."""
        if not report.failed:
            return
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in report.nodeid)[-150:]
        with (self._folder / f"{name}.log").open("a") as kept:
            print(report.nodeid, report.longreprtext, sep="\n\n", file=kept)
            for title, text in report.sections:
                print(f"--- {title}", text, sep="\n", file=kept)
