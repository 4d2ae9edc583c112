"""The process' global random generators, kept as they were while Varuna prepares something."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["global_generators_kept"]


@contextmanager
def global_generators_kept(device: torch.device) -> Iterator[None]:
    """Puts the global generators of Python, NumPy, torch on the CPU and on all CUDA devices back at the block's end.

    What runs inside (the user's own function for example inputs, say) may draw from them, or seed them.
    """
    on_gpus = device.type == "cuda" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpus else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
