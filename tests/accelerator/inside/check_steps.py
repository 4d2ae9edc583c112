"""What one training step does on an accelerator: the types that cross, and how often the host waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F
from torch.optim import Optimizer

import simulated
from host_threads import UnseenGate
from small_gpt import Task, example_batch, make_model
from varuna import CutPoint, Varuna
from varuna.checkpoint.saving.snapshot import HostBuffers
from varuna.copies.rank_shares import RankShares
from varuna.copies.replica_marks import ReplicaMarks
from varuna.copies.share_marks import ShareMark
from varuna.copies.share_owner import ShareOwner
from varuna.devices.accelerator import record_event, use_stream
from varuna.devices.copy_stream import CopyStream
from varuna.devices.out_of_memory import measure_shortage
from varuna.distributed.departure import Departure
from varuna.distributed.groups import RankGroup
from varuna.distributed.topology import Topology
from varuna.optim.host_parameters import HostParameters
from varuna.optim.precision import TrainingPrecision
from varuna.optim.reduction import GradientReducer
from varuna.optim.split_check import check_optimizer
from varuna.partition import build_stage, trace
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import pin_inputs, start_loading
from varuna.pipeline.pass_state import PassState
from varuna.roles.share_pass import SharePass
from varuna.roles.training import TrainingRole

DEVICE = torch.device("sim", 0)


class Blocks(nn.Module):
    """The first stage ends behind a norm, whose result is fp32 on accelerators and bf16 on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.cut_point = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.cut_point(self.norm(self.first(x)))), torch.ones_like(x))


def test_what_crosses_has_the_type_that_autocast_gives_on_the_device() -> None:
    precision, model = TrainingPrecision(torch.bfloat16, "sim"), Blocks()
    with precision.dry_run_context():
        model_map = trace(model, {"x": torch.ones(4, 4)})
    stage = build_stage(model, model_map, 0, 1, device=DEVICE)
    with precision.forward_context():
        [sent] = stage.forward({"x": torch.ones(2, 4, device=DEVICE)}, [])
    assert (sent.dtype, stage.sends[0].dtype) == (torch.float32, torch.float32)


def test_the_host_does_not_wait_while_gradients_are_summed() -> None:
    layer = nn.Linear(4, 4).to(DEVICE)
    group = RankGroup(None, (0, 1), Departure(lambda code: None))
    parameters = dict(layer.named_parameters())
    reducer = GradientReducer(parameters, group, (), counted=parameters, bucket_bytes=1)
    simulated.forbid_syncs(True)
    try:
        reducer.mark_last_backward()
        layer(torch.ones(2, 4, device=DEVICE)).sum().backward()
        reducer.reduce_gradients()
    finally:
        simulated.forbid_syncs(False)
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [2.0] * 4


def make_training(task: Task, **more: Any) -> Varuna:
    """In four micro-batches, alone in this process."""
    model = Varuna(make_model(task), get_batch_fn=example_batch, batch_size=4, chunk_size=1, device="sim:0", **more)
    model.set_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_waits_for_the_device_twice(dtype: torch.dtype) -> None:
    """For the losses and for the norm. Its inputs are copied meanwhile."""
    model = make_training(Task(), dtype=dtype)
    model.step(example_batch(4))
    simulated.take_syncs()
    model.step(example_batch(4), clip_grad_max_norm=0.5)
    assert simulated.take_syncs() == {"copy to the host, pageable": 1, "_local_scalar_dense": 1}


def test_inputs_in_containers_are_copied_too() -> None:
    copies = CopyStream()
    given = {"x": [torch.ones(2, 2), 3], "y": {"z": torch.zeros(2, device=DEVICE)}}
    inputs = pin_inputs(given, DEVICE)
    simulated.forbid_syncs(True)
    try:
        loaded = start_loading(inputs, DEVICE, copies).take()
    finally:
        simulated.forbid_syncs(False)
    assert (loaded["x"][0].tolist(), loaded["x"][1], loaded["y"]["z"].tolist()) == ([[1, 1], [1, 1]], 3, [0, 0])
    assert loaded["y"]["z"] is given["y"]["z"]


def test_the_engine_chooses_with_at_most_one_op_left_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    choose = Engine._choose

    def choose_and_count(engine: Engine, run: PassState) -> int:
        now = torch.Stream(DEVICE).record_event()  # it comes after all that the host has waited for
        left.append(sum(simulated.could_overlap(end, now) for *_, end in run.timer._events))
        return choose(engine, run)

    monkeypatch.setattr(Engine, "_choose", choose_and_count)
    make_training(Task()).step(example_batch(4))
    assert (max(left), len(left)) == (1, 8)


def test_an_error_for_want_of_memory_says_what_may_be_changed() -> None:
    model = make_training(Task())
    model.step(example_batch(4))
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(0)
    simulated.limit_memory(DEVICE, total - free)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model.step(example_batch(4))
    finally:
        simulated.limit_memory(DEVICE, total)
    [note] = raised.value.__notes__
    assert note.startswith("out of memory on sim:0, which has ")
    assert "stage 1 of 1 had up to" in note
    assert "with micro-batches of 1. Make micro-batches smaller (plan.micro_batch in the job file" in note


