"""The description of a metric."""

from __future__ import annotations

from dataclasses import dataclass

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


@dataclass(frozen=True)
class MetricFamily:
    name: str
    """The name without the suffixes of its samples."""
    help: str
    labels: tuple[str, ...] = ()
    kind: str = GAUGE

    @property
    def exposed_name(self) -> str:
        """The name in queries: a counter's ends with _total."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == HISTOGRAM:
            return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum"))
        return (self.exposed_name,)
