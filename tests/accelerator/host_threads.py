"""Tells the simulated device what orders the host threads of a Python program.

What a thread knows (`native/hosts.cpp`) passes to others where the program synchronises them: through locks and all
that Python builds on them (conditions, semaphores, barriers, `queue.Queue`, futures), through events and `SimpleQueue`,
and at the start and end of threads. An attribute that one thread sets and another one sees orders nothing.
"""

from __future__ import annotations

import _thread
import ctypes
import queue
import sys
import threading
import types
from pathlib import Path
from types import TracebackType
from typing import Any

_allocate_lock = _thread.allocate_lock
_SimpleQueue = queue.SimpleQueue
_LOGS = ("logging", "structlog._output")
"""Their locks keep lines whole. An order that comes from them would hide races in programs that log."""


class Handover:
    """What threads leave here for those that come after them."""

    __slots__ = ("_at",)
    _make: Any
    _delete: Any
    _publish: Any
    _learn: Any

    def __init__(self) -> None:
        self._at = self._make()

    def publish(self) -> None:
        self._publish(self._at)

    def learn(self) -> None:
        self._learn(self._at)

    def __del__(self) -> None:
        self._delete(self._at)


class _LockBase:
    """A lock. Who takes it comes after all who have released it."""

    __slots__ = ("_handover", "_lock")
    _make: Any

    def __init__(self) -> None:
        self._lock = self._make()
        self._handover = Handover()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_taken = self._lock.acquire(blocking, timeout)
        if is_taken:
            self._handover.learn()
        return is_taken

    def release(self) -> None:
        self._handover.publish()
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


class Lock(_LockBase):
    __slots__ = ()
    _make = staticmethod(_allocate_lock)

    def locked(self) -> bool:
        return self._lock.locked()


class RLock(_LockBase):
    __slots__ = ()
    _make = staticmethod(_thread.RLock)

    # What `threading.Condition` asks of a lock.

    def _release_save(self) -> Any:
        self._handover.publish()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._handover.learn()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()


class Event(threading.Event):
    """`is_set` takes no lock."""

    def __init__(self) -> None:
        super().__init__()
        self._handover = Handover()

    def set(self) -> None:
        self._handover.publish()
        super().set()

    def is_set(self) -> bool:
        if is_set := super().is_set():
            self._handover.learn()
        return is_set


class SimpleQueue:
    """Who gets an item comes after the thread that has put it, and after no other one."""

    def __init__(self) -> None:
        self._items: Any = _SimpleQueue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        handover = Handover()
        handover.publish()
        self._items.put((handover, item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        handover, item = self._items.get(block, timeout)
        handover.learn()
        return item

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return self._items.empty()

    def qsize(self) -> int:
        return self._items.qsize()

    __class_getitem__: Any = classmethod(types.GenericAlias)


class UnseenGate:
    """What comes after `wait` happens later, but the device does not know it. For tests of races."""

    def __init__(self) -> None:
        self._lock = _allocate_lock()
        self._lock.acquire()

    def open(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


def follow_threads(library: Path) -> None:
    """From now on the locks and threads that are made tell `library`, the device, what they order."""
    # With the interpreter's lock, which these short calls need not release.
    device = ctypes.PyDLL(str(library))
    device.sim_make_handover.restype = ctypes.c_void_p
    for function in (device.sim_delete_handover, device.sim_publish_to, device.sim_learn_from):
        function.argtypes, function.restype = [ctypes.c_void_p], None
    Handover._make, Handover._delete = device.sim_make_handover, device.sim_delete_handover
    Handover._publish, Handover._learn = device.sim_publish_to, device.sim_learn_from
    device.sim_begin_thread.argtypes, device.sim_begin_thread.restype = [ctypes.c_char_p], None
    device.sim_begin_thread(threading.current_thread().name.encode())
    patched: Any = threading
    patched.Lock = patched._allocate_lock = _unless_of_logs(Lock, _allocate_lock)
    patched.RLock = _unless_of_logs(RLock, _thread.RLock)
    patched.Event = Event
    for module in list(sys.modules.values()):  # some have imported it by name already
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if names.get("SimpleQueue") is _SimpleQueue:
            names["SimpleQueue"] = SimpleQueue
    _follow_starts_and_ends(threading.Thread, device.sim_begin_thread)


def _unless_of_logs(followed: Any, plain: Any) -> Any:
    def make_lock() -> Any:
        return plain() if sys._getframe(1).f_globals.get("__name__") in _LOGS else followed()

    return make_lock


def _follow_starts_and_ends(thread: Any, begin_thread: Any) -> None:
    start, run, join, is_alive = thread.start, thread._bootstrap_inner, thread.join, thread.is_alive

    def start_followed(self: Any) -> None:
        self._handover = Handover()
        self._handover.publish()
        start(self)

    def run_followed(self: Any) -> None:
        begin_thread(self.name.encode())
        self._handover.learn()
        try:
            run(self)
        finally:
            self._handover.publish()

    def learn_if_over(self: Any) -> bool:
        is_over = not is_alive(self)
        if is_over and hasattr(self, "_handover"):
            self._handover.learn()
        return is_over

    def join_followed(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        learn_if_over(self)

    thread.start, thread._bootstrap_inner, thread.join = start_followed, run_followed, join_followed
    thread.is_alive = lambda self: not learn_if_over(self)
