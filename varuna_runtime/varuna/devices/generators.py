"""The global random generators of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["keep_global_generators"]


@contextmanager
def keep_global_generators(device: torch.device) -> Iterator[None]:
    """Restores the global generators of Python, NumPy, torch on the CPU and on all CUDA devices at the block's end.

    Code in the block (the user's own function for example inputs, say) may draw from them or seed them.
    """
    on_gpus = device.type == "cuda" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpus else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
