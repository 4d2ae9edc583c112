"""When gradients go over NCCL, and how a wait for it is left. What needs the devices themselves is in tests/gpu."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from varuna.assembly.connections import connect_holders
from varuna.devices.cuda_alone import nccl_device_name
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.groups import RankGroup
from varuna.distributed.nccl import NcclGroup, connect_nccl, have_own_devices
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.topology import Topology
from varuna.distributed.worker_environment import read_worker_environment


@pytest.mark.parametrize(
    ("devices", "nccl"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], True),
        (["GPU-a", "GPU-b", "GPU-a"], False),  # two ranks share one
        (["", ""], False),  # CPUs, or a torch without NCCL
        (["GPU-a", ""], False),
    ],
)
def test_nccl_is_for_ranks_with_a_device_each(devices: list[str], nccl: bool) -> None:
    assert have_own_devices(devices) == nccl


def test_a_cpu_has_no_name_for_nccl() -> None:
    assert nccl_device_name(torch.device("cpu")) == ""


def test_on_cpus_the_group_is_gloos() -> None:
    rendezvous = Rendezvous(read_worker_environment({}), Departure())
    group = connect_holders(
        Topology(1, 1, 0),
        "replicas/0",
        (0,),
        rendezvous=rendezvous,
        device=torch.device("cpu"),
        departure=Departure(lambda _: None),
    )
    assert type(group) is RankGroup


def test_ranks_tell_each_other_what_they_have() -> None:
    store = HashStore()

    def exchange(rank: int) -> list[str]:
        rendezvous = Rendezvous(replace(read_worker_environment({}), rank=rank), Departure())
        rendezvous.store = store
        return rendezvous.exchange_values("devices", (0, 1, 2), f"GPU-{rank}")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(exchange, range(3))) == [["GPU-0", "GPU-1", "GPU-2"]] * 3


@dataclass
class DeviceWork:
    """A collective on a device that does not exist; the test ends it."""

    ended: threading.Event = field(default_factory=threading.Event)
    waited: bool = False

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, _: timedelta) -> bool:
        assert self.ended.is_set(), "this would have blocked in the device"
        self.waited = True
        return True

    def get_future(self) -> None:
        raise AssertionError("NCCL's futures say nothing of the device")


def test_a_wait_ends_when_the_device_is_through() -> None:
    work: Any = DeviceWork()
    group = NcclGroup(None, (0, 1), Departure(lambda _: None))
    wait = group._start([lambda: work])
    threading.Timer(0.01, work.ended.set).start()
    wait()
    assert work.waited


def test_a_wait_is_left_when_a_peer_is_lost() -> None:
    work: Any = DeviceWork()
    departure = Departure(lambda _: None)
    wait = NcclGroup(None, (0, 1), departure)._start([lambda: work])
    threading.Timer(0.01, departure.leave_generation, (PeerLost("rank 1 is gone"),)).start()
    with pytest.raises(PeerLost, match="76"):
        wait()
    assert not work.waited


class MadeGroup:
    """Takes the place of torch's NCCL group, which this build of torch lacks: notes what it could read."""

    class Options:
        _timeout = timedelta()

    def __init__(self, store: object, rank: int, size: int, options: MadeGroup.Options) -> None:
        self.size, self.timeout = size, options._timeout
        self.environment = dict(os.environ)


def test_nccls_own_watchdogs_end_no_process_whose_waits_are_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MadeGroup, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    for name in ("TORCH_NCCL_ENABLE_MONITORING", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set
        monkeypatch.delenv(name)
    group: Any = connect_nccl(HashStore(), 0, 2, address="127.0.0.1")
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "NCCL_SOCKET_IFNAME")
    assert [group.environment[name] for name in names] == ["0", "0", "=lo"]
    assert [os.environ.get(name) for name in names[:2]] == ["3", None]  # for groups of the script's own


def test_the_user_may_name_nccls_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MadeGroup, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    group: Any = connect_nccl(HashStore(), 0, 2, address="127.0.0.1")
    assert group.environment["NCCL_SOCKET_IFNAME"] == "ib0"
