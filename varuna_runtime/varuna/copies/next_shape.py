"""What the ranks of the shape that a generation is expected to take next lack, and who sends it. Pure.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from varuna.distributed.topology import stage_sections
from varuna_proto.plan import Plan

__all__ = ["SectionPart", "plan_sends"]


class SectionPart(NamedTuple):
    """What one rank sends of a section to another."""

    section: int
    is_tied: bool
    """Whether it is what further sections use, too; False: all of the section."""


def plan_sends(
    present: Plan,
    following: Plan,
    ranks_before: Sequence[int | None],
    section_count: int,
    shared: Mapping[str, Sequence[int]],
) -> dict[tuple[int, int], tuple[SectionPart, ...]]:
    """By the present rank that sends and the next rank that lacks it: parts of sections, in order.

    All ranks compute the same. A part comes from the replica that has the fewest to send so far.

    Args:
        present, following: the plans of the generation that trains, and of the next one.
        ranks_before: by rank in the next one: the present rank of the process; None: it is new.
        section_count: of the model.
        shared: the sections that use a parameter, for those that several do. Its files are those of the first.

    Raises ValueError for a plan that does not fit the model.
    """
    held = stage_sections(present.stage_starts, present.p, section_count)
    wanted = stage_sections(following.stage_starts, following.p, section_count)
    stage_of = {section: stage for stage, sections in enumerate(held) for section in sections}
    sent: Counter[int] = Counter()
    sends: dict[tuple[int, int], tuple[SectionPart, ...]] = {}
    for rank, before in enumerate(ranks_before):
        has: Collection[int] = () if before is None else held[before % present.p]
        for part in _list_lacking(has, wanted[rank % following.p], shared):
            holders = range(stage_of[part.section], present.p * present.d, present.p)
            sender = min(holders, key=lambda holder: (sent[holder], holder))
            sent[sender] += 1
            sends[sender, rank] = (*sends.get((sender, rank), ()), part)
    return sends


def _list_lacking(
    has: Collection[int], wants: Collection[int], shared: Mapping[str, Sequence[int]]
) -> list[SectionPart]:
    """What a process with some sections needs for others."""
    whole = [section for section in wants if section not in has]
    used = [min(users) for users in shared.values() if set(users) & set(wants) and not set(users) & set(has)]
    tied = sorted({section for section in used if section not in wants})
    return [*(SectionPart(section, False) for section in whole), *(SectionPart(section, True) for section in tied)]
