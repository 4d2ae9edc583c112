"""How fast each job would be with so many GPUs: the planner's answers, by which GPUs are shared out.

Asked in one thread, remembered for each number of GPUs. Whoever cannot wait gets what is known so far.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from varuna_manager.domain.sharing import RatePoint, sizes
from varuna_manager.services.bell import Bell
from varuna_manager.services.planner import ShapeQuestion, load_planner
from varuna_manager.services.planning import NoteTime, noting

_REMEMBERED = 256
"""Jobs' curves."""
_PATIENCE_S = 0.5
"""Of a look at all jobs: a small fleet's curves take no longer."""


@dataclass(frozen=True, kw_only=True)
class RateQuestion(ShapeQuestion):
    most: int
    """GPUs that the job could have at most."""

    def sizes(self) -> tuple[int, ...]:
        return sizes(self.most)


class RateService:
    """`cache_dir`: as PlanningService's. Rings when an answer has come that somebody did not wait for."""

    def __init__(self, bell: Bell, cache_dir: Path | None = None, note: NoteTime | None = None) -> None:
        self._bell = bell
        self._note = note
        self._cache_dir = cache_dir
        self._known: OrderedDict[Hashable, dict[int, float | None]] = OrderedDict()
        self._made: dict[Hashable, tuple[int, tuple[RatePoint, ...]]] = {}
        """Curves up to so many GPUs: each look at a fleet asks for the same again."""
        self._asked: dict[Hashable, RateQuestion] = {}
        self._asking: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("varuna.planning")

    async def curves(self, questions: Iterable[RateQuestion]) -> list[tuple[RatePoint, ...] | None]:
        """For each question, the rates by GPUs, where there is a plan; None: the planner is still at it."""
        asked = [(question, question.shape_key()) for question in questions]
        for question, key in asked:
            if self._missing(question, key):
                self._asked[key] = question
        if self._asked and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None and any(self._missing(question, key) for question, key in asked):
            await asyncio.wait([self._asking], timeout=_PATIENCE_S)
        return [None if self._missing(question, key) else self._curve(question, key) for question, key in asked]

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _missing(self, question: RateQuestion, key: Hashable) -> list[int]:
        known = self._known.get(key, {})
        return [size for size in question.sizes() if size not in known]

    def _curve(self, question: RateQuestion, key: Hashable) -> tuple[RatePoint, ...]:
        if key not in self._known:
            return ()  # there is no GPU for it: nothing was asked
        self._known.move_to_end(key)
        made = self._made.get(key)
        if made is None or made[0] != question.most:
            rates = [(size, self._known[key][size]) for size in question.sizes()]
            curve = tuple(RatePoint(gpus=size, examples_per_s=rate) for size, rate in rates if rate is not None)
            made = self._made[key] = (question.most, curve)
        return made[1]

    async def _ask(self) -> None:
        while self._asked:
            key = next(iter(self._asked))
            question = self._asked[key]
            missing = self._missing(question, key)
            try:
                with noting("rates", self._note):
                    rates = await asyncio.to_thread(_rates, question, missing, self._cache_dir)
            except Exception:
                # As for a size without a plan: the job is given its minimum, and its own question to the planner tells.
                self._log.exception("the planner failed", global_batch=question.spec.global_batch)
                rates = dict.fromkeys(missing)
            self._known.setdefault(key, {}).update(rates)
            self._made.pop(key, None)
            if self._asked.get(key) is question:
                del self._asked[key]
            while len(self._known) > _REMEMBERED:
                self._made.pop(self._known.popitem(last=False)[0], None)
        self._bell.ring()


def _rates(question: RateQuestion, gpus: Iterable[int], cache_dir: Path | None) -> dict[int, float | None]:
    """In a thread. None: no plan for so many."""
    load_planner(cache_dir)
    rates: dict[int, float | None] = {}
    for count in gpus:
        try:
            best = question.choose(count).best
        except ValueError:  # no fleet would do
            best = None
        rates[count] = None if best is None else best.examples_per_s
    return rates
