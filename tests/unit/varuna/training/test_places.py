"""Whether ranks stand at one place of their scripts, where they can take other stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varuna.roles.reshaping import GenerationMember, explain_apart

AT_START = GenerationMember(committed=3, sections=(0, 2), is_at_start=True, evaluations=6)
EVALUATING = replace(AT_START, is_at_start=False, is_evaluating=True)
ELSEWHERE = replace(AT_START, is_at_start=False)
NEW = GenerationMember(committed=0, sections=(0, 2), is_new=True)
APART = "ranks are at different places of their scripts"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([AT_START, AT_START], ""),
        ([AT_START, replace(AT_START, evaluations=7)], ""),
        ([AT_START, replace(AT_START, committed=2)], APART),
        ([AT_START, NEW], ""),
        ([EVALUATING, EVALUATING], ""),
        ([EVALUATING, replace(EVALUATING, evaluations=7)], APART),
        ([EVALUATING, AT_START], APART),
        ([EVALUATING, NEW], "ranks are in an evaluation, where no new process can begin"),
        ([ELSEWHERE, ELSEWHERE], APART),
    ],
)
def test_ranks_stand_at_the_start_of_a_step_or_in_the_same_evaluation(
    members: list[GenerationMember], expected: str
) -> None:
    assert explain_apart(members, 2) == expected
    assert explain_apart(members[::-1], 2) == expected
