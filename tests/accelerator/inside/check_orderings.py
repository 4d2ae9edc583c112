"""The product orders streams, host and allocator wherever it must: with one ordering taken out, the device says so.

Each ordering is a line of the product's source. The same small program runs with the module as it is, silently, and
with a module in which that line does nothing.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import simulated
import varuna.checkpoint.saving.snapshot
import varuna.checkpoint.saving.writer
import varuna.copies.owner
import varuna.copies.share_owner
import varuna.devices.copy_stream
import varuna.distributed.groups
import varuna.optim.host_parameters
import varuna.pipeline.device_transport
import varuna.pipeline.transport
from emulated_nccl import EmulatedNccl
from host_threads import UnseenGate
from varuna.checkpoint import TrainingState, read_parameters
from varuna.checkpoint.saving.snapshot import RankSnapshot
from varuna.checkpoint.state.rank_state import ShapePosition
from varuna.copies.replica_marks import ReplicaMarks
from varuna.copies.share_marks import ShareMark
from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, Work, connect_group
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.link_connections import make_connection
from varuna.distributed.nccl import NcclPair
from varuna.distributed.topology import Topology
from varuna.holdings.inventory import HeldFiles
from varuna.pipeline.transport import MessageTensor

Program = Callable[[types.ModuleType], object]
DEVICE = torch.device("sim", 0)


def send_and_receive(copies: types.ModuleType) -> None:
    """As a stage does: computes, sends, forgets what it sent, receives, computes; several micro-batches."""
    out = copies.CopyStream()
    for number in range(3):
        x = torch.full((32, 32), float(number), device=DEVICE) + 1
        [host], copied = out.to_host([x])
        del x
        torch.zeros(32, 32, device=DEVICE) + 1  # may get the memory of x
        copied.synchronize()
        assert float(host[0, 0]) == number + 1


def receive(copies: types.ModuleType) -> None:
    """As the last stage does. The host never waits in between."""
    into = copies.CopyStream()
    hosts = [torch.full((32, 32), 2.0).pin_memory() for _ in range(3)]
    for host in hosts:
        [received] = into.to_device([host], DEVICE)
        doubled = received * 2
        del received, doubled


def load_ahead(copies: types.ModuleType) -> None:
    """As the first stage does: while a micro-batch is computed, the inputs of the next one are copied."""
    into, host = copies.CopyStream(), torch.full((32, 32), 2.0).pin_memory()
    started = into.start_to_device([host], DEVICE)
    for _ in range(3):
        [inputs] = started.take()
        doubled = inputs * 2
        started = into.start_to_device([host], DEVICE)
        del inputs, doubled


def update(copies: types.ModuleType) -> None:
    """As a staged collective does: computes, gets new values from the host, computes with them, forgets them."""
    stream = copies.CopyStream()
    values = [torch.full((32, 32), 2.0).pin_memory() for _ in range(3)]
    for value in values:
        x = torch.zeros(32, 32, device=DEVICE)
        stream.update_on_device([x], [value])
        doubled = x * 2
        del x, doubled


def update_and_forget(copies: types.ModuleType) -> None:
    stream, value = copies.CopyStream(), torch.ones(32, 32).pin_memory()
    x = torch.zeros(32, 32, device=DEVICE)
    before = torch.accelerator.current_stream(DEVICE)
    own = torch.Stream(DEVICE)
    own.wait_stream(before)
    with own:  # nothing on the stream that owns x comes after the copy
        stream.update_on_device([x], [value])
    del x
    torch.zeros(32, 32, device=DEVICE)


def step_on_host(offload: types.ModuleType) -> None:
    """The optimizer is on the host: it steps one layer while the gradients of the next one come, and each layer
    computes as soon as its parameters are back."""
    layers, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(DEVICE), torch.ones(2, 32, device=DEVICE)
    host = offload.HostParameters(dict(layers.named_parameters()))
    host.part_bytes = 1
    for _ in range(2):
        layers(x).sum().backward()
        with torch.no_grad():
            for part in host.start_moving_gradients():
                part.wait()
                for parameter in part.parameters:
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
        arriving = host.start_copying_to_device({name: int(name[0]) for name in host.parameters})
        y = x
        for section, layer in enumerate(layers):
            arriving.wait_for_section(section)
            y = layer(y)
        arriving.end()
        with torch.no_grad():
            host.parameters["1.bias"].add_(1)


def move_gradients(copies: types.ModuleType) -> None:
    """As the end of a step with the optimizer on the host: gradients are computed, copied, and forgotten."""
    stream, memory = copies.CopyStream(), torch.empty(32, 32, pin_memory=True)
    gradient = torch.full((32, 32), 2.0, device=DEVICE) + 1
    arrived = stream.update_on_host([memory], [gradient])
    del gradient
    torch.zeros(32, 32, device=DEVICE) + 1  # may get the memory of the gradient
    arrived.synchronize()
    assert float(memory[0, 0]) == 3


def save(snapshot: types.ModuleType) -> None:
    """A snapshot is written by the host."""
    buffers = snapshot.HostBuffers()
    copy = buffers.copy_tensor("weight", torch.full((4, 4), 3.0, device=DEVICE))
    buffers.wait_for_copies()
    assert copy.numpy().sum() == 48


def connect_two() -> list[GlooGroup]:
    store, groups = HashStore(), dict[int, GlooGroup]()

    def connect(rank: int) -> None:
        wait = datetime.timedelta(seconds=120)
        groups[rank] = connect_group(store, rank, 2, address="127.0.0.1", timeout=wait)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


class ReadingGroup:
    """A group in which the host reads what it sends, as gloo does where a socket is full.

    Where gloo hands closed memory to the system instead, that refuses to read it, and gloo ends the whole process from
    one of its threads, now and then.
    """

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        for tensor in tensors:
            tensor.numpy().sum()
        return self._group.send(tensors, rank, tag)


def send_over_link(transport: types.ModuleType, connections: int = 1) -> None:
    """Boundaries from one device to another."""
    pairs, departure = [connect_two() for _ in range(connections)], Departure(lambda code: None)
    sending = make_connection([cast(GlooGroup, ReadingGroup(first)) for first, _ in pairs], 1)
    sender = transport.LinkSender(sending, peer=1, departure=departure)
    receiving = make_connection([second for _, second in pairs], 0)
    receiver = transport.LinkReceiver(receiving, peer=0, pinned=True, departure=departure)
    for number in range(3):
        receiver.post_receive([transport.MessageTensor((512, 512), torch.float32)])
        x = torch.full((512, 512), float(number), device="sim:0") * 2
        sender.send_message([x])
        del x
        departure.wait_until(lambda n=number: receiver.arrived > n)
        [received] = receiver.take_message(number, torch.device("sim", 1))
        assert received.mean().item() == 2 * number
    sender.wait_until_sent()


def send_over_connections(transport: types.ModuleType) -> None:
    """As `send_over_link`, over three connections."""
    send_over_link(transport, 3)


def send_between_devices(transport: types.ModuleType) -> None:
    """Boundaries from one device to another, which are in the host's memory at no time that the product knows of."""
    pairs = [NcclPair(cast(GlooGroup, EmulatedNccl(group)), 1 - rank) for rank, group in enumerate(connect_two())]
    first, second, departure = torch.device("sim", 0), torch.device("sim", 1), Departure(lambda code: None)
    sender = transport.DeviceLinkSender(pairs[0], first, peer=1, departure=departure)
    receiver = transport.DeviceLinkReceiver(pairs[1], second, peer=0, departure=departure)
    for number in range(4):
        receiver.post_receive([MessageTensor((64, 64), torch.float32), MessageTensor((3,), torch.float32)])
        x = torch.full((64, 64), float(number), device=first) * 2
        sender.send_message([x.t(), x[0, :3]])
        del x
        departure.wait_until(lambda n=number: receiver.arrived > n)
        received = receiver.take_message(number, second)
        sums = [tensor.sum() for tensor in received]
        del received
        assert [each.item() for each in sums] == [2 * number * 64 * 64, 2 * number * 3]
    sender.wait_until_sent()


