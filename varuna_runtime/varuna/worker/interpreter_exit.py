"""How a worker leaves the Python interpreter: without waiting for, or being aborted by, threads inside gloo."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from varuna.distributed.departure import Departure, end_process
from varuna.distributed.gloo import keep_alive_forever, keep_rest_alive, list_script_groups

__all__ = ["leave_interpreter"]


def leave_interpreter(departure: Departure) -> None:
    """To be called at exit: ends the process at once if the worker leaves, else readies it for a normal shutdown."""
    if departure.end_code is not None:
        end_process(departure.end_code)
    for group in list_script_groups():
        keep_alive_forever(group)
    keep_rest_alive()
    _let_threads_hang()


def _let_threads_hang() -> None:
    """Keeps threads that sit inside gloo from ending this process with SIGABRT while the interpreter shuts down.

    When a peer's process ends first, such a thread wakes, asks for the interpreter's lock and, before Python 3.14, is
    made to exit by unwinding its stack; C++ frames that may not be unwound then call std::terminate. Here that makes
    the thread wait for the end of the process, which is what Python does from 3.14 on.
    """
    if sys.platform != "linux" or sys.version_info >= (3, 14):
        return
    with suppress(OSError, AttributeError):  # another C++ library: nothing is changed
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.argtypes = [ctypes.c_void_p]
        set_terminate.restype = ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
