"""Waiting times between attempts."""

from __future__ import annotations

import random


class Backoff:
    """Waiting times that double up to a bound, each shortened by up to a half at random, so that a fleet spreads."""

    def __init__(self, first_s: float, most_s: float, chance: random.Random) -> None:
        self._first_s = first_s
        self.most_s = most_s
        self._chance = chance
        self._failures = 0

    def next_s(self) -> float:
        wait_s = min(self.most_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return wait_s * self._chance.uniform(0.5, 1.0)

    def reset_wait(self) -> None:
        self._failures = 0
