"""What the agent measures of its machine."""

from __future__ import annotations

import psutil

from varuna_agent.observability.machine_usage import MachineUsage, make_gpu_reader
from varuna_proto.v1 import agent_pb2


def test_a_sample_has_shares_bytes_and_rates() -> None:
    clock = iter([0.0, 10.0])
    gpu = agent_pb2.GpuUsage(busy_share=0.5, memory_used_bytes=1, memory_bytes=2)
    sample = MachineUsage(lambda: [gpu], lambda: next(clock)).take_sample()
    assert 0 <= sample.cpu_share <= 1
    assert 0 < sample.memory_used_bytes < sample.memory_bytes == psutil.virtual_memory().total
    assert sample.received_bytes_per_s >= 0
    assert list(sample.gpus) == [gpu]


def test_gpus_are_listed_wherever_there_is_a_driver() -> None:
    for gpu in make_gpu_reader()():
        assert 0 < gpu.memory_used_bytes <= gpu.memory_bytes