def sum_gradients(collectives: types.ModuleType) -> None:
    """Two ranks, each with a device of its own, sum what gloo does not take."""
    groups, departure = connect_two(), Departure(lambda code: None)
    ranks = [collectives.RankGroup(group, (0, 1), departure) for group in groups]
    flats = [torch.full((64,), float(rank + 1), device=f"sim:{rank}") for rank in (0, 1)]
    waits = [rank.start_all_reduce([flat]) for rank, flat in zip(ranks, flats, strict=True)]
    for wait, flat in zip(waits, flats, strict=True):
        wait()
        assert (flat * 2).tolist() == [6.0] * 64


class OpeningEvent(threading.Event):
    """Opens a gate for the thread that is to set it, when somebody waits for it."""

    def __init__(self, gate: UnseenGate) -> None:
        super().__init__()
        self._gate = gate

    def wait(self, timeout: float | None = None) -> bool:
        self._gate.open()
        return super().wait(timeout)


def copy_state(owners: types.ModuleType) -> None:
    """A thread copies the state, which the next update changes. It ends with the copy when somebody waits for it."""
    is_copied, may_end = UnseenGate(), UnseenGate()
    copy, errors = owners.make_inventory, list[RuntimeError]()

    def copy_and_stay(*arguments: Any, **more: Any) -> HeldFiles:
        try:
            held: HeldFiles = copy(*arguments, **more)
        except RuntimeError as error:
            errors.append(error)
            raise
        finally:
            is_copied.open()
            may_end.wait()
        return held

    key = MeetingKey.derive_key("secret", "job", 1, host="127.0.0.1", port=1)
    value = nn.Parameter(torch.ones(4, 4, device=DEVICE))
    state = TrainingState(sections=range(1), section_count=1, parameters={"w": value}, section_of={"w": 0})
    owner = owners.CopyOwner(
        "127.0.0.1:1", key, generation=1, rank=0, device=DEVICE, series=0, is_pipeline_sending=lambda: False
    )
    owner._is_captured = OpeningEvent(may_end)
    try:
        with torch.no_grad(), mock.patch.object(owners, "make_inventory", copy_and_stay):
            value.add_(1)
            owner.begin_round(1, state)
            is_copied.wait()
            owner.finish_capture()
            value.add_(1)
    finally:
        may_end.open()
        owner.shut_down()
        owner._thread.join()
    for error in errors:
        raise error


