"""How many GPUs each of several jobs gets: minimums by priority and age, spare GPUs by what they gain.

1. Every job gets its minimum, in order of priority; among equals, running jobs come before waiting ones, then older
   ones first. So a waiting job takes GPUs from running jobs of lower priority, the lowest first, and spare GPUs from
   all; it never stops a job of its own priority. While a job waits whose minimum the fleet could hold, no waiting job
   behind it overtakes it, so that a stream of small jobs cannot starve a large one.
2. Spare GPUs go, step by step, where they gain most: `weight * ln(rate after / rate before) / GPUs added`, the
   relative gain of the job's own rate per GPU. Rates of different models cannot be compared, relative gains can;
   the logarithm makes the shares proportionally fair. A priority that is higher by one doubles the weight.
3. A job whose workdir is not ready on its VMs yet takes nothing from running jobs, which keep their GPUs until it can
   start. No waiting job behind it overtakes it meanwhile.
4. Running jobs keep what they have, unless another job needs it for its minimum, or the best division gains more over
   the present one than its morphs would cost.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from varuna_proto.wording import count_of

EACH_SIZE = 32
"""Up to this many GPUs, the rate is known at each number; above it, at some."""


@dataclass(frozen=True, kw_only=True)
class RatePoint:
    gpus: int
    examples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A job that has not ended."""

    id: str
    name: str
    priority: int
    created_at: float
    min_gpus: int
    max_gpus: int | None
    fitting: int | None = None
    """GPUs of the fleet that match its resources; None: it takes any."""
    has: int = 0
    """GPUs of its newest generation that still exist."""
    runs: bool = False
    """Whether it runs: it does not wait in the queue."""
    rates: tuple[RatePoint, ...] | None = None
    """The planner's rates, at the numbers of GPUs at which it was asked and has a plan. None: the job is not profiled
    yet, and its rate is assumed to be proportional to its GPUs."""
    worthwhile_ratio: float = 1.05
    """The least rate of another shape, in units of the present rate, that is worth a morph."""
    leaving: bool = False
    """Whether it is being cancelled: it keeps what it has until it has ended, and gets no more."""

    @property
    def least(self) -> int:
        """The fewest GPUs with which it can run."""
        fitting = (point.gpus for point in self.rates or () if point.gpus >= self.min_gpus)
        return next(fitting, self.min_gpus)

    @property
    def most(self) -> float:
        limits = [limit for limit in (self.max_gpus, self.fitting) if limit is not None]
        return min(limits, default=math.inf)

    def is_too_large(self, gpus: int) -> bool:
        """Whether a fleet of this many GPUs cannot hold it, even without other jobs."""
        return self.least > gpus or (self.fitting is not None and self.least > self.fitting)


@dataclass(frozen=True, kw_only=True)
class Share:
    gpus: int
    reason: str
    """Why it is not larger."""


@dataclass(kw_only=True)
class _GpuAccount:
    """One job while GPUs are handed out. `sizes` are the GPU counts at which its rate grows, `log_rates` the ln of
    it."""

    job: Contender
    gpus: int
    weight: float
    sizes: list[int]
    log_rates: list[float]

    def log_rate(self, gpus: int) -> float:
        """The log rate of the best shape with at most this many GPUs."""
        at = bisect_right(self.sizes, gpus)
        return self.log_rates[at - 1] if at else 0.0

    def best_step(self, spare: int) -> tuple[float, int] | None:
        """The best step that needs at most `spare` GPUs, as (gain per GPU, new GPUs); None: more would not help."""
        present, start = self.log_rate(self.gpus), bisect_right(self.sizes, self.gpus)
        stop = bisect_right(self.sizes, self.gpus + spare, start)
        return max(
            ((self._slope(present, at), self.sizes[at]) for at in range(start, stop)),
            default=None,
        )

    def list_best_steps(self) -> list[tuple[float, int]]:
        """The best steps from here on, the last first, as (gain per GPU, new GPUs). Each gains less than the one
        before."""
        points = [(self.gpus, self.log_rate(self.gpus))]
        for at in range(bisect_right(self.sizes, self.gpus), len(self.sizes)):
            new = (self.sizes[at], self.log_rates[at])
            while len(points) > 1 and _steepness(points[-2], points[-1]) <= _steepness(points[-1], new):
                points.pop()
            points.append(new)
        steps = [(self.weight * _steepness(a, b), b[0]) for a, b in itertools.pairwise(points)]
        return steps[::-1]

    def _slope(self, present: float, at: int) -> float:
        return self.weight * (self.log_rates[at] - present) / (self.sizes[at] - self.gpus)


