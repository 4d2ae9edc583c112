"""The one door to the planner, for every question about a job's shape.

The planner imports numba, so it is imported only in the threads that ask it. The event loop never waits for it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from varuna_manager.domain.memory_margin import NO_MARGIN, MemoryMargin
from varuna_manager.domain.spec import JobSpec

if TYPE_CHECKING:
    from varuna_planner.profile.document import Profile
    from varuna_planner.search.auto_config import Pins, PlanChoice
    from varuna_planner.search.mixed import MixedChoice, TypedGpus

_PROFILES = 128
"""Profiles in the cache. A job's profile is used twice a second, and for each number of GPUs."""


class GpuCount(NamedTuple):
    """GPUs of one type."""

    gpu_type: str
    gpus: int
    device_memory_bytes: int | None
    """Of the smallest; None: not known."""


def sum_gpu_counts(counts: Iterable[GpuCount]) -> tuple[GpuCount, ...]:
    """The GPUs by type, each type once; types without a GPU are left out."""
    gpus = Counter[str]()
    memories: dict[str, list[int]] = {}
    for each in counts:
        gpus[each.gpu_type] += each.gpus
        memories.setdefault(each.gpu_type, []).extend([each.device_memory_bytes] if each.device_memory_bytes else [])
    return tuple(
        GpuCount(name, count, min(memories[name], default=None)) for name, count in sorted(gpus.items()) if count
    )


@dataclass(frozen=True, kw_only=True)
class ShapeQuestion:
    """What a job's shape depends on, besides the number of its GPUs."""

    profile_json: str
    spec: JobSpec
    device_memory_bytes: int | None
    """Memory of the smallest device; None: not known."""
    gpus_per_vm: int
    trained_micro_batch: int | None = None
    """The micro-batch with which the job has trained; None: it has not trained yet."""
    margin: MemoryMargin = NO_MARGIN

    def shape_key(self) -> Hashable:
        """Equal for questions with the same answers."""
        wanted = self.spec.plan
        pins = (wanted.p, wanted.d, wanted.micro_batch)
        profile = profile_digest(self.profile_json)
        sizes = (self.spec.global_batch, self.trained_micro_batch)
        return profile, sizes, pins, self.margin.limit_device(self.device_memory_bytes), self.gpus_per_vm

    def tell_types_apart(self, counts: Sequence[GpuCount], gpus: int) -> tuple[GpuCount, ...]:
        """`counts`, of those of `gpus` GPUs whose types are known; empty: plans tell no types apart.

        They do not where one type is named and the job's profile says nothing of types, or is of that type, as which
        GPUs of unknown type count.
        """
        if len(counts) != 1:
            return tuple(counts)
        (only,), own = counts, parsed_profile(self.profile_json).gpu_type
        are_as_own = only.gpu_type == own and only.gpus < gpus
        return () if not own or are_as_own else tuple(counts)

    def choose_shape(
        self,
        gpus: int,
        pins: Pins | None = None,
        types: Sequence[GpuCount] = (),
        zones: Sequence[int] = (),
    ) -> PlanChoice | MixedChoice:
        """The best plan for this many GPUs, with the job's own pins if no others are given. Runs in a thread.

        Args:
            types: the GPUs by type; empty: all are equal, as far as that is known.
            zones: the GPUs of each zone; empty: all are in one. Not read where there are several types.

        A job whose random numbers depend on the size of the micro-batches keeps the size with which it has trained.
        Raises ValueError when no fleet would suffice.
        """
        from varuna_planner.search.auto_config import Pins
        from varuna_planner.search.mixed import choose_mixed_plan
        from varuna_planner.search.zones import choose_plan_in_zones

        wanted, profile = self.spec.plan, parsed_profile(self.profile_json)
        micro_batch, kept_for = wanted.micro_batch, ""
        if pins is None and micro_batch is None and self.trained_micro_batch is not None:
            kept_for = profile.micro_batch_kept_for
            micro_batch = self.trained_micro_batch if kept_for else None
        pins = pins or Pins(p=wanted.p, d=wanted.d, micro_batch=micro_batch)
        typed = self.list_typed_gpus(types)
        choice: PlanChoice | MixedChoice
        if len(typed) > 1:
            choice = choose_mixed_plan(
                typed, global_batch=self.spec.global_batch, gpus_per_vm=self.gpus_per_vm, pins=pins
            )
        else:
            choice = choose_plan_in_zones(
                typed[0].profile if typed else profile,
                zones or (gpus,),
                global_batch=self.spec.global_batch,
                device_memory_bytes=self.margin.limit_device(self.device_memory_bytes),
                gpus_per_vm=self.gpus_per_vm,
                pins=pins,
            )
            if typed and choice.best is not None:
                gpu_types = (typed[0].gpu_type,) * (choice.best.p * choice.best.d)
                choice = replace(choice, best=replace(choice.best, gpu_types=gpu_types))
        if kept_for:
            why = f"; the micro-batch stays {micro_batch}, because random numbers depend on it: {kept_for}"
            choice = replace(choice, reason=choice.reason + why)
        if self.margin.factor > 1.0:
            why = f"; it has run out of memory, so stages count {self.margin.factor:.2f} times what the profile says"
            choice = replace(choice, reason=choice.reason + why)
        return choice

    def list_typed_gpus(self, types: Sequence[GpuCount]) -> list[TypedGpus]:
        """The GPUs by type, with the profile of each. Of a type that the job's profile does not know, the speed is
        assumed by the hardware table, until workers on it have reported their times."""
        from varuna_planner.hardware.table import assume_speed
        from varuna_planner.profile.speed import select_gpu_type
        from varuna_planner.search.mixed import TypedGpus

        profile = parsed_profile(self.profile_json)
        precision = profile.environment.get("precision", "")
        return [
            TypedGpus(
                gpu_type=each.gpu_type,
                gpus=each.gpus,
                profile=select_gpu_type(
                    profile, each.gpu_type, assumed_speed=assume_speed(profile.gpu_type, each.gpu_type, precision)
                ),
                device_memory_bytes=self.margin.limit_device(each.device_memory_bytes),
            )
            for each in types
        ]


@lru_cache(maxsize=_PROFILES)
def profile_digest(profile_json: str) -> str:
    return hashlib.sha256(profile_json.encode()).hexdigest()


@lru_cache(maxsize=_PROFILES)
def parsed_profile(profile_json: str) -> Profile:
    """Runs in a thread. Raises ValueError when it is no profile."""
    from varuna_planner.profile.document import Profile

    return Profile.from_json(profile_json)


def is_machines_fault(error: Exception) -> bool:
    """Whether an error of the planner says what the machine lacks, such as space on its disk, and not what is wrong
    with the question."""
    return isinstance(error, OSError | MemoryError) or _has_no_cache(error)


def _has_no_cache(error: Exception) -> bool:
    """When the planner is imported, numba looks for a writable cache folder (the package's own, the user's)."""
    return isinstance(error, RuntimeError) and "no locator" in str(error)


def load_planner(cache_dir: Path | None) -> None:
    """Import the planner. Runs in a thread.

    Args:
        cache_dir: for compiled code, when neither the package's folder nor the user's cache is writable.
    """
    try:
        importlib.import_module("varuna_planner.search.auto_config")
    except RuntimeError as error:
        if cache_dir is None or not _has_no_cache(error):
            raise
        import numba

        numba.config.CACHE_DIR = str(cache_dir)  # type: ignore[attr-defined]
        importlib.import_module("varuna_planner.search.auto_config")