def save_beside_passes(writers: types.ModuleType) -> None:
    """As `copy_state`, for a checkpoint."""
    is_copied, may_end = UnseenGate(), UnseenGate()
    copy = writers.make_snapshot

    def copy_and_stay(*arguments: Any, **more: Any) -> RankSnapshot:
        try:
            copied: RankSnapshot = copy(*arguments, **more)
        finally:
            is_copied.open()
            may_end.wait()
        return copied

    value = nn.Parameter(torch.ones(4, 4, device=DEVICE))
    state = TrainingState(sections=range(1), section_count=1, parameters={"w": value}, section_of={"w": 0})
    with tempfile.TemporaryDirectory() as folder:
        writer = writers.CheckpointWriter(folder, generation=1, position=ShapePosition(rank=0, p=1, d=1))
        writer._is_copied = OpeningEvent(may_end)
        try:
            with torch.no_grad(), mock.patch.object(writers, "make_snapshot", copy_and_stay):
                value.add_(1)
                assert writer.start_save(1, state, beside_passes=True)
                is_copied.wait()
                writer.finish_copy()
                value.add_(1)
        finally:
            may_end.open()
            outcome = writer.wait()
        if outcome.result != "committed":
            raise RuntimeError(outcome.error)
        simulated.raise_found()
        (stored,) = read_parameters(folder, 1).values()
        assert stored.tolist() == [[2.0] * 4] * 4


