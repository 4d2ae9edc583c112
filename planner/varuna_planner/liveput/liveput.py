"""Liveput: the expected rate of a plan on VMs that are taken away and come back, instead of its peak rate.

The loss of any VM that a generation uses stops it. Training then stands still until the loss is noticed and the next
generation runs, and work that no checkpoint holds is repeated. A plan on more VMs is faster but is stopped more often;
spare VMs shorten the stop. The expectation weighs these.

How often to save, and what a stop costs, is in `checkpoint_interval`, in closed form. `FleetModel` is a Markov decision
process over (number of VMs, running plan), whose value is the expected number of examples over a horizon.

Letters: h removals per VM and hour, r examples/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from varuna_planner.liveput.checkpoint_interval import (
    CheckpointInterval,
    StopCosts,
    best_checkpoints,
    check_rate,
)

Matrix = npt.NDArray[np.float64]
"""[level, option]"""
Choices = npt.NDArray[np.int64]
"""[level, option] -> option"""

__all__ = ["FleetModel", "Hazard", "PlanOption", "fleet_sizes"]

MOST_LEVELS: Final = 40
"""The most fleet sizes that are distinguished; in larger fleets a level is several VMs."""


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """How VMs leave and join the fleet: Poisson processes of bursts."""

    removals_per_vm_hour: float
    additions_per_hour: float | None = None
    """VMs per hour that join a fleet that is not full; None: as many as a full fleet loses."""
    removal_sizes: tuple[float, ...] = (1.0,)
    """The share of the removals that take 1, 2, ... VMs at once."""
    addition_sizes: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        check_rate("removals_per_vm_hour", self.removals_per_vm_hour)
        check_rate("additions_per_hour", self.additions_per_hour or 0.0)
        for name in ("removal_sizes", "addition_sizes"):
            shares = getattr(self, name)
            if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
                raise ValueError(f"{name} {shares}: they are shares, which add up to 1")

    def additions_to(self, most_vms: int) -> float:
        """VMs per hour that join a fleet of at most `most_vms`."""
        given = self.additions_per_hour
        return self.removals_per_vm_hour * most_vms if given is None else given


@dataclass(frozen=True, kw_only=True)
class PlanOption:
    """A plan, as far as the fleet is concerned."""

    vms: int
    """VMs that the plan uses: the loss of one stops it."""
    examples_per_s: float
    minibatch_s: float


_NONE: Final = PlanOption(vms=0, examples_per_s=0.0, minibatch_s=1.0)
"""No plan: waiting for VMs."""


def fleet_sizes(most_vms: int) -> list[int]:
    """The fleet sizes that are distinguished, ascending from 0: all, or evenly spaced ones for a large fleet."""
    unit = -(-most_vms // MOST_LEVELS)
    sizes = list(range(most_vms % unit, most_vms + 1, unit))
    return sizes if sizes[0] == 0 else [0, *sizes]


class FleetModel:
    """The value of running each option on each number of VMs, when every later decision is the best one.

    States are (number of VMs, running option). VMs leave and join in bursts. A burst that takes a VM of the option
    stops it, and the next option is chosen (at the cost of a morph, or of a replacement if the option stays the same).
    When VMs join, the option may change, too. The value is the expected number of examples until an exponentially
    distributed horizon, so that decisions do not depend on the time. Solved by policy iteration (Howard 1960).

    The options are the given ones that fit, and waiting. `most_vms`: the fleet never has more. A generation that is
    replaced by a larger one before it runs is charged its whole launch: if VMs join every few minutes, the expectation
    is about 1 % low.
    """

    def __init__(
        self, options: Sequence[PlanOption], hazard: Hazard, costs: StopCosts, *, most_vms: int, horizon_s: float
    ) -> None:
        if most_vms < 1 or not horizon_s > 0:
            raise ValueError(f"most_vms {most_vms} and horizon_s {horizon_s} must be above 0")
        self.options = (_NONE, *options)
        self.hazard, self.costs, self.most_vms, self.horizon_s = hazard, costs, most_vms, horizon_s
        self.sizes = fleet_sizes(most_vms)
        self._unit = self.sizes[-1] - self.sizes[-2]
        self._end_rate = 1 / horizon_s
        self.values: Matrix = np.empty(0)
        self._fits = np.array([[option.vms <= size for option in self.options] for size in self.sizes])
        self._iterate_policy()

    # ------------------------------------------------------------ answers

    def find_level(self, vms: int) -> int:
        """The index of the size that represents `vms`: the nearest at or below."""
        return max(i for i, size in enumerate(self.sizes) if size <= vms)

    def expected_rate(self, vms: int, option: int) -> float:
        """Expected examples/s over the horizon when `options[option]` runs on a fleet of `vms` now; 0 waits."""
        return float(self.values[self.find_level(vms), option] * self._end_rate)

    def after_loss(self, vms: int, lost: int) -> int:
        """The best option after `options[lost]` was stopped and `vms` are left."""
        return int(self._next[self.find_level(vms), lost])

    def after_growth(self, vms: int, running: int) -> int:
        """The best option for a fleet that has grown to `vms`: the same one, or one that is worth the morph."""
        return int(self._grown[self.find_level(vms), running])

    def stops_per_s(self, vms: int, option: int) -> float:
        """How often an option on a fleet of `vms` is stopped."""
        used = self.options[option].vms
        return sum(rate * _hit_probability(vms, used, taken) for rate, taken in self._list_losses(vms))

    def plan_checkpoints(self, vms: int, option: int) -> CheckpointInterval:
        """The best checkpoint interval of an option on a fleet of `vms`."""
        return best_checkpoints(self.stops_per_s(vms, option), self.options[option].minibatch_s, self.costs)

    # ------------------------------------------------------------ the process

    def _list_losses(self, vms: int) -> Iterator[tuple[float, int]]:
        """Pairs (bursts per second, VMs that each takes)."""
        shares = self.hazard.removal_sizes
        mean = sum(share * size for size, share in enumerate(shares, 1))
        for size, share in enumerate(shares, 1):
            if share and vms:
                yield share * vms * self.hazard.removals_per_vm_hour / mean / 3600, min(size, vms)

    def _list_gains(self) -> Iterator[tuple[float, int]]:
        shares = self.hazard.addition_sizes
        mean = sum(share * size for size, share in enumerate(shares, 1))
        for size, share in enumerate(shares, 1):
            if share:
                yield share * self.hazard.additions_to(self.most_vms) / mean / 3600, size

    def _list_moves(self, level: int, vms: int) -> Iterator[tuple[float, int]]:
        """Pairs (share, level) that `vms` more (or less) lead to: whole levels whose mean is exact."""
        steps = vms / self._unit
        below = math.floor(steps)
        for part, to in ((1 - (steps - below), level + below), (steps - below, level + below + 1)):
            if part:
                yield part, min(max(to, 0), len(self.sizes) - 1)

    # ------------------------------------------------------------ policy iteration

    def _iterate_policy(self) -> None:
        count = (len(self.sizes), len(self.options))
        running, self._redone, stops = (np.zeros(count) for _ in range(3))
        for level, option in np.argwhere(self._fits):
            if option:
                checkpoints = self.plan_checkpoints(self.sizes[level], option)
                stops[level, option] = self.stops_per_s(self.sizes[level], option)
                rate = self.options[option].examples_per_s
                running[level, option] = rate * checkpoints.running
                # A stop while the option is being launched loses no work.
                launched = math.exp(-stops[level, option] * self.costs.morph_s)
                self._redone[level, option] = rate * checkpoints.redone_s * launched
        self._running = running
        # Examples lost while an option is launched, until it runs, is stopped or the horizon ends.
        morph_s, before_s = self.costs.morph_s, self.costs.before_morph_s
        replace_s = morph_s if self.costs.replace_s is None else self.costs.replace_s
        ends = stops + self._end_rate
        self._to_morph, self._to_replace, self._to_grow = (
            running * -np.expm1(-ends * down_s) / ends
            for down_s in (before_s + morph_s, before_s + replace_s, self.costs.save_s + morph_s)
        )
        stay = np.tile(np.arange(count[1]), (count[0], 1))
        self._next, self._grown = stay, stay
        values = np.where(self._fits, running / self._end_rate, -np.inf)
        evaluated: set[bytes] = set()
        while True:
            following = self._improve_choices(values, self._to_morph, self._to_replace, self._next)
            grown = self._improve_choices(values, self._to_grow, np.zeros(count), self._grown)
            policy = following.tobytes() + grown.tobytes()
            if policy in evaluated:
                return  # it is the last one, or one of several whose values differ by rounding alone
            evaluated.add(policy)
            self._next, self._grown = following, grown
            values = self.values = self._evaluate_choices()

    @staticmethod
    def _improve_choices(values: Matrix, to_change: Matrix, to_keep: Matrix, before: Choices) -> Choices:
        """The best next option per level and running option, given `values`. A tie keeps the earlier choice."""
        levels = np.arange(len(values))
        improved = np.empty_like(before)
        for running in range(values.shape[1]):
            worth = values - to_change
            worth[:, running] = values[:, running] - to_keep[:, running]
            best, old = worth.argmax(axis=1), before[:, running]
            keeps = worth[levels, old] >= worth[levels, best] * (1 - 1e-9)
            improved[:, running] = np.where(keeps, old, best)
        return improved

    def _evaluate_choices(self) -> Matrix:
        """The values of the current decisions, from one linear system."""
        states = [(int(level), int(option)) for level, option in np.argwhere(self._fits)]
        index = {state: row for row, state in enumerate(states)}
        matrix = np.zeros((len(states), len(states)))
        reward = np.zeros(len(states))
        for row, (level, option) in enumerate(states):
            vms = self.sizes[level]
            matrix[row, row] += self._end_rate
            reward[row] += self._running[level, option]
            for burst_rate, taken in self._list_losses(vms):
                hit = _hit_probability(vms, self.options[option].vms, taken)
                reward[row] -= burst_rate * hit * self._redone[level, option]
                for share, to in self._list_moves(level, -taken):
                    rate = burst_rate * share
                    matrix[row, row] += rate
                    spared = 1 - hit if self._fits[to, option] else 0.0
                    if spared:
                        matrix[row, index[to, option]] -= rate * spared
                    chosen = int(self._next[to, option])
                    lumps = self._to_replace if chosen == option else self._to_morph
                    reward[row] -= rate * (1 - spared) * lumps[to, chosen]
                    matrix[row, index[to, chosen]] -= rate * (1 - spared)
            for burst_rate, added in self._list_gains():
                for share, to in self._list_moves(level, added):
                    if to == level:
                        continue  # the fleet is full
                    rate = burst_rate * share
                    chosen = int(self._grown[to, option])
                    matrix[row, row] += rate
                    matrix[row, index[to, chosen]] -= rate
                    if chosen != option:
                        reward[row] -= rate * self._to_grow[to, chosen]
        values = np.full(self._fits.shape, -np.inf)
        values[self._fits] = np.linalg.solve(matrix, reward)
        return values


def _hit_probability(vms: int, used: int, taken: int) -> float:
    """The probability that `taken` random VMs out of `vms` are not all spare."""
    if taken > vms - used:
        return 1.0 if used else 0.0
    return 1 - math.comb(vms - used, taken) / math.comb(vms, taken)
