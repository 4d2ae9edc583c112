"""The results of the pipeline benchmark as rows, and the verdicts on its targets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["TARGETS", "LinkCondition", "ReportRow", "Target", "Verdict", "judge", "print_rows", "print_verdicts"]


@dataclass(frozen=True, kw_only=True)
class LinkCondition:
    """How the links and devices of a run behave, and how far ahead Varuna may run there."""

    name: str
    link_mbit: float = 0.0
    """Rate of every link; 0: not shaped."""
    latency_ms: float = 0.0
    """Of every message."""
    jitter_ms: float = 0.0
    """Mean of an exponential delay on top of it."""
    compute_noise: float = 0.0
    """Standard deviation of each op's time, relative."""
    run_ahead: float = 1.0
    """k of varuna and work-conserving, in multiples of P."""

    @property
    def disturbed(self) -> bool:
        """Whether links are slow or jittery."""
        return bool(self.link_mbit or self.latency_ms or self.jitter_ms)


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One system in one shape under one condition. Ratios are of means."""

    condition: str
    link_mbit: float
    latency_ms: float
    jitter_ms: float
    compute_noise: float
    p: int
    n: int
    system: str
    run_ahead: int | None
    """k; None for a policy that has none."""
    stash: int
    """The most micro-batches in flight on any stage."""
    mean_ms: float
    best_ms: float
    rounds_ms: tuple[float, ...]
    message_ms: float
    """The measured time of a message on the link without delays; the simulator gets it, as it does from calibration."""
    simulated_ms: float
    """The planner's mean for this system's schedule with the delays and op times of the measured rounds. For a peer:
    the least that its order allows."""
    lower_bound_ms: float
    """Of any schedule, without jitter and noise, on links of exactly their rate and latency."""
    to_simulated: float
    to_lower_bound: float
    to_torch_1f1b: float | None
    to_torch_gpipe: float | None


@dataclass(frozen=True)
class Target:
    """The limit for the ratio of the default policy's mean to another figure."""

    to: str
    plain: float
    disturbed: float
    """On slow or jittery links."""


TARGETS = (
    Target("simulated", 1.03, 1.03),
    Target("torch-1f1b", 1.0, 0.87),
    Target("torch-gpipe", 1.0, 0.85),
)
JUDGED = "work-conserving"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target in one shape under one condition."""

    condition: str
    p: int
    n: int
    to: str
    limit: float
    measured: float
    met: bool
    simulated: float | None
    """The same ratio of simulated times: against a peer that loses time only by its order."""
    least: float | None
    """The ratio of the lower bound to the peer's simulated time: no schedule gets below it."""


def judge(rows: Sequence[ReportRow], conditions: Sequence[LinkCondition]) -> list[Verdict]:
    """A verdict on every target whose systems were measured."""
    found = {(row.condition, row.p, row.n, row.system): row for row in rows}
    disturbed = {condition.name for condition in conditions if condition.disturbed}
    verdicts = []
    for row in rows:
        if row.system != JUDGED:
            continue
        for target in TARGETS:
            peer = found.get((row.condition, row.p, row.n, target.to))
            if peer is None and target.to != "simulated":
                continue
            limit = target.disturbed if row.condition in disturbed else target.plain
            measured = row.to_simulated if peer is None else row.mean_ms / peer.mean_ms
            verdicts.append(
                Verdict(
                    condition=row.condition,
                    p=row.p,
                    n=row.n,
                    to=target.to,
                    limit=limit,
                    measured=measured,
                    met=measured <= limit,
                    simulated=None if peer is None else row.simulated_ms / peer.simulated_ms,
                    least=None if peer is None else row.lower_bound_ms / peer.simulated_ms,
                )
            )
    return verdicts


def print_rows(condition: LinkCondition, rows: Iterable[ReportRow]) -> None:
    """The measured times of one condition."""
    links = f"{condition.link_mbit:g} Mbit/s" if condition.link_mbit else "not shaped"
    print(
        f"\n{condition.name}: links {links}, latency {condition.latency_ms:g} ms, jitter {condition.jitter_ms:g} ms, "
        f"compute noise {condition.compute_noise:g}, run-ahead {condition.run_ahead:g} P"
    )
    print(
        f"{'P':>2} {'N':>3} {'system':<16} {'stash':>5} {'mean ms':>9} {'best ms':>9} {'link ms':>7} "
        f"{'sim. ms':>9} {'bound ms':>9} {'/sim.':>6} {'/bound':>6} {'/1F1B':>6} {'/GPipe':>6}"
    )
    for row in rows:
        print(
            f"{row.p:>2} {row.n:>3} {row.system:<16} {row.stash:>5} {row.mean_ms:>9.1f} {row.best_ms:>9.1f} "
            f"{row.message_ms:>7.2f} {row.simulated_ms:>9.1f} {row.lower_bound_ms:>9.1f} {row.to_simulated:>6.3f} "
            f"{row.to_lower_bound:>6.3f} {_figure(row.to_torch_1f1b)} {_figure(row.to_torch_gpipe)}"
        )
    sys.stdout.flush()


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """The verdicts; those against a peer with their simulated ratios."""
    print(f"\nTargets of {JUDGED}: its mean to that of another, at most the limit")
    print(f"{'condition':<16} {'P':>2} {'N':>3} {'to':<12} {'limit':>6} {'ratio':>6} {'':<6} {'sim.':>6} {'least':>6}")
    for verdict in verdicts:
        print(
            f"{verdict.condition:<16} {verdict.p:>2} {verdict.n:>3} {verdict.to:<12} {verdict.limit:>6.2f} "
            f"{verdict.measured:>6.3f} {'met' if verdict.met else 'MISSED':<6} "
            f"{_figure(verdict.simulated)} {_figure(verdict.least)}"
        )
    print(f"{sum(verdict.met for verdict in verdicts)} of {len(verdicts)} met")


def _figure(value: float | None) -> str:
    return f"{'-':>6}" if value is None else f"{value:>6.3f}"
