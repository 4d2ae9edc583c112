"""What a user fixes of a plan, and whether any fleet could run it so."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_planner.schedule.batching import count_micro_batches

__all__ = ["NO_PINS", "Pins"]


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What the user fixes; None leaves it to the planner."""

    p: int | None = None
    d: int | None = None
    micro_batch: int | None = None

    def check_pins(self, *, sections: int, global_batch: int, smallest: int) -> None:
        """Raises ValueError when a pin can never be met, whatever the fleet. `smallest`: micro-batch measured."""
        for name, pinned in (("p", self.p), ("d", self.d), ("micro_batch", self.micro_batch)):
            if pinned is not None and pinned < 1:
                raise ValueError(f"{name}={pinned} is pinned but must be at least 1")
        if self.p is not None and self.p > sections:
            raise ValueError(
                f"p={self.p} is pinned but the model has {sections} sections, so at most {sections} stages: "
                f"pin p to at most {sections}, or add cut-points"
            )
        if self.micro_batch is not None and self.micro_batch > global_batch:
            raise ValueError(
                f"micro_batch={self.micro_batch} is pinned but the global batch has only {global_batch} examples: "
                f"pin at most {global_batch}, or enlarge the global batch"
            )
        if self.d is not None:
            # Without a pinned micro-batch it may be as small as the smallest that was measured.
            size = self.micro_batch or min(global_batch, smallest)
            most = count_micro_batches(global_batch, size)
            if self.d > most:
                raise ValueError(
                    f"d={self.d} is pinned but a global batch of {global_batch} has at most {most} micro-batches "
                    f"(of {size}), and every replica needs one: pin d to at most {most}, or enlarge the global batch"
                )


NO_PINS = Pins()
