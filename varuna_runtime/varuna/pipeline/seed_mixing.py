"""Mixing numbers into seeds."""

from __future__ import annotations

__all__ = ["mix_seed"]

_MASK = (1 << 64) - 1


def mix_seed(value: int) -> int:
    """splitmix64 (Steele, Lea and Flood, 2014): a bijection of [0, 2**64) in which every bit moves every bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
