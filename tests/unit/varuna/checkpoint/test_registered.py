"""Registered states in checkpoints: by section, once for the job, by rank, in the same shape and in another."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from varuna.checkpoint import (
    CheckpointWriter,
    LoadedCheckpoint,
    SaveOutcome,
    ShapePosition,
    StateScope,
    TrainingState,
    load_checkpoint,
    read_manifest,
)
from varuna.checkpoint.format.manifest import FileKind
from waiting import DEADLINE_S

SECTIONS = 4
ALIASES = {"tied": "weight0", **{f"weight{section}": f"weight{section}" for section in range(SECTIONS)}}
"""`weight0` is used by the first and the last section, there as `tied`."""


def state_of(
    p: int, d: int, rank: int, user: dict[str, Any], per: dict[str, StateScope] | None = None
) -> TrainingState:
    stage = rank % p
    sections = range(SECTIONS * stage // p, SECTIONS * (stage + 1) // p)
    names = dict.fromkeys([*([] if 3 not in sections else ["weight0"]), *(f"weight{section}" for section in sections)])
    return TrainingState(
        sections=sections,
        section_count=SECTIONS,
        parameters={name: torch.zeros(2) for name in names},
        section_of={name: int(name[-1]) for name in names},
        tied={"weight0"},
        user=user,
        user_scopes=per or {},
        position=ShapePosition(rank=rank, p=p, d=d),
        state_dict=ALIASES,
    )


def save(store: Path, states: list[TrainingState], step: int = 1) -> SaveOutcome:
    p, d = states[0].position.p, states[0].position.d
    ranks = [
        CheckpointWriter(str(store), generation=1, position=ShapePosition(rank=rank, p=p, d=d)) for rank in range(p * d)
    ]
    for checkpointer, state in zip(ranks, states, strict=True):
        assert checkpointer.start_save(step, state)
    outcomes = [checkpointer.wait(DEADLINE_S) for checkpointer in ranks]
    assert outcomes[0] is not None
    return outcomes[0]


def saved(store: Path, states: list[TrainingState]) -> None:
    outcome = save(store, states)
    assert outcome.result == "committed", outcome.error


def loaded(store: Path, p: int, d: int) -> list[LoadedCheckpoint]:
    return [load_checkpoint(str(store), 1, state_of(p, d, rank, {})) for rank in range(p * d)]


def average(state: TrainingState) -> dict[str, Any]:
    """A state as scripts keep it: tensors by name, beside numbers."""
    values = {name: torch.full((2,), float(state.section_of[name])) for name in state.parameters}
    counts = {name: state.section_of[name] for name in state.parameters}
    return {"updates": 7, "parts": [({"weights": values},), {"decay": 0.9, **counts}]}


SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2)]


@pytest.mark.parametrize(("p", "d"), SHAPES)
def test_what_is_keyed_by_names_comes_back_by_name_in_every_shape(tmp_path: Path, p: int, d: int) -> None:
    states = [state_of(p, d, rank, {}) for rank in range(p * d)]
    saved(tmp_path, [state_of(p, d, rank, {"ema": average(state)}) for rank, state in enumerate(states)])
    assert not read_manifest(str(tmp_path), 1).rank_states
    for p2, d2 in SHAPES:
        for rank, found in enumerate(loaded(tmp_path, p2, d2)):
            state = state_of(p2, d2, rank, {})
            expected = average(state)
            updates, [(weights,), counts] = found.user["ema"]["updates"], found.user["ema"]["parts"]
            assert updates == 7
            assert list(weights["weights"]) == list(state.parameters), "in the order of the parameters"
            for name, value in weights["weights"].items():
                assert torch.equal(value, expected["parts"][0][0]["weights"][name])
            assert counts == expected["parts"][1]


def test_names_of_the_same_weight_are_kept_as_the_script_has_them(tmp_path: Path) -> None:
    saved(tmp_path, [state_of(2, 1, 0, {"ema": {"weight0": 1}}), state_of(2, 1, 1, {"ema": {"tied": 1, "weight3": 2}})])
    [one] = loaded(tmp_path, 1, 1)
    # Both stages hold it, and the stage with its first section writes what it has.
    assert one.user["ema"] == {"weight0": 1, "weight3": 2}


def test_equal_states_are_kept_once_and_nothing_is_left_of_the_other_ranks(tmp_path: Path) -> None:
    def schedule() -> dict[str, Any]:
        return {"rates": [0.1, math.nan], "milestones": Counter([2, 2]), "scale": torch.ones(3)}

    saved(tmp_path, [state_of(2, 2, rank, {"schedule": schedule()}) for rank in range(4)])
    manifest = read_manifest(str(tmp_path), 1)
    assert [entry.name for entry in manifest.files if entry.kind is FileKind.STATE] == ["state-g1.safetensors"]
    assert not list((tmp_path / "varuna_ckpt_1").glob("state-g1-r*"))
    for found in loaded(tmp_path, 3, 1):
        assert found.user["schedule"]["milestones"] == Counter([2, 2])
        assert torch.equal(found.user["schedule"]["scale"], torch.ones(3))
        assert not found.rank_0s


def test_a_state_that_only_another_rank_has_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, [state_of(2, 1, 0, {}), state_of(2, 1, 1, {"head": {"scale": torch.ones(3)}})])
    [one] = loaded(tmp_path, 1, 1)
    assert torch.equal(one.user["head"]["scale"], torch.ones(3))


def sampler(rank: int) -> dict[str, Any]:
    return {"position": rank, "order": torch.full((2,), rank // 2)}


def test_what_differs_comes_back_in_the_same_shape_and_is_known_as_rank_0s_in_another(tmp_path: Path) -> None:
    saved(tmp_path, [state_of(2, 2, rank, {"sampler": sampler(rank), "equal": 1}) for rank in range(4)])
    for rank, found in enumerate(loaded(tmp_path, 2, 2)):
        assert found.user["sampler"]["position"] == rank
        assert torch.equal(found.user["sampler"]["order"], sampler(rank)["order"])
        assert not found.rank_0s
    for found in loaded(tmp_path, 4, 1):  # as many ranks, and other ones
        assert found.rank_0s == {"sampler"}
        assert found.user["sampler"]["position"] == 0
        assert found.user["equal"] == 1


def test_the_ranks_of_a_state_read_only_their_own_tensors(tmp_path: Path) -> None:
    saved(tmp_path, [state_of(1, 2, rank, {"buffer": torch.full((1000,), rank)}) for rank in range(2)])
    sizes = {entry.name: entry.bytes for entry in read_manifest(str(tmp_path), 1).files}
    first, second = (found.bytes_read for found in loaded(tmp_path, 1, 2))
    # The first rank's file may also have what all ranks need.
    assert second == first + sizes["state-g1-r1.safetensors"]


def test_a_mapping_with_names_of_other_stages_belongs_to_no_section(tmp_path: Path) -> None:
    """A state with tensors that are no longer trained would come back as if they were."""
    whole = {f"weight{section}": section for section in range(SECTIONS)}
    saved(tmp_path, [state_of(2, 1, rank, {"rates": whole, "ema": {**whole, "weight1": rank}}) for rank in range(2)])
    [one] = loaded(tmp_path, 1, 1)
    assert one.user["rates"] == whole
    assert one.rank_0s == {"ema"}


def test_what_is_declared_is_what_is_kept(tmp_path: Path) -> None:
    declared = {"rank": StateScope.RANK, "job": StateScope.JOB, "section": StateScope.SECTION}
    user = {"rank": {"weight0": 5}, "section": {"n": 1, "weight0": 6}}
    states = [
        state_of(1, 2, rank, {**user, "job": {"rank": rank, "tensor": torch.full((2,), rank)}}, declared)
        for rank in range(2)
    ]
    saved(tmp_path, states)
    assert read_manifest(str(tmp_path), 1).rank_states.keys() == {"rank"}
    for found in loaded(tmp_path, 1, 2):
        assert found.user["rank"] == {"weight0": 5}
        assert found.user["section"] == {"n": 1, "weight0": 6}
        assert (found.user["job"]["rank"], found.user["job"]["tensor"].tolist()) == (0, [0, 0])
    assert loaded(tmp_path, 2, 1)[0].rank_0s == {"rank"}


@pytest.mark.parametrize(
    ("pers", "fault"),
    [
        (
            (StateScope.SECTION, StateScope.SECTION),
            r"'mine' is per='section', and rank 1 has other values than rank 0 outside",
        ),
        ((StateScope.JOB, StateScope.RANK), r"'mine' is per='job' on rank 0 and per='rank' on rank 1"),
        ((StateScope.AUTO, StateScope.RANK), r"'mine' is per='auto' on rank 0 and per='rank' on rank 1"),
    ],
)
def test_ranks_that_contradict_each_other_are_told(
    tmp_path: Path, pers: tuple[StateScope, StateScope], fault: str
) -> None:
    states = [
        state_of(2, 1, rank, {"mine": {"list": [torch.full((2,), rank)]}}, {"mine": per})
        for rank, per in enumerate(pers)
    ]
    outcome = save(tmp_path, states)
    assert outcome.result == "failed"
    assert re.search(fault, outcome.error)


def test_averages_come_back_and_begin_with_the_parameters_where_there_were_none(tmp_path: Path) -> None:
    def with_averages(p: int, rank: int, value: float) -> TrainingState:
        state = state_of(p, 1, rank, {})
        averages: dict[str, Tensor] = {name: torch.full((2,), value) for name in state.parameters if name != "weight2"}
        return TrainingState(**{**vars(state), "averages": averages})

    saved(tmp_path, [with_averages(2, rank, 3.0) for rank in range(2)])
    again = with_averages(1, 0, 5.0)
    again.averages["weight2"] = torch.full((2,), 5.0)  # type: ignore[index]
    assert load_checkpoint(str(tmp_path), 1, again).averaged
    assert {name: value.tolist() for name, value in again.averages.items()} == {
        "weight0": [3, 3],
        "weight1": [3, 3],
        "weight2": [0, 0],
        "weight3": [3, 3],
    }