def _steepness(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def share_gpus(jobs: Sequence[Contender], gpus: int) -> dict[str, Share]:
    """Each job's share of the fleet's `gpus`.

    The sum is no more than these, but for jobs that need more than there are: their share is what they need.
    """
    granted, refused = _minimums(jobs, gpus)
    gpus -= sum(job.has for job in jobs if job.leaving)
    highest = max((job.priority for job in granted), default=0)
    ideal = [_make_account(job, gpus, highest) for job in granted]
    kept = [replace(account, gpus=_kept(account.job)) for account in ideal]
    _hand_out(ideal, gpus - sum(account.gpus for account in ideal))
    _take_back(kept, sum(account.gpus for account in kept) - gpus)
    _hand_out(kept, gpus - sum(account.gpus for account in kept))
    if _pays(ideal, kept):
        chosen, why = ideal, "other jobs gain more from the spare GPUs"
    else:
        chosen, why = kept, "the other GPUs belong to other jobs"
    shares = {account.job.id: Share(gpus=account.gpus, reason=why) for account in chosen}
    return {**shares, **refused}


def hold_back_shares(
    wishes: Mapping[str, Share], jobs: Sequence[Contender], gpus: int, ready: Mapping[str, int]
) -> dict[str, Share]:
    """The shares for now, while some jobs cannot use theirs yet: no other job stops for them before they can.

    Args:
        wishes: the shares that the jobs will have when all can use theirs.
        ready: by job that needs preparing, the GPUs that it could use now.
    """
    late = {job_id: most for job_id, most in ready.items() if most < wishes[job_id].gpus}
    if not late:
        return dict(wishes)
    # A waiting job gets at most its wish when another is late. Otherwise it would take GPUs from running jobs.
    most = {job.id: late.get(job.id, max(wishes[job.id].gpus, job.has)) for job in jobs}
    able = [replace(job, max_gpus=most[job.id]) for job in jobs if most[job.id] >= job.least or job.leaving]
    now = share_gpus(able, gpus)
    return {
        job.id: _held(job, wishes[job.id], now[job.id]) if job.id in now and job.id not in late else wishes[job.id]
        for job in jobs
    }


def _held(job: Contender, wish: Share, now: Share) -> Share:
    """`now`: the share without the late jobs."""
    held = max(min(wish.gpus, now.gpus), min(job.has, max(wish.gpus, now.gpus)))
    return wish if held == wish.gpus else Share(gpus=held, reason=now.reason)


def _kept(job: Contender) -> int:
    return int(min(max(job.has, job.least), max(job.most, job.least)))


def _minimums(jobs: Sequence[Contender], gpus: int) -> tuple[list[Contender], dict[str, Share]]:
    """The jobs that may run, and why the others may not."""
    order = sorted(jobs, key=lambda job: (-job.priority, not job.runs, job.created_at, job.id))
    granted: list[Contender] = []
    refused: dict[str, Share] = {}
    left, blocked = gpus - sum(job.has for job in jobs if job.leaving), None
    for job in order:
        if job.leaving:
            refused[job.id] = Share(gpus=job.has, reason="it is being cancelled")
        elif job.is_too_large(gpus) or job.rates == ():
            # No other job could free enough for it. It may have its minimum when the fleet is larger.
            there = f"there are {gpus}" if job.fitting is None else f"{job.fitting} of {gpus} match its resources"
            refused[job.id] = Share(gpus=job.least, reason=f"it needs {count_of(job.least, 'GPU')} and {there}")
        elif blocked is not None and not job.runs:
            needed = count_of(blocked.least, "GPU")
            text = f"waiting behind job {blocked.name!r} (priority {blocked.priority}), which needs {needed}"
            refused[job.id] = Share(gpus=0, reason=text)
        elif job.least > left:
            refused[job.id] = Share(gpus=0, reason=_refusal(job, granted, left))
            if not job.runs:
                blocked = blocked or job
        else:
            granted.append(job)
            left -= job.least
    return granted, refused


def _refusal(job: Contender, granted: Sequence[Contender], left: int) -> str:
    first = ", ".join(f"{other.name} (priority {other.priority})" for other in granted[:3])
    more = f" and {len(granted) - 3} more" if len(granted) > 3 else ""
    return f"it needs {count_of(job.least, 'GPU')} and jobs that come first leave {max(left, 0)}: {first}{more}"


def _make_account(job: Contender, most: int, highest: int) -> _GpuAccount:
    """An account that begins with the job's minimum."""
    top = int(min(most, job.most))
    if job.rates is None:
        points: Iterable[tuple[int, float]] = (
            (size, float(size)) for size in list_sizes(top, (job.least, job.has, top))
        )
    else:
        points = ((point.gpus, point.examples_per_s) for point in job.rates if point.gpus <= top)
    found: list[int] = []
    log_rates: list[float] = []
    for size, rate in points:
        log_rate = math.log(max(rate, 1e-300))
        if not found or log_rate > log_rates[-1]:
            found.append(size)
            log_rates.append(log_rate)
    weight = 2.0 ** (job.priority - highest)
    return _GpuAccount(job=job, gpus=job.least, weight=weight, sizes=found, log_rates=log_rates)


@lru_cache(maxsize=4096)
def list_sizes(most: int, also: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Numbers of GPUs, up to `most`, whose rates the planner is asked for: each up to EACH_SIZE, then four per
    doubling, and `also`."""
    found = {size for size in (*range(1, EACH_SIZE + 1), *also) if 0 < size <= most}
    size = EACH_SIZE
    while size < most:
        found.update(range(size + size // 4, min(2 * size, most) + 1, size // 4))
        size *= 2
    return tuple(sorted(found))


def _hand_out(accounts: Sequence[_GpuAccount], spare: int) -> None:
    """Greedy by gain per GPU. A step that no longer fits is replaced by a smaller one."""
    hulls = {account.job.id: account.list_best_steps() for account in accounts}
    queue: list[tuple[float, float, str, int, _GpuAccount]] = []

    def offer(account: _GpuAccount) -> None:
        hull = hulls[account.job.id]
        step = hull.pop() if hull else None
        if step is not None and step[1] - account.gpus > spare:
            hull.clear()
            step = account.best_step(spare)
        if step is not None:
            heapq.heappush(queue, (-step[0], account.job.created_at, account.job.id, step[1], account))

    for account in accounts:
        offer(account)
    while queue and spare > 0:
        *_, gpus, account = heapq.heappop(queue)
        if gpus - account.gpus <= spare:
            spare -= gpus - account.gpus
            account.gpus = gpus
        else:
            hulls[account.job.id].clear()
            step = account.best_step(spare)
            hulls[account.job.id] += [] if step is None else [step]
        offer(account)
    _hand_out_between_sizes(accounts, spare)


def _hand_out_between_sizes(accounts: Sequence[_GpuAccount], spare: int) -> None:
    """Hand out the rest to large jobs, whose sizes are further apart: each shape between two sizes gains a little."""
    for account in sorted(accounts, key=lambda account: (-account.weight, account.job.created_at)):
        at = bisect_right(account.sizes, account.gpus)
        if account.gpus > EACH_SIZE and at < len(account.sizes):
            given = min(spare, account.sizes[at] - account.gpus)
            account.gpus, spare = account.gpus + given, spare - given


def _take_back(accounts: Sequence[_GpuAccount], missing: int) -> None:
    """Take GPUs from jobs that have more than their minimum, where it costs least per GPU."""
    queue: list[tuple[float, float, str, int, _GpuAccount]] = []

    def offer(account: _GpuAccount) -> None:
        loss = _cheapest_loss(account, missing) if missing > 0 else None
        if loss is not None:
            heapq.heappush(queue, (loss[0], -account.job.created_at, account.job.id, loss[1], account))

    for account in accounts:
        offer(account)
    while missing > 0:
        *_, gpus, account = heapq.heappop(queue)
        missing -= account.gpus - gpus
        account.gpus = gpus
        offer(account)


def _cheapest_loss(account: _GpuAccount, missing: int) -> tuple[float, int] | None:
    """The cheapest step down as (loss per GPU, new GPUs), by `missing` or to the next smaller shape; None: it has its
    minimum."""
    least = account.job.least
    if account.gpus <= least:
        return None
    present, at = account.log_rate(account.gpus), bisect_left(account.sizes, account.gpus)
    lower = account.sizes[at - 1] if at else least
    options = {max(least, account.gpus - missing), max(least, lower)}
    return min((account.weight * (present - account.log_rate(gpus)) / (account.gpus - gpus), gpus) for gpus in options)


def _pays(ideal: Sequence[_GpuAccount], kept: Sequence[_GpuAccount]) -> bool:
    """Whether the change from `kept` to `ideal` gains more than its morphs cost."""
    before: Mapping[str, _GpuAccount] = {account.job.id: account for account in kept}
    gain = cost = 0.0
    for account in ideal:
        was = before[account.job.id]
        if account.gpus == was.gpus:
            continue
        gain += account.weight * (account.log_rate(account.gpus) - was.log_rate(was.gpus))
        if account.job.runs:
            cost += account.weight * math.log(account.job.worthwhile_ratio)
    return gain > cost > 0.0
