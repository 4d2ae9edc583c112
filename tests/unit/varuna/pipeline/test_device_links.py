"""When links use NCCL, and how an operation on the device is left. The links themselves run in tests/accelerator."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import varuna.assembly.connections
from varuna.assembly.connections import LinkConnector, LinkKind
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.nccl import NcclPair
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.topology import Topology
from varuna.distributed.worker_environment import read_worker_environment
from varuna.pipeline.device_transport import _run_work
from varuna.roles.training_parts import TrainingOptions


def connect_links(devices: list[str], kind: LinkKind, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By rank of a pipeline on devices of these names: the kinds of its connections, or why there are none."""
    store, own = HashStore(), threading.local()
    monkeypatch.setattr(varuna.assembly.connections, "nccl_device_name", lambda _: devices[own.rank])
    monkeypatch.setattr(varuna.assembly.connections, "connect_nccl", lambda *_, **__: object())
    monkeypatch.setattr(Rendezvous, "connect_gloo", lambda *_: object())

    def connect(rank: int) -> str:
        own.rank = rank
        rendezvous = Rendezvous(replace(read_worker_environment({}), rank=rank), Departure())
        rendezvous.store = store
        connector = LinkConnector(rendezvous=rendezvous, device=torch.device("cpu"), kind=kind)
        try:
            made = connector.connect_links(Topology(len(devices), 1, rank))
        except ValueError as error:
            return str(error)
        return "+".join("nccl" if isinstance(each, NcclPair) else "gloo" for each in made if each is not None)

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(connect, range(len(devices))))


def test_links_use_nccl_only_where_the_script_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_links(["GPU-a", "GPU-b"], "gloo", monkeypatch) == ["gloo+gloo"] * 2
    assert connect_links(["GPU-a", "GPU-b"], "nccl", monkeypatch) == ["nccl+nccl"] * 2


@pytest.mark.parametrize(("kind", "between"), [("nccl", "gloo"), ("nccl-everywhere", "nccl")])
def test_links_between_hosts_use_nccl_only_if_the_script_says_everywhere(
    kind: LinkKind, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["host-1", "host-2"])
    monkeypatch.setattr(varuna.assembly.connections.socket, "gethostname", lambda: next(names))
    assert connect_links(["GPU-a", "GPU-b"], kind, monkeypatch) == [f"{between}+{between}"] * 2


@pytest.mark.parametrize(
    ("devices", "reason"),
    [(["GPU-a", "", "GPU-c"], "rank 1 has no CUDA device"), (["GPU-a", "GPU-b", "GPU-a"], "rank 2 shares its device")],
)
def test_all_ranks_refuse_nccl_where_one_has_no_device_of_its_own(
    devices: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refusal in connect_links(devices, "nccl", monkeypatch):
        assert refusal.startswith(f"links='nccl': {reason}")
        assert refusal.endswith("give each rank a GPU of its own, or leave out `links`")
        assert "\n" not in refusal


def test_a_kind_of_links_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="links='tcp': give one of 'gloo', 'nccl', 'nccl-everywhere'"):
        TrainingOptions(links="tcp")  # type: ignore[arg-type]


@dataclass
class DeviceWork:
    """An operation on a device that does not exist; the test ends it."""

    error: RuntimeError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, _: timedelta) -> bool:
        assert self.ended.is_set(), "this would have blocked in the device"
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Any:
        raise AssertionError("NCCL's futures say nothing of the device")


def test_an_operation_is_done_when_the_device_is() -> None:
    work = DeviceWork()
    threading.Timer(0.01, work.ended.set).start()
    assert _run_work(lambda: work, Departure(lambda _: None), 1)


def test_an_operation_is_left_when_the_peer_is_lost() -> None:
    work, departure = DeviceWork(), Departure(lambda _: None)
    threading.Timer(0.01, departure.leave_generation, (PeerLost("rank 1 is gone"),)).start()
    assert not _run_work(lambda: work, departure, 1)


@pytest.mark.parametrize("at_start", [False, True])
def test_an_operation_that_fails_makes_the_worker_leave(at_start: bool) -> None:
    work, departure = DeviceWork(RuntimeError("NCCL error: remote process exited")), Departure(lambda _: None)
    work.ended.set()

    def start() -> DeviceWork:
        if at_start and work.error is not None:
            raise work.error
        return work

    assert not _run_work(start, departure, 1)
    with pytest.raises(PeerLost) as left:
        departure.raise_if_leaving()
    assert left.value.reason == "rank 1 is gone: NCCL error: remote process exited"


def test_an_operation_without_memory_is_no_lost_peer() -> None:
    work, departure = DeviceWork(torch.OutOfMemoryError("no memory left")), Departure(lambda _: None)
    work.ended.set()
    with pytest.raises(torch.OutOfMemoryError):
        _run_work(lambda: work, departure, 1)
    assert departure.exit_code is None