def mark_share(owners: types.ModuleType) -> None:
    """The sums are copied between two backwards, and sent when they are there."""
    is_sent, x = threading.Event(), torch.ones(2, 4, device=DEVICE)
    keeper = SimpleNamespace(is_stopped=False, send_files=lambda *_: is_sent.set(), shut_down=lambda: None)
    owner = owners.ShareOwner(keeper, ReplicaMarks(HashStore(), Topology(1, 2, 0)))
    layer = nn.Linear(4, 4, bias=False, device=DEVICE)
    mark = ShareMark(generation=1, replica=0, step=1, sections=(0, 1), micro_batch=2, spans=((0, 1),))
    try:
        layer(x).sum().backward()
        owner.copy_sums(mark, {"weight": layer.weight.grad})
        y = layer(x).sum()
        owner.order_changes()
        y.backward()
        is_sent.wait()
        (marked,) = owner.list_sums(1)
        assert marked.sums["weight"].tolist() == [[2.0] * 4] * 4
        assert layer.weight.grad.tolist() == [[4.0] * 4] * 4
    finally:
        owner.shut_down()


def copy_marked_sums(copies: types.ModuleType) -> None:
    with mock.patch.object(SHARES, "CopyStream", copies.CopyStream):
        mark_share(SHARES)


def stage_gradients(collectives: types.ModuleType) -> None:
    """A backend reads the memory that it gets as soon as the collective starts."""
    flat = torch.full((64,), 3.0, device=DEVICE) * 2
    staged = collectives._StagedTensors([flat], varuna.devices.copy_stream.CopyStream())
    assert staged.on_host[0].numpy().sum() == 6 * 64
    staged.return_values()
    assert flat.sum().item() == 6 * 64


COPIES, OFFLOAD, OWNER = varuna.devices.copy_stream, varuna.optim.host_parameters, varuna.copies.owner
SHARES = varuna.copies.share_owner
DEVICE_TRANSPORT, WRITER = varuna.pipeline.device_transport, varuna.checkpoint.saving.writer
TRANSPORT, SNAPSHOT, COLLECTIVES = (
    varuna.pipeline.transport,
    varuna.checkpoint.saving.snapshot,
    varuna.distributed.groups,
)


class Ordering(NamedTuple):
    """A line of the product, by the text around it that makes it the only one."""

    name: str
    module: types.ModuleType
    line: str
    program: Program
    before: str = ""


