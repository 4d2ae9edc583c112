"""The pipeline that a cut makes, in times.

Letters: P stages, N micro-batches of one replica. Times are float microseconds. Arrays of times are [2, P]: row 0 for a
full micro-batch, row 1 for the last one, which may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Pipeline"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """One replica's pipeline with its times. A link stands in the column of its earlier stage; the last is not read."""

    micro_batches: int
    """N."""
    forward_us: Floats
    """[2, P], as the other times unless noted otherwise."""
    recompute_us: Floats
    backward_us: Floats
    activation_transfer_us: Floats
    """Of activations from stage s to s + 1; occupies the link."""
    gradient_transfer_us: Floats
    """Of gradients from stage s + 1 to s."""
    latency_us: Floats
    """[P]: added to each message in either direction."""
    finish_us: Floats
    """[P]: what follows a stage's last backward: all-reduce, tied weights."""
    recompute: npt.NDArray[np.bool_]
    """[P]: whether the stage recomputes."""

    @property
    def stages(self) -> int:
        return int(self.recompute.shape[0])
