"""The parts of a move to another stage: whose stage changes, the modules' tensors, and the optimizers' groups."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from small_gpt import H, Task, example_batch, make_model
from varuna import CutPoint
from varuna.checkpoint import MismatchError, TrainingState
from varuna.checkpoint.format.manifest import FileKind
from varuna.checkpoint.saving.snapshot import HostBuffers, RankSnapshot, make_snapshot
from varuna.checkpoint.state.group_options import OptionsByName, encode_groups
from varuna.checkpoint.state.rank_state import fill_values
from varuna.checkpoint.state.stage_state import held_state, state_dict_names
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.topology import stage_sections
from varuna.holdings.exchange import MoveObstacle, StateExchange
from varuna.model.tensor_swap import TensorSwap
from varuna.optim.host_parameters import HostParameters
from varuna.optim.optimizers import find_foreign_state, replace_parameters
from varuna.partition import ModelMap, PartitionError, Stage, build_stage, recut_stage, trace
from varuna.partition.stages.recutting import list_lost_writes
from varuna.partition.tracing.retracer import ModelState, Retracer
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


def test_what_passes_hides_no_obstacle_that_stays() -> None:
    """All ranks report to their agents what they have agreed on."""
    passes, stays = MoveObstacle("it does not answer", is_passing=True), MoveObstacle("the script keeps w")
    others = [json.dumps({"obstacle": one}) for one in (None, passes)]
    exchange = StateExchange(lambda _, own: [*others, own], key=MeetingKey(b"secret"), rank=2, host="")
    assert exchange.agree(stays) == stays
    assert exchange.agree(None) == passes


# ---------------------------------------------------------------- modules


def make_stage(task: Task, sections: range) -> tuple[Stage, ModelMap, Retracer]:
    model = make_model(task)
    model_map = trace(model, example_batch(2))
    retracer = Retracer(model, example_batch(2), [sections])
    return build_stage(model, model_map, sections.start, sections.stop, device=CPU), model_map, retracer


def recut(stage: Stage, model_map: ModelMap, retracer: Retracer, sections: range) -> Stage:
    trains = {name: p.requires_grad for name, p in make_model(Task()).named_parameters()}
    return recut_stage(stage, retracer.skeleton, model_map, sections, wrapped_map=model_map, trains=trains)


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


class Scale(nn.Module):
    """Without parameters, so that its code runs again in all later stages."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("value", torch.empty(1), persistent=persistent)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("value").fill_(2.0)

    def forward(self) -> Tensor:
        return self.get_buffer("value").sqrt()


