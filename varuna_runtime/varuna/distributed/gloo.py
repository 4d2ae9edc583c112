"""The part of torch's gloo binding that Varuna uses, with the types that torch's stubs leave out."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, Store

__all__ = [
    "NEVER",
    "GlooGroup",
    "Work",
    "connect_group",
    "keep_alive_forever",
    "keep_rest_alive",
    "let_go",
    "list_script_groups",
]

NEVER = timedelta(days=365)
"""The time limit inside gloo: a gloo wait that runs out destroys its group, so none ever may."""


_let_go: list[weakref.ref[object]] = []


class Future(Protocol):
    def then(self, callback: Callable[[Any], None], /) -> Any: ...


class Work(Protocol):
    """One asynchronous operation. Only a collective's future ever completes without a `wait` (torch 2.13)."""

    def wait(self, timeout: timedelta, /) -> bool: ...
    def get_future(self) -> Future: ...


class GlooGroup(Protocol):
    """A gloo process group; operations raise RuntimeError, or their work does, when a peer is gone."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Work: ...
    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> Work: ...


def keep_alive_forever(group: object) -> None:
    """Keeps a process group alive until the process ends, with a reference that is never released.

    Destroying one joins its threads. At interpreter shutdown, when Python drops all objects, such a thread may be
    stopped for good at the interpreter's lock (`varuna.worker.interpreter_exit`): the join would never end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def list_script_groups() -> list[object]:
    """The process groups that the script has made through `torch.distributed`."""
    return list(dist.distributed_c10d._world.pg_map)


def let_go(group: object) -> None:
    """Takes back `keep_alive_forever`, for a group in which nothing is under way any longer."""
    _let_go.append(weakref.ref(group))
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def keep_rest_alive() -> None:
    """Keeps the groups alive that were let go and are still referred to, in a cycle, say. To be called at exit."""
    for reference in _let_go:
        group = reference()
        if group is not None:
            keep_alive_forever(group)


def connect_group(store: Store, rank: int, size: int, *, address: str, timeout: timedelta) -> GlooGroup:
    """Joins the group whose members share `store`, listening on this machine's `address`.

    Blocks until all members are there. Raises RuntimeError when they are not within `timeout`.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    group = gloo(store, rank, size, options)
    keep_alive_forever(group)
    return cast(GlooGroup, group)