class GreedyAdamW(torch.optim.AdamW):
    """Needs more memory than any device has, from its second step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.state:
            torch.empty(1 << 34, dtype=torch.uint8, device=DEVICE)
        return super().step(closure)


def test_what_an_optimizer_lacks_is_measured_too() -> None:
    model = Varuna(make_model(Task()), get_batch_fn=example_batch, batch_size=4, chunk_size=1, device="sim:0")
    model.set_optimizer(GreedyAdamW(model.parameters(), fused=True))
    model.step(example_batch(4))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model.step(example_batch(4))
    wrapped = ValueError("the script's own error")
    wrapped.__cause__ = raised.value
    shortage = measure_shortage(wrapped)
    free, total = torch.accelerator.get_memory_info(0)
    assert shortage is not None
    assert (shortage.asked_bytes, shortage.free_bytes, shortage.limit_bytes) == (1 << 34, free, total)
    assert 0 < shortage.peak_bytes < total
    assert raised.value.__notes__[0].startswith("out of memory on sim:0, which has ")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"capturable": True, "lr": torch.tensor(1e-3)}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_optimizers_with_state_on_a_device_are_checked(kind: type[Optimizer], options: dict[str, Any]) -> None:
    held = [nn.Parameter(torch.ones(6, 5, device="sim")) for _ in range(12)]
    moved = {key: value.to("sim") if isinstance(value, Tensor) else value for key, value in options.items()}
    optimizer = kind(held, **moved)  # type: ignore[arg-type]
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert check_optimizer(optimizer) == []


def test_copies_could_run_while_the_device_computes() -> None:
    out, into, x = CopyStream(), CopyStream(), torch.ones(8, 8, device=DEVICE)
    _, sent = out.to_host([x])
    y = x * 2
    computed = record_event(DEVICE)
    [received] = into.to_device([torch.ones(8, 8).pin_memory()], DEVICE)
    arrived = record_event_on(into)
    assert sent is not None
    assert simulated.could_overlap(sent, computed)
    assert simulated.could_overlap(arrived, computed)
    assert (received + y).sum().item() == 3 * 64


def test_nothing_but_their_own_forward_waits_for_inputs_that_are_copied_ahead() -> None:
    x, copies = torch.ones(8, 8, device=DEVICE), CopyStream()
    ahead = copies.start_to_device([torch.ones(8, 8).pin_memory()], DEVICE)
    y = x * 2
    computed = record_event(DEVICE)
    assert ahead.ended is not None
    assert simulated.could_overlap(ahead.ended, computed)
    [copied] = ahead.take()
    assert (copied + y).sum().item() == 3 * 64
    assert not simulated.could_overlap(ahead.ended, record_event(DEVICE))


def make_share_owner(may_send: UnseenGate) -> ShareOwner:
    """Sends nothing before it may."""
    keeper: Any = SimpleNamespace(is_stopped=False, send_files=lambda *_: may_send.wait(), shut_down=may_send.open)
    return ShareOwner(keeper, ReplicaMarks(HashStore(), Topology(1, 2, 0)))


def test_a_backward_waits_for_the_copy_of_a_marks_sums_and_a_forward_does_not() -> None:
    layer, x, owner = nn.Linear(4, 4).to(DEVICE), torch.ones(2, 4, device=DEVICE), make_share_owner(UnseenGate())
    mark = ShareMark(generation=1, replica=0, step=1, sections=(0, 1), micro_batch=2, spans=((0, 1),))
    layer(x).sum().backward()
    gradients = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    simulated.forbid_syncs(True)
    try:
        owner.copy_sums(mark, gradients)
        assert owner._current is not None
        copied = owner._current.copied
        y = layer(x).sum()
        assert copied is not None
        assert simulated.could_overlap(copied, record_event(DEVICE))
        owner.order_changes()
        y.backward()
        assert not simulated.could_overlap(copied, record_event(DEVICE))
    finally:
        simulated.forbid_syncs(False)
        owner.shut_down()


class SharesWithMarks:
    """In place of `RankShares`: marks after each backward, unless the copies of the one before are not sent."""

    def __init__(self, owner: ShareOwner) -> None:
        self._owner = owner
        self._parameters: Mapping[str, nn.Parameter] = {}

    def begin_pass(self, step: int, numbers: Sequence[int], parameters: Mapping[str, nn.Parameter], **_: Any) -> None:
        self._parameters = parameters

    def order_changes(self) -> None:
        self._owner.order_changes()

    def follow_backward(self, done: int, _: PassState) -> None:
        mark = ShareMark(generation=1, replica=0, step=2, sections=(0, 1), micro_batch=1, spans=((0, done),))
        if not self._owner.is_busy:
            self._owner.copy_sums(mark, {name: cast(Tensor, one.grad) for name, one in self._parameters.items()})

    def end_pass(self) -> None:
        self._owner.order_changes()

    def find_obstacle(self) -> str:
        return ""


def test_sums_are_copied_at_marks_without_a_race_or_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only streams order their copy and the next backward: the host does not know when the copy ends."""
    model, owner = make_training(Task()), make_share_owner(UnseenGate())
    role = model._role
    assert isinstance(role, TrainingRole)
    model.step(example_batch(4))
    monkeypatch.setattr(SharePass, "_may_keep", lambda _: True)
    role._parts.shares = cast(RankShares, SharesWithMarks(owner))
    simulated.take_syncs()
    try:
        model.step(example_batch(4))
        assert simulated.take_syncs() == {"copy to the host, pageable": 1, "_local_scalar_dense": 1}
        simulated.raise_found()
        [marked] = owner.list_sums(2)
        assert marked.mark.spans == ((0, 1),)
        assert any(sums.count_nonzero() for sums in marked.sums.values())
    finally:
        owner.shut_down()


