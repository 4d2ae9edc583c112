"""The global random generators of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from varuna.devices.accelerator import fork_generators, has_initialized_accelerator, is_accelerator, list_accelerators

__all__ = ["keep_global_generators"]


@contextmanager
def keep_global_generators(device: torch.device) -> Iterator[None]:
    """Restores the global generators of Python, NumPy, torch on the CPU and on all accelerators at the block's end.

    Code in the block (the user's own function for example inputs, say) may draw from them or seed them.
    """
    is_used = is_accelerator(device) or has_initialized_accelerator()
    devices = list_accelerators() if is_used else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with fork_generators(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
