"""How busy this VM is: processors, memory, network, GPUs. Sampled every few seconds, for the agent's heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import psutil

from varuna_proto.group_memory import read_group_memory
from varuna_proto.v1 import agent_pb2

SAMPLE_S = 10.0


class MachineUsage:
    """`list_gpus`: the usage of each GPU; `monotonic`: a clock."""

    def __init__(
        self,
        list_gpus: Callable[[], Sequence[agent_pb2.GpuUsage]] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_gpus = list_gpus or make_gpu_reader()
        self._now = monotonic
        self._before = monotonic()
        self._network = _count_network_bytes()
        psutil.cpu_percent()  # what is measured counts from the call before

    def take_sample(self) -> agent_pb2.MachineUsage:
        """The usage since the last sample. Call it in a thread: a driver may take its time."""
        now, network = self._now(), _count_network_bytes()
        memory_bytes, memory_used_bytes = _measure_memory()
        passed_s = max(now - self._before, 1e-3)
        received, sent = (max(new - old, 0) / passed_s for new, old in zip(network, self._network, strict=True))
        self._before, self._network = now, network
        return agent_pb2.MachineUsage(
            cpu_share=psutil.cpu_percent() / 100,
            memory_used_bytes=memory_used_bytes,
            memory_bytes=memory_bytes,
            received_bytes_per_s=received,
            sent_bytes_per_s=sent,
            gpus=self._list_gpus(),
        )


def _measure_memory() -> tuple[int, int]:
    """How much there is, and how much of it is used: of the machine, or of the control group that leaves least."""
    machine, group = psutil.virtual_memory(), read_group_memory()
    if group is None or group.available >= machine.available:
        return machine.total, machine.total - machine.available
    return group.limit, group.limit - group.available


def _count_network_bytes() -> tuple[int, int]:
    """Received and sent over all interfaces, loopback included: local VMs talk over it."""
    counted = psutil.net_io_counters()
    return (0, 0) if counted is None else (counted.bytes_recv, counted.bytes_sent)


def make_gpu_reader() -> Callable[[], Sequence[agent_pb2.GpuUsage]]:
    """A function that lists the usage of NVIDIA's GPUs; of none, where there is no driver of theirs."""
    if find_spec("pynvml") is None:
        return list
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return list

    def list_gpus() -> list[agent_pb2.GpuUsage]:
        found = []
        for handle in handles:
            with suppress(pynvml.NVMLError):  # a GPU that has fallen off the bus has no usage
                found.append(_read_gpu(pynvml, handle))
        return found

    return list_gpus


def _read_gpu(nvml: Any, handle: Any) -> agent_pb2.GpuUsage:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    usage = agent_pb2.GpuUsage(memory_used_bytes=memory.used, memory_bytes=memory.total)
    with suppress(nvml.NVMLError):  # a GPU in MIG mode does not say how busy it is
        usage.busy_share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return usage
