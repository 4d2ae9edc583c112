"""The first SIGTERM asks for a save, unless the script handles the signal itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from varuna.distributed.departure import Departure
from varuna.worker.termination import save_before_termination
from waiting import wait_until


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_one_asks_for_a_save_and_a_second_one_ends_the_process() -> None:
    departure = Departure()
    save_before_termination(departure)
    assert not departure.save_first
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: departure.save_first, "the request")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_scripts_own_handler_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    save_before_termination(Departure())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
