"""The parts of a move to another stage: whose stage changes, the modules' tensors, and the optimizers' groups."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from small_gpt import Task, example_batch, make_model
from varuna.checkpoint import MismatchError
from varuna.checkpoint.state.group_options import OptionsByName, encode_groups
from varuna.distributed.topology import stage_sections
from varuna.model.tensor_swap import TensorSwap
from varuna.optim.host_parameters import HostParameters
from varuna.optim.optimizers import find_foreign_state, replace_parameters
from varuna.partition import ModelMap, Stage, build_stage, recut_stage, trace
from varuna.partition.tracing.retracer import Retracer
from varuna.roles.reshaping import GenerationMember, must_move

CPU = torch.device("cpu")


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_job_moves_where_any_rank_has_another_stage(p: int, d: int, data: st.DataObject) -> None:
    stages = stage_sections((), p, 8)
    held = [stages[rank % p] for rank in range(p * d)]
    others = data.draw(st.lists(st.tuples(st.integers(0, p * d - 1), st.integers(0, 7), st.integers(1, 8)), max_size=2))
    for rank, first, end in others:
        held[rank] = range(first, end)
    members = [
        GenerationMember.from_json(GenerationMember(committed=3, sections=(one.start, one.stop)).to_json())
        for one in held
    ]
    expected = any((one.start, one.stop) != (stages[r % p].start, stages[r % p].stop) for r, one in enumerate(held))
    assert must_move(members, stages) is expected


# ---------------------------------------------------------------- modules


def make_stage(task: Task, sections: range) -> tuple[Stage, ModelMap, Retracer]:
    model = make_model(task)
    model_map = trace(model, example_batch(2))
    retracer = Retracer(model, example_batch(2), [sections])
    return build_stage(model, model_map, sections.start, sections.stop, device=CPU), model_map, retracer


def recut(stage: Stage, model_map: ModelMap, retracer: Retracer, sections: range) -> Stage:
    trains = {name: p.requires_grad for name, p in make_model(Task()).named_parameters()}
    return recut_stage(stage, retracer.skeleton, model_map, sections, trains=trains)


TASK = Task(counts=True, tied_blocks=(0, 2))


@pytest.mark.parametrize(
    ("before", "after"),
    [(range(2), range(1, 3)), (range(1), range(2, 4)), (range(4), range(2, 4)), (range(1, 2), range(4))],
    ids=str,
)
def test_another_stage_in_the_same_modules_is_that_stage(before: range, after: range) -> None:
    stage, model_map, retracer = make_stage(TASK, before)
    kept, modules = dict(stage.parameters), list(stage.module.modules())
    moved = recut(stage, model_map, retracer, after)
    expected, _, _ = make_stage(TASK, after)
    assert list(moved.parameters) == list(expected.parameters)
    assert moved.buffers.keys() == expected.buffers.keys()
    assert moved.read.keys() == expected.read.keys()
    for name in kept.keys() & moved.parameters.keys():
        assert moved.parameters[name] is not kept[name], "whoever keeps it is found"
        assert moved.parameters[name].data_ptr() == kept[name].data_ptr()
    assert all(one is other for one, other in zip(moved.module.modules(), modules, strict=True))
    with torch.no_grad():
        for name, parameter in expected.parameters.items():
            moved.parameters[name].copy_(parameter)
    received = [torch.randn(boundary.shape_for(2)) for boundary in expected.receives]
    inputs = example_batch(2)
    results = [one.forward(inputs, received) for one in (moved, expected)]
    for ours, theirs in zip(*(x if isinstance(x, list) else [x] for x in results), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_parameter_that_the_script_keeps_is_found() -> None:
    stage, model_map, retracer = make_stage(Task(), range(2))
    swap = TensorSwap(stage, stage.parameters)
    script = [swap.parameters["embedding.weight"], swap.parameters["blocks.1.mix.weight"]]
    swap.hold_pass_tensors()
    stage = recut(stage, model_map, retracer, range(1, 3))
    left = swap.follow_stage(stage, stage.parameters)
    gc.collect()
    kept = {name for name, reference in left if reference() is not None}
    assert kept == {"embedding.weight", "blocks.1.mix.weight"}, "also where the parameter is still of the stage"
    assert stage.module.get_parameter("embedding.weight").is_meta
    script.clear()
    assert not any(reference() is not None for _, reference in left)


def test_host_parameters_keep_the_copies_that_stay() -> None:
    stage, model_map, retracer = make_stage(Task(), range(2))
    host = HostParameters(stage.parameters)
    before = dict(host.parameters)
    stage = recut(stage, model_map, retracer, range(1, 3))
    host.follow_stage(stage.parameters)
    assert host.parameters.keys() == stage.parameters.keys()
    for name in before.keys() & stage.parameters.keys():
        assert host.parameters[name].data_ptr() == before[name].data_ptr() != stage.parameters[name].data_ptr()


# ---------------------------------------------------------------- optimizers


def make_parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2)) for name in names}


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_groups_get_the_parameters_of_the_stage_and_lose_the_others() -> None:
    has = make_parameters("a", "b", "c")
    optimizer = torch.optim.AdamW([{"params": [has["a"], has["b"]]}, {"params": [has["c"]], "lr": 0.5}], lr=0.1)
    step(optimizer)
    optimizer.state["count"] = {"steps": 1}  # type: ignore[index]
    now, moments = make_parameters("b", "d"), optimizer.state[has["b"]]
    replace_parameters([optimizer], [[{"a", "b", "d"}, {"c"}]], has, now, CPU)
    first, second = optimizer.param_groups
    assert [*map(id, first["params"])] == [id(now["b"]), id(now["d"])]
    assert (first["lr"], second["lr"]) == (0.1, 0.5)
    assert [*optimizer.state] == [now["b"], "count"] or [*optimizer.state] == ["count", now["b"]]
    assert optimizer.state[now["b"]] is moments
    assert [len(parameter) for parameter in second["params"]] == [1], "a placeholder, because torch wants one"
    step(optimizer)
    replace_parameters([optimizer], [[{"b"}, {"c"}]], now, make_parameters("c"), CPU)
    assert [[len(parameter) for parameter in group["params"]] for group in optimizer.param_groups] == [[1], [2]]


class FlatAdam(torch.optim.Adam):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.flat = {"moments": torch.zeros(sum(map(len, parameters)))}


def test_state_outside_of_the_parameters_is_found() -> None:
    parameters = [*make_parameters("a", "b").values()]
    adam = torch.optim.Adam(parameters, lr=torch.tensor(0.1))
    step(adam)
    assert find_foreign_state(adam) == ""
    assert find_foreign_state(FlatAdam(parameters)) == "tensors in flat"
    adam.state["of all"] = {}  # type: ignore[index]
    assert find_foreign_state(adam) == "", "every rank has it, and checkpoints, too"
    adam.state[torch.ones(1)] = {}
    assert find_foreign_state(adam) == "state of other things than its parameters"


def kept_options(*optimizers: torch.optim.Optimizer, names: dict[int, str]) -> OptionsByName:
    groups = [group for one in optimizers for group in encode_groups([one], names, {}, "rank")[0]]
    return OptionsByName(groups, {}, names, "memory")


def test_members_come_from_the_ranks_that_had_them() -> None:
    one, other = make_parameters("a", "b"), make_parameters("c", "d")
    names = {id(parameter): name for name, parameter in {**one, **other}.items()}
    first = torch.optim.SGD([{"params": [one["a"]]}, {"params": [one["b"]], "lr": 0.5}], lr=0.1)
    second = torch.optim.SGD([{"params": [other["c"]]}, {"params": [other["d"]], "lr": 0.5}], lr=0.1)
    assert kept_options(first, second, names=names).find_members([first]) == [[{"a", "c"}, {"b", "d"}]]
    second.param_groups[1]["lr"] = 0.25
    with pytest.raises(MismatchError, match=r"group 1 is another on each rank: it differs in lr \(0.5 and 0.25\)"):
        kept_options(first, second, names=names).find_members([first])
    third = torch.optim.SGD([*other.values()], lr=0.1)
    with pytest.raises(MismatchError, match="only some ranks have parameter group 1"):
        kept_options(first, third, names=names).find_members([third])
