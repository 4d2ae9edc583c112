"""The global random generators of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from varuna.devices.accelerator import fork_generators, has_initialized_accelerator, is_accelerator, list_accelerators

__all__ = ["keep_global_generators", "keep_host_generators", "seed_host_generators"]


@contextmanager
def keep_global_generators(device: torch.device) -> Iterator[None]:
    """Restores the global generators of Python, NumPy, torch on the CPU and on all accelerators at the block's end.

    Code in the block (the user's own function for example inputs, say) may draw from them or seed them.
    """
    is_used = is_accelerator(device) or has_initialized_accelerator()
    with keep_host_generators(), fork_generators(list_accelerators() if is_used else []):
        yield


@contextmanager
def keep_host_generators() -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch on the CPU at the block's end."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)


def seed_host_generators(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch on the CPU, in a few microseconds. `seed`: below 2**63."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
