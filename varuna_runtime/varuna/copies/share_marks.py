"""Marks: how much of its share of a step a replica has done when its ranks copy their sums.

All ranks of a replica copy their sums after the same micro-batches, so the copies of one mark fit together whatever
becomes of the ranks. `ShareMark` is what processes say of such a copy to one another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from varuna.pipeline.micro_batches import join_spans, split_spans
from varuna.pipeline.pass_state import PassResult
from varuna_planner.liveput.morph_cost import MARKS_S
from varuna_planner.schedule.batching import renumber_micro_batches

__all__ = ["MarkKey", "MarkedSums", "ShareMark", "micro_batches_between_marks"]


class MarkKey(NamedTuple):
    """One mark of one replica."""

    generation: int
    replica: int
    step: int
    micro_batches: int
    """How many are in the sums."""


@dataclass(frozen=True, kw_only=True)
class ShareMark:
    """A rank's sums at a mark."""

    generation: int
    replica: int
    step: int
    """The step under way."""
    sections: tuple[int, int]
    """Of the rank's stage: the first, and the one after the last."""
    micro_batch: int
    """Examples in each micro-batch."""
    spans: tuple[tuple[int, int], ...]
    """The micro-batches of the global batch that are in the sums, as runs [first, end)."""
    loss_sum: float = 0.0
    weight: float = 0.0
    examples: int = 0
    expected_weight: float = 0.0
    """Of these micro-batches (`PassResult`); 0 except on the last stage."""
    without_sums: tuple[tuple[int, int], ...] = ()
    """The sections of each stage of the replica that trains nothing, whose ranks make no marks."""
    is_empty: bool = False
    """Whether it is of such a stage."""

    @classmethod
    def of_pass(
        cls,
        numbers: Sequence[int],
        passed: PassResult,
        *,
        generation: int,
        replica: int,
        step: int,
        sections: range,
        micro_batch: int,
        without_sums: Sequence[range] = (),
    ) -> ShareMark:
        return cls(
            generation=generation,
            replica=replica,
            step=step,
            sections=(sections.start, sections.stop),
            micro_batch=micro_batch,
            spans=tuple(join_spans(numbers)),
            loss_sum=passed.loss_sum,
            weight=passed.weight,
            examples=passed.examples,
            expected_weight=passed.expected_weight,
            without_sums=tuple((stage.start, stage.stop) for stage in without_sums),
        )

    def list_empty(self) -> list[ShareMark]:
        """The same mark of each stage that trains nothing."""
        return [
            ShareMark(
                generation=self.generation,
                replica=self.replica,
                step=self.step,
                sections=sections,
                micro_batch=self.micro_batch,
                spans=self.spans,
                is_empty=True,
            )
            for sections in self.without_sums
        ]

    def renumber_micro_batches(self, micro_batch: int, global_batch: int) -> ShareMark:
        """The same sums, whose micro-batches have so many examples now."""
        if micro_batch == self.micro_batch:
            return self
        numbers = renumber_micro_batches(
            split_spans(self.spans), before=self.micro_batch, after=micro_batch, global_batch=global_batch
        )
        return replace(self, micro_batch=micro_batch, spans=tuple(join_spans(numbers)))

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(split_spans(self.spans))

    @property
    def key(self) -> MarkKey:
        return MarkKey(self.generation, self.replica, self.step, sum(end - first for first, end in self.spans))

    @property
    def owner(self) -> tuple[int, tuple[int, int]]:
        """The rank that made it, by its replica and its stage."""
        return self.replica, self.sections

    @property
    def passed(self) -> PassResult:
        """The result of the passes over these micro-batches, without times."""
        return PassResult(
            loss_sum=self.loss_sum,
            weight=self.weight,
            examples=self.examples,
            expected_weight=self.expected_weight,
            forward_us=0,
            backward_us=0,
            wait_us=0,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ShareMark:
        """Raises ValueError for anything else."""
        return cls.from_document(json.loads(text))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ShareMark:
        """Raises ValueError for anything else."""
        try:
            first, end = map(int, document["sections"])
            spans, without_sums = (
                tuple((int(begin), int(stop)) for begin, stop in document[name]) for name in ("spans", "without_sums")
            )
            return cls(**{**document, "sections": (first, end), "spans": spans, "without_sums": without_sums})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no mark of a share: {error!r}") from None


class MarkedSums(NamedTuple):
    """The sums of one rank at a mark, in the memory of this process."""

    mark: ShareMark
    sums: Mapping[str, Tensor]
    """By first name of the parameter."""

    def renumber_micro_batches(self, micro_batch: int, global_batch: int) -> MarkedSums:
        return self._replace(mark=self.mark.renumber_micro_batches(micro_batch, global_batch))


def micro_batches_between_marks(micro_batch_s: float) -> int:
    """How many micro-batches a replica runs from one mark to the next. `micro_batch_s`: what each takes; 0: not
    known. Returns 0 if there are to be none."""
    return math.ceil(MARKS_S / micro_batch_s) if micro_batch_s > 0 else 0
