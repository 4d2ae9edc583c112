"""The rate of each job by its number of GPUs: the planner's answers, by which GPUs are shared out.

One thread asks the planner, and each answer is cached. A caller waits for a moment, and then gets no answer yet. After
an error there is none either, so that no GPUs are moved for the job, until the planner is asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from varuna_manager.domain.sharing import RatePoint, list_sizes
from varuna_manager.planning.planner import ShapeQuestion, load_planner
from varuna_manager.planning.planning import FAILURE_KEPT_S, NoteTime, measure_answer
from varuna_manager.world.bell import Bell

_REMEMBERED = 256
"""Curves of jobs in the cache."""
_PATIENCE_S = 0.5
"""The time that a look at all jobs waits: the curves of a small fleet take no longer."""


@dataclass(frozen=True, kw_only=True)
class RateQuestion(ShapeQuestion):
    most: int
    """The most GPUs that the job could have."""

    def list_gpu_counts(self) -> tuple[int, ...]:
        return list_sizes(self.most)


class RateService:
    """`cache_dir`: as for PlanningService. Rings the bell when an answer arrives for which a caller did not wait."""

    def __init__(
        self,
        bell: Bell,
        cache_dir: Path | None = None,
        note: NoteTime | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bell = bell
        self._note = note
        self._cache_dir = cache_dir
        self._now = monotonic
        self._known: OrderedDict[Hashable, dict[int, float | None]] = OrderedDict()
        self._made: dict[Hashable, tuple[int, tuple[RatePoint, ...]]] = {}
        """Finished curves, with their largest number of GPUs: each look at the fleet asks for the same ones."""
        self._asked: dict[Hashable, RateQuestion] = {}
        self._asking: asyncio.Task[None] | None = None
        self._failed_until: dict[Hashable, float] = {}
        """Questions that the planner failed on, and when it is asked again, by the monotonic clock."""
        self._log = structlog.get_logger("varuna.planning")

    async def list_rate_curves(self, questions: Iterable[RateQuestion]) -> list[tuple[RatePoint, ...] | None]:
        """For each question, the rates by GPUs where there is a plan; None: the planner has not finished, or failed."""
        asked = [(question, question.shape_key()) for question in questions]
        self._failed_until = {key: until for key, until in self._failed_until.items() if self._now() < until}
        for question, key in asked:
            if self._is_awaited(question, key):
                self._asked[key] = question
        if self._asked and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None and any(self._is_awaited(question, key) for question, key in asked):
            await asyncio.wait([self._asking], timeout=_PATIENCE_S)
        return [None if self._missing(question, key) else self._curve(question, key) for question, key in asked]

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _missing(self, question: RateQuestion, key: Hashable) -> list[int]:
        known = self._known.get(key, {})
        return [size for size in question.list_gpu_counts() if size not in known]

    def _is_awaited(self, question: RateQuestion, key: Hashable) -> bool:
        """Whether the planner is to answer it now."""
        return key not in self._failed_until and bool(self._missing(question, key))

    def _curve(self, question: RateQuestion, key: Hashable) -> tuple[RatePoint, ...]:
        if key not in self._known:
            return ()  # there is no GPU for it, so nothing was asked
        self._known.move_to_end(key)
        made = self._made.get(key)
        if made is None or made[0] != question.most:
            rates = [(size, self._known[key][size]) for size in question.list_gpu_counts()]
            curve = tuple(RatePoint(gpus=size, examples_per_s=rate) for size, rate in rates if rate is not None)
            made = self._made[key] = (question.most, curve)
        return made[1]

    async def _ask(self) -> None:
        while self._asked:
            key = next(iter(self._asked))
            question = self._asked[key]
            missing = self._missing(question, key)
            try:
                with measure_answer("rates", self._note):
                    rates = await asyncio.to_thread(_rates, question, missing, self._cache_dir)
            except Exception:
                # The sizes stay unknown. As sizes without a plan they would take a running job's GPUs from it.
                self._log.exception("the planner failed", global_batch=question.spec.global_batch)
                self._failed_until[key] = self._now() + FAILURE_KEPT_S
                self._asked.pop(key, None)
                continue
            self._known.setdefault(key, {}).update(rates)
            self._made.pop(key, None)
            if self._asked.get(key) is question:
                del self._asked[key]
            while len(self._known) > _REMEMBERED:
                self._made.pop(self._known.popitem(last=False)[0], None)
        self._bell.notify_listeners()


def _rates(question: RateQuestion, gpus: Iterable[int], cache_dir: Path | None) -> dict[int, float | None]:
    """Runs in a thread. None: there is no plan for this many GPUs."""
    load_planner(cache_dir)
    rates: dict[int, float | None] = {}
    for count in gpus:
        try:
            best = question.choose_shape(count).best
        except ValueError:  # no fleet would suffice
            best = None
        rates[count] = None if best is None else best.examples_per_s
    return rates