class TwoInputs(nn.Module):
    """The first stage reads `x`, the second one `target`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut_point = nn.Linear(4, 4), nn.Linear(4, 4), CutPoint()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.cut_point(self.first(x))), target)


@pytest.mark.parametrize(("section", "read"), [(0, "x"), (1, "target")])
def test_only_the_inputs_that_a_stage_reads_are_copied(section: int, read: str) -> None:
    inputs = {"x": torch.ones(4, 4), "target": torch.full((4, 4), 2.0)}
    model = TwoInputs()
    stage = build_stage(model, trace(model, inputs), section, section + 1, device=DEVICE)
    pinned = pin_inputs(stage.empty_unread_inputs(inputs), DEVICE)
    assert {name: value.is_pinned() for name, value in pinned.items()} == {name: name == read for name in inputs}
    simulated.forbid_syncs(True)
    try:
        loaded = start_loading(pinned, DEVICE, CopyStream()).take()
    finally:
        simulated.forbid_syncs(False)
    for name, tensor in loaded.items():
        assert (tensor.device, tensor.shape, tensor.dtype) == (DEVICE, (4, 4), torch.float32)
        assert torch.equal(tensor.cpu(), inputs[name]) if name == read else tensor.cpu().isnan().all()
        assert tensor.untyped_storage().nbytes() == (64 if name == read else 4)


class ReadsMoreLater(TwoInputs):
    """Its first section reads `target`, too, but not in the dry run."""

    is_late = False

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x + target if self.is_late else x, target)


def test_an_input_that_is_read_against_all_expectation_is_no_number() -> None:
    inputs = {"x": torch.ones(4, 4), "target": torch.full((4, 4), 2.0)}
    model = ReadsMoreLater()
    stage = build_stage(model, trace(model, inputs), 0, 1, device=DEVICE)
    cast(ReadsMoreLater, stage.module).is_late = True
    loaded = start_loading(pin_inputs(stage.empty_unread_inputs(inputs), DEVICE), DEVICE, CopyStream()).take()
    [sent] = stage.forward(loaded, [])
    assert sent.cpu().isnan().all()


def record_event_on(copies: CopyStream) -> torch.Event:
    with use_stream(copies._on(DEVICE)):
        return record_event(DEVICE)


def test_the_host_waits_for_no_copy_between_it_and_the_optimizer_there() -> None:
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE), torch.ones(2, 4, device=DEVICE)
    host = HostParameters(dict(layers.named_parameters()))
    host.part_bytes = 1
    layers(x).sum().backward()
    torch.accelerator.synchronize()
    simulated.forbid_syncs(True)
    try:
        parts = host.start_moving_gradients()
        arriving = host.start_copying_to_device({name: int(name[0]) for name in host.parameters})
        arriving.wait_for_section(0)
        layers[0](x)
        computed = record_event(DEVICE)
    finally:
        simulated.forbid_syncs(False)
    assert len(parts) == 4
    assert arriving._last is not None
    assert simulated.could_overlap(arriving._last, computed), "the second layer comes while the first one computes"
    arriving.end()


@pytest.mark.parametrize("average", [None, 0.9])
def test_the_optimizer_on_the_host_may_step_in_parts(average: float | None) -> None:
    losses = []
    for part_bytes in (1 << 40, 1):
        model = make_training(Task(), offload_optimizer=True, ema=average)
        role = model._role
        assert isinstance(role, TrainingRole)
        assert role._updater.host is not None
        role._updater.host.part_bytes = part_bytes
        found = [model.step(example_batch(4), clip_grad_max_norm=0.5) for _ in range(3)]
        losses.append([*found, model.evaluate(example_batch(4), ema=average is not None)])
    assert losses[0] == losses[1]


def test_pinned_memory_is_hardly_larger_than_what_is_in_it() -> None:
    layers = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(48))).to(DEVICE)
    before = simulated.count_pinned_bytes()
    buffers = HostBuffers()
    buffers.expect_bytes(sum(parameter.nbytes for parameter in layers.parameters()))
    copies = [buffers.copy_tensor(name, parameter) for name, parameter in layers.named_parameters()]
    buffers.wait_for_copies()
    assert simulated.count_pinned_bytes() - before < 1.1 * sum(copy.nbytes for copy in copies)
    for copy, parameter in zip(copies, layers.parameters(), strict=True):
        assert torch.equal(copy, parameter.detach().cpu())
