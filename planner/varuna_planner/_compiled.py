"""How the planner's loops are compiled: beside other threads, and without a check of every divisor.

Divisors are counts from one on and rates above zero; asking each whether it is zero costs the search a tenth of its
time (measured).
"""

from __future__ import annotations

from functools import partial

from numba import njit

__all__ = ["compiled"]

compiled = partial(njit, nogil=True, error_model="numpy")
