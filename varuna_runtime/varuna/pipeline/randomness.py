"""Random streams that do not depend on how the job is cut up.

Before a section runs for a micro-batch, the device's generators are seeded from (seed, step, micro-batch of the global
batch, section). So dropout is the same for every P and D, and a recomputed forward draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["generators_left_as_found", "seed_generators", "stream_seed"]

_MASK = (1 << 64) - 1


def stream_seed(seed: int, step: int, micro_batch: int, section: int) -> int:
    """The seed of one random stream, in [0, 2**63). Distinct arguments give unrelated streams."""
    state = 0
    for part in (seed, step, micro_batch, section):
        state = _mix(state ^ (part & _MASK))
    return state >> 1


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators that code on `device` draws from: the CPU's, and the device's own."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def generators_left_as_found(device: torch.device) -> Iterator[None]:
    """Puts the generators of CPU and `device` back to where they were, whatever happens inside."""
    host = torch.default_generator.get_state()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(host)
        if own is not None:
            torch.cuda.set_rng_state(own, device)
