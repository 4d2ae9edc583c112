"""SIGTERM, by which launchers and schedulers end processes: a rank then saves at the end of its step before it leaves.

torchrun sends it to all ranks when machines join, Slurm before it takes a job's nodes for another one, Kubernetes
before it deletes a pod. All of them wait for some time (30 s by default) before they send SIGKILL.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import structlog

from varuna.distributed.departure import Departure

__all__ = ["save_before_termination"]

_log = structlog.get_logger("varuna")


def save_before_termination(departure: Departure) -> None:
    """Makes the first SIGTERM request a save at the end of the step, after which all ranks leave; a second one ends the
    process at once.

    Does nothing when the script handles the signal itself, or when this is not the main thread, which alone may.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A thread: the main thread may be inside the lock or the stream that the request and its log line need.
        threading.Thread(target=_request_save, args=(departure,), name="varuna-termination", daemon=True).start()

    signal.signal(signal.SIGTERM, handle)


def _request_save(departure: Departure) -> None:
    _log.warning("SIGTERM: saving at the end of the step, and leaving")
    departure.request_save_first(may_stay=False)
