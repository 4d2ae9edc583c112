"""Profiles of models whose times and sizes are whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_planner.profile.document import Links, Measurement, Profile, SectionProfile, SharedParameter


def make_profile(
    weights: Sequence[int],
    sizes: Sequence[int] = (1, 2, 4),
    *,
    fixed_us: float = 0,
    state_bytes: int = 1000,
    activation_bytes: int = 100,
    links: Links | None = None,
    tied: bool = False,
    messages: Sequence[int] = (),
    optimizer_us: float = 0.0,
) -> Profile:
    """Sections whose forward takes weight × (fixed_us + 100 µs × m), backward twice that."""
    sections = []
    for index, weight in enumerate(weights):
        measurements = tuple(
            Measurement(
                micro_batch=size,
                forward_us=weight * (fixed_us + 100 * size),
                backward_us=2 * weight * (fixed_us + 100 * size),
                recompute_us=weight * (fixed_us + 100 * size),
                output_bytes=(messages[index] if messages else 10) * size,
                input_bytes=(messages[index - 1] if messages and index > 0 else 10) * size,
                activation_bytes=activation_bytes * weight * size,
            )
            for size in sizes
        )
        sections.append(
            SectionProfile(
                index=index,
                name=f"block.{index}",
                parameter_bytes=state_bytes // 4 * weight,
                gradient_bytes=state_bytes // 4 * weight,
                optimizer_bytes=state_bytes // 2 * weight,
                optimizer_us=optimizer_us * (1 + 3 * index),  # not in proportion to the work
                measurements=measurements,
            )
        )
    shared = (SharedParameter(name="wte", sections=(0, len(weights) - 1), bytes=500),) if tied else ()
    return Profile(sections=tuple(sections), links=links or Links(), shared_parameters=shared)