class EncoderDecoder(nn.Module):
    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.scale = Scale(persistent)
        self.decoder = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.cut_points = [CutPoint() for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for block, cut_point in zip(self.encoder, self.cut_points[:2], strict=True):
            x = cut_point(block(x))
        t = self.scale()
        for block, cut_point_after in zip(self.decoder, [*self.cut_points[2:], nn.Identity()], strict=True):
            x = cut_point_after(block(x * t if self.training else x))
        return x.square().mean()


ENCODER, OWNER, LATE = range(2), range(2, 3), range(4, 5)


class Scaled:
    """A rank's stage of an `EncoderDecoder`, and what the script sees of it."""

    def __init__(self, sections: range, *, device: str = "cpu", persistent: bool = True) -> None:
        with torch.device(device):
            model = EncoderDecoder(persistent)
        example = {"x": torch.zeros(2, H)}
        self.map = self.wrapped_map = trace(model, example)
        self.retracer = Retracer(model, example, [sections])
        self.stage = build_stage(model, self.map, sections.start, sections.stop, device=CPU)
        self.names = state_dict_names(model, self.map)
        self.swap = TensorSwap(self.stage, self.stage.parameters)

    @property
    def script_value(self) -> Tensor:
        return self.swap.module.get_buffer("scale.value")

    @property
    def state(self) -> TrainingState:
        return held_state(self.map, self.stage, self.stage.parameters, state_dict=self.names)

    def move(self, sections: range) -> None:
        lost_writes = list_lost_writes(self.swap.module)
        self.swap.hold_pass_tensors()
        self.stage = recut_stage(
            self.stage,
            self.retracer.skeleton,
            self.map,
            sections,
            wrapped_map=self.wrapped_map,
            trains=dict.fromkeys(self.map.parameter_bytes, True),
            lost_writes=lost_writes,
        )
        self.swap.follow_stage(self.stage, self.stage.parameters)
        self.retracer.follow_stages([sections])

    def set_mode(self, training: bool) -> None:
        modes = {path: training for path, _ in self.stage.module.named_modules()}
        trains = dict.fromkeys(self.map.parameter_bytes, True)
        self.map = self.retracer.trace_state(ModelState(modes, trains), self.wrapped_map)
        with self.swap.change_pass_tensors():
            self.stage.module.train(training)
            self.stage.apply_map(self.map)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(ENCODER, LATE), (ENCODER, OWNER), (LATE, ENCODER), (LATE, OWNER), (OWNER, LATE), (ENCODER, range(5))],
    ids=str,
)
def test_a_buffer_that_a_moved_stage_reads_has_its_value_or_is_fetched(
    before: range, after: range, device: str
) -> None:
    rank, expected = Scaled(before, device=device), Scaled(after, device=device)
    had = set(rank.state.tensors)
    rank.move(after)
    assert rank.stage.read.keys() == expected.stage.read.keys()
    assert rank.stage.buffers.keys() == expected.stage.buffers.keys()
    fetched = rank.state.buffers.keys() - had
    for name, buffer in rank.stage.read.items():
        assert name in fetched or torch.equal(buffer, expected.stage.read[name])
        assert rank.state.section_of[name] == OWNER.start


def test_a_stage_that_moves_in_one_mode_has_what_it_reads_in_another() -> None:
    rank = Scaled(ENCODER)
    rank.set_mode(training=False)
    rank.move(LATE)
    assert rank.state.buffers.keys() == {"scale.value"}
    rank.set_mode(training=True)
    assert rank.stage.module.get_buffer("scale.value") is rank.stage.read["scale.value"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_move_brings_the_value_that_the_owner_has(device: str) -> None:
    owner = Scaled(OWNER, device=device)
    with torch.no_grad():
        owner.script_value.fill_(9.0)
    had = Scaled(ENCODER, device=device)
    had.move(LATE)
    files = make_snapshot(owner.state, 1, generation=1, replica=0, replicas=1, rank=0, buffers=HostBuffers()).files
    for file in files:
        if file.kind is FileKind.PARAMETERS:
            fill_values(had.state, file.tensors)
    assert had.script_value.item() == 9.0


def test_a_buffer_of_several_stages_is_written_by_its_owner_and_read_alone() -> None:
    def snapshot(state: TrainingState) -> RankSnapshot:
        return make_snapshot(state, 1, generation=1, replica=0, replicas=1, rank=0, buffers=HostBuffers())

    late, owner = snapshot(Scaled(LATE).state), snapshot(Scaled(OWNER).state)
    assert not [file.name for file in late.files if "scale.value" in file.holds]
    assert set(late.tensors_of) == {LATE.start}
    assert [file.holds for file in owner.files if "scale.value" in file.holds] == [("scale.value",)]


@pytest.mark.parametrize("owns", [False, True])
def test_what_the_script_has_written_to_a_buffer_of_no_checkpoint_cannot_move(owns: bool) -> None:
    had = Scaled(OWNER if owns else ENCODER, persistent=False)
    with torch.no_grad():
        had.script_value.fill_(9.0)
    with pytest.raises(PartitionError, match=r"the script has changed the buffer scale\.value, whose value is in no"):
        had.move(ENCODER if owns else LATE)


def test_a_buffer_of_no_checkpoint_that_nobody_has_changed_moves() -> None:
    had = Scaled(ENCODER, persistent=False)
    had.move(LATE)
    assert had.script_value.item() == 2.0
    had.move(ENCODER)
    had.move(LATE)
    assert had.script_value.item() == 2.0


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