ORDERINGS = [
    Ordering(
        "a send waits for the op that computes",
        COPIES,
        "stream.wait_stream(torch.accelerator.current_stream(device))",
        send_and_receive,
    ),
    Ordering("a sent tensor is kept", COPIES, "tensor.detach().record_stream(stream)", send_and_receive),
    Ordering("computing waits for what arrives", COPIES, "computing.wait_event(self.ended)", receive),
    Ordering("a forward waits for its inputs", COPIES, "computing.wait_event(self.ended)", load_ahead),
    Ordering("an arrived tensor is kept", COPIES, "copy.record_stream(computing)", receive),
    Ordering("inputs are kept until they are read", COPIES, "copy.record_stream(computing)", load_ahead),
    Ordering(
        "gradients are copied when they are computed",
        COPIES,
        "stream.wait_stream(torch.accelerator.current_stream(device))",
        move_gradients,
        "def update_on_host",
    ),
    Ordering("copied gradients are kept", COPIES, "value.record_stream(stream)", move_gradients),
    Ordering(
        "an update waits for earlier ops",
        COPIES,
        "stream.wait_stream(torch.accelerator.current_stream(device))",
        update,
        "def start_update_on_device",
    ),
    Ordering(
        "later ops wait for an update",
        COPIES,
        "torch.accelerator.current_stream(tensors[0].device).wait_event(ended)",
        update,
    ),
    Ordering(
        "an updated tensor is kept",
        COPIES,
        "tensor.record_stream(stream)",
        update_and_forget,
        "def start_update_on_device",
    ),
    Ordering("a message is sent when it is copied", TRANSPORT, "wait_for_event(message.copied)", send_over_link),
    Ordering(
        "a message in pieces is sent when it is copied",
        TRANSPORT,
        "wait_for_event(message.copied)",
        send_over_connections,
    ),
    Ordering(
        "a message is sent from the device when it is computed",
        DEVICE_TRANSPORT,
        "stream.wait_event(message.computed)",
        send_between_devices,
    ),
    Ordering("the optimizer on the host waits for gradients", OFFLOAD, "wait_for_event(self.arrived)", step_on_host),
    Ordering(
        "a section waits for its parameters",
        OFFLOAD,
        "torch.accelerator.current_stream(self._device).wait_event(arrived)",
        step_on_host,
    ),
    Ordering("parameters change on the host when they are copied", OFFLOAD, "wait_for_event(self._last)", step_on_host),
    Ordering("a snapshot waits for its copies", SNAPSHOT, "wait_for_stream(device)", save),
    Ordering(
        "the state is copied when it is updated",
        OWNER,
        "self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))",
        copy_state,
    ),
    Ordering(
        "an update waits for the thread that copies the state",
        OWNER,
        """while not self._is_captured.wait(_RECHECK_S) and self._thread.is_alive():
            pass""",
        copy_state,
    ),
    Ordering(
        "a checkpoint's copy waits for the update",
        WRITER,
        "self._stream.wait_stream(torch.accelerator.current_stream(device))",
        save_beside_passes,
    ),
    Ordering(
        "the update waits for a checkpoint's copy",
        WRITER,
        "self._is_copied.wait()",
        save_beside_passes,
    ),
    Ordering(
        "a mark's sums are copied when the backward has computed them",
        COPIES,
        "stream.wait_stream(torch.accelerator.current_stream(device))",
        copy_marked_sums,
        "def update_on_host",
    ),
    Ordering(
        "the next backward waits for the copy of a mark's sums",
        SHARES,
        "torch.accelerator.current_stream(copied.device).wait_event(copied)",
        mark_share,
    ),
    Ordering("a staged sum starts when it is copied", COLLECTIVES, "wait_for_event(copied)", stage_gradients),
]
PROGRAMS = {**{each.program: each.module for each in ORDERINGS}, sum_gradients: COLLECTIVES}


def without(ordering: Ordering) -> types.ModuleType:
    """The module with the line replaced by `pass`."""
    assert ordering.module.__file__
    source = Path(ordering.module.__file__).read_text()
    begin = source.index(ordering.before) if ordering.before else 0
    assert ordering.line in source[begin:], f"{ordering.name}: the product no longer has {ordering.line!r}"
    changed = types.ModuleType(f"{ordering.module.__name__}_without")
    changed.__dict__["__package__"] = ordering.module.__package__
    source = source[:begin] + source[begin:].replace(ordering.line, "pass", 1)
    sys.modules[changed.__name__] = changed
    exec(compile(source, ordering.module.__file__, "exec"), changed.__dict__)
    return changed


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_product_has_no_race(program: Program) -> None:
    program(PROGRAMS[program])
    torch.accelerator.synchronize()
    simulated.raise_found()


@pytest.mark.parametrize("ordering", ORDERINGS, ids=lambda ordering: ordering.name)
def test_a_missing_ordering_is_found(ordering: Ordering) -> None:
    found: list[str] = []
    try:
        ordering.program(without(ordering))
        torch.accelerator.synchronize()
        simulated.raise_found()
    except (RuntimeError, SystemExit) as error:
        found.append(f"{type(error).__name__}: {getattr(error, 'reason', error)}")
    torch.accelerator.synchronize()
    found += simulated.take_races()
    assert any("race" in each for each in found), found
