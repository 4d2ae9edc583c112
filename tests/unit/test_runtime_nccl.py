"""When gradients go over NCCL, and how a wait for it is left. What needs the devices themselves is in tests/gpu."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from varuna.departure import Departure, PeerLost
from varuna.launch import Group, Rendezvous, worker_environment
from varuna.nccl import NcclGroup, device_name, each_its_own
from varuna.topology import Topology, connect_holders


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
    assert each_its_own(devices) == nccl


def test_a_cpu_has_no_name_for_nccl() -> None:
    assert device_name(torch.device("cpu")) == ""


def test_on_cpus_the_group_is_gloos() -> None:
    rendezvous = Rendezvous(worker_environment({}), Departure())
    group = connect_holders(
        Topology(1, 1, 0), "replicas/0", (0,), rendezvous, torch.device("cpu"), Departure(lambda _: None)
    )
    assert type(group) is Group


def test_ranks_tell_each_other_what_they_have() -> None:
    store = HashStore()

    def tell(rank: int) -> list[str]:
        rendezvous = Rendezvous(replace(worker_environment({}), rank=rank), Departure())
        rendezvous.store = store
        return rendezvous.exchange("devices", (0, 1, 2), f"GPU-{rank}")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(tell, range(3))) == [["GPU-0", "GPU-1", "GPU-2"]] * 3


@dataclass
class DeviceWork:
    """A collective on a device that is not there, which ends when the test says so."""

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
    work, group = DeviceWork(), NcclGroup(None, (0, 1), Departure(lambda _: None))
    wait = group._start([lambda: work])
    threading.Timer(0.01, work.ended.set).start()
    wait()
    assert work.waited


def test_a_wait_is_left_when_a_peer_is_lost() -> None:
    work, departure = DeviceWork(), Departure(lambda _: None)
    wait = NcclGroup(None, (0, 1), departure)._start([lambda: work])
    threading.Timer(0.01, departure.leave, (PeerLost("rank 1 is gone"),)).start()
    with pytest.raises(PeerLost, match="76"):
        wait()
    assert not work.waited
