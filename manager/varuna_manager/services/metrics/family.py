"""A metric as it is documented."""

from __future__ import annotations

from dataclasses import dataclass

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


@dataclass(frozen=True)
class Family:
    name: str
    """Without the endings that Prometheus gives to samples."""
    help: str
    labels: tuple[str, ...] = ()
    kind: str = GAUGE

    @property
    def shown(self) -> str:
        """The name that queries use: a counter's ends with _total."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == HISTOGRAM:
            return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum"))
        return (self.shown,)
