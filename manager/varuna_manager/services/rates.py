"""How fast each job would be with so many GPUs: the planner's answers, by which GPUs are shared out.

Asked in one thread, remembered for each number of GPUs. Whoever cannot wait gets what is known so far.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from varuna_manager.domain.sharing import RatePoint, sizes
from varuna_manager.domain.spec import JobSpec
from varuna_manager.services.bell import Bell
from varuna_manager.services.planning import load_planner

_REMEMBERED = 256
"""Jobs' curves."""
_PATIENCE_S = 0.5
"""Of a look at all jobs: a small fleet's curves take no longer."""


@dataclass(frozen=True, kw_only=True)
class RateQuestion:
    profile_json: str
    spec: JobSpec
    most: int
    """GPUs that the job could have at most."""
    device_memory_bytes: int | None
    gpus_per_vm: int

    def key(self) -> str:
        profile = hashlib.sha256(self.profile_json.encode()).hexdigest()
        parts = (profile, self.spec.global_batch, self.spec.plan, self.device_memory_bytes, self.gpus_per_vm)
        return repr(parts)

    def sizes(self) -> tuple[int, ...]:
        return sizes(self.most)


class RateService:
    """`cache_dir`: as PlanningService's. Rings when an answer has come that somebody did not wait for."""

    def __init__(self, bell: Bell, cache_dir: Path | None = None) -> None:
        self._bell = bell
        self._cache_dir = cache_dir
        self._known: OrderedDict[str, dict[int, float | None]] = OrderedDict()
        self._asked: dict[str, RateQuestion] = {}
        self._asking: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("varuna.planning")

    async def curves(self, questions: Iterable[RateQuestion]) -> list[tuple[RatePoint, ...] | None]:
        """For each question, the rates by GPUs, where there is a plan; None: the planner is still at it."""
        asked = [(question, question.key()) for question in questions]
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

    def _missing(self, question: RateQuestion, key: str) -> list[int]:
        known = self._known.get(key, {})
        return [size for size in question.sizes() if size not in known]

    def _curve(self, question: RateQuestion, key: str) -> tuple[RatePoint, ...]:
        if key not in self._known:
            return ()  # there is no GPU for it: nothing was asked
        self._known.move_to_end(key)
        known = self._known[key]
        rates = ((size, known[size]) for size in question.sizes())
        return tuple(RatePoint(gpus=size, examples_per_s=rate) for size, rate in rates if rate is not None)

    async def _ask(self) -> None:
        while self._asked:
            key = next(iter(self._asked))
            question = self._asked[key]
            missing = self._missing(question, key)
            try:
                rates = await asyncio.to_thread(_rates, question, missing, self._cache_dir)
            except Exception:
                # As for a size without a plan: the job is given its minimum, and its own question to the planner tells.
                self._log.exception("the planner failed", global_batch=question.spec.global_batch)
                rates = dict.fromkeys(missing)
            self._known.setdefault(key, {}).update(rates)
            if self._asked.get(key) is question:
                del self._asked[key]
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._bell.ring()


def _rates(question: RateQuestion, gpus: Iterable[int], cache_dir: Path | None) -> dict[int, float | None]:
    """In a thread. None: no plan for so many."""
    load_planner(cache_dir)
    from varuna_planner.auto_config import Pins, choose_plan
    from varuna_planner.profile import Profile

    profile, wanted = Profile.from_json(question.profile_json), question.spec.plan
    rates: dict[int, float | None] = {}
    for count in gpus:
        try:
            best = choose_plan(
                profile,
                gpus=count,
                global_batch=question.spec.global_batch,
                device_memory_bytes=question.device_memory_bytes,
                gpus_per_vm=question.gpus_per_vm,
                pins=Pins(p=wanted.p, d=wanted.d, micro_batch=wanted.micro_batch),
            ).best
        except ValueError:  # no fleet would do
            best = None
        rates[count] = None if best is None else best.examples_per_s
    return rates
