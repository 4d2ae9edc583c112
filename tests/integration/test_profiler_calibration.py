"""Calibration of a small real model: in one process, and in two over gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint
from varuna.calibration import compute, measuring
from varuna.calibration.compute import Clock, SectionMeter, worth_doubling
from varuna.calibration.links import LinkSample, classify, ring_sizes
from varuna.calibration.measuring import Meters
from varuna.calibration.optimizer import measure_optimizer, time_optimizer
from varuna.partition import trace
from varuna.precision import Precision
from varuna.profiler import Profiler, calibrate
from varuna_planner.profile import Measurement, Profile
from varuna_proto.environment import Mode, WorkerEnvironment

BLOCKS, WIDTH, TOKENS, WORDS = 3, 32, 16, 50
CPU = torch.device("cpu")


class TinyLanguageModel(nn.Module):
    """Sections 0 to 2: a block each (0 with the embedding); 3: the head, tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            hidden = cut(hidden + torch.tanh(block(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def get_batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    tokens = torch.arange(size * TOKENS, device=device).view(size, TOKENS) % WORDS
    return {"tokens": tokens, "targets": tokens}


def profile_alone(**options: Any) -> Profile:
    model = TinyLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    model_map = trace(model, get_batch(2))
    random_state = torch.get_rng_state()
    profile = calibrate(model, model_map, get_batch, optimizer=optimizer, device=CPU, global_batch=12, **options)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert profile is not None
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    return profile


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_process_measures_every_section() -> None:
    profile = profile_alone(budget_s=1.0)
    assert len(profile.sections) == BLOCKS + 1
    assert profile.micro_batches[:2] == (1, 2)
    assert profile.micro_batches[-1] <= 12
    for section in profile.sections:
        for measured in section.measurements:
            assert measured.forward_us > 0
            assert measured.backward_us > 0
            assert measured.recompute_us > 0
    assert Profile.from_json(profile.to_json()) == profile


def test_what_every_stage_takes_counts_once_for_a_stage_and_not_for_each_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everywhere_us = 3000.0
    really_forward = TinyLanguageModel.forward

    def forward(self: TinyLanguageModel, tokens: Tensor, targets: Tensor) -> Tensor:
        until_s = time.thread_time() + everywhere_us / 1e6
        while time.thread_time() < until_s:
            pass
        return really_forward(self, tokens, targets)

    monkeypatch.setattr(TinyLanguageModel, "forward", forward)
    profile = profile_alone(micro_batches=[1])
    # Of forwards alone, and told as the same for forwards and backwards.
    assert profile.stage_overhead_us > 0.8 * everywhere_us / 2
    in_all_us = sum(each.forward_us for each in profile.at(1)) / float(profile.environment["sharing"])
    assert in_all_us < (BLOCKS + 1) * everywhere_us / 2


def test_bytes_are_those_of_the_model() -> None:
    profile = profile_alone(micro_batches=[1, 4])
    assert profile.micro_batches == (1, 4)
    hidden = TOKENS * WIDTH * 4
    embedding, block = WORDS * WIDTH * 4, (WIDTH * WIDTH + WIDTH) * 4
    assert [section.parameter_bytes for section in profile.sections] == [embedding + block, block, block, embedding]
    assert [section.gradient_bytes for section in profile.sections] == [embedding + block, block, block, embedding]
    # Adam keeps two tensors of the parameter's size and a float32 step count for each parameter.
    counts = [3, 2, 2, 1]
    for section, count in zip(profile.sections, counts, strict=True):
        assert section.optimizer_bytes == 2 * section.parameter_bytes + 4 * count
    [shared] = profile.shared_parameters
    assert (shared.name, shared.sections, shared.bytes) == ("embedding.weight", (0, 3), embedding)
    for m in (1, 4):
        first, second, third, last = profile.at(m)
        assert [each.output_bytes for each in (first, second, third, last)] == [m * hidden] * 3 + [0]
        assert [each.input_bytes for each in (first, second, third, last)] == [0] + [m * hidden] * 3
        # A block keeps its input (for the weight's gradient) and tanh's output.
        assert second.activation_bytes == 2 * m * hidden


def test_optimizers_tell_what_they_keep() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    kept = {
        "plain": measure_optimizer(torch.optim.SGD([parameter], lr=0.1)),
        "momentum": measure_optimizer(torch.optim.SGD([parameter], lr=0.1, momentum=0.9)),
        "adam": measure_optimizer(torch.optim.Adam([parameter], amsgrad=True)),
    }
    assert {name: memory.bytes_for(8) for name, memory in kept.items()} == {
        "plain": 0,
        "momentum": 8 * 4,
        "adam": 3 * 8 * 4 + 4,
    }


def test_an_optimizer_step_is_timed_and_the_optimizer_left_alone() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.Adam([parameter])
    time = time_optimizer(optimizer, torch.device("cpu"), Clock(torch.device("cpu")))
    assert 0 < time.element_us < 1
    assert time.us_for(2, 10**7) > time.us_for(2, 10**6) > time.us_for(2, 0) == 2 * time.tensor_us > 0
    assert not optimizer.state
    assert not parameter.any()
    assert time.times(2).us_for(1, 10) == pytest.approx(2 * time.us_for(1, 10))


def test_an_optimizer_that_cannot_be_copied_is_taken_to_cost_no_time() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("only with my own parameters")

    odd = Odd([nn.Parameter(torch.zeros(8))], lr=0.1)
    assert time_optimizer(odd, torch.device("cpu"), Clock(torch.device("cpu"))).us_for(5, 10**9) == 0


def test_larger_micro_batches_are_measured_while_they_pay() -> None:
    assert worth_doubling([100.0])
    assert worth_doubling([100.0, 99.0])
    assert worth_doubling([100.0, 60.0, 50.0])
    assert worth_doubling([100.0, 101.0, 80.0])
    assert not worth_doubling([100.0, 60.0, 59.0, 58.0])


@pytest.mark.parametrize("room_bytes", [0, 8500, None])
def test_sections_that_cannot_all_stay_on_the_device_are_measured_too(
    room_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyLanguageModel()
    meters = Meters(model, trace(model, get_batch(2)), CPU, Precision(torch.float32, "cpu"), room_bytes)
    built: list[int] = []
    really_build = measuring.SectionMeter

    def build(*arguments: Any) -> SectionMeter:
        built.append(arguments[2].start)
        return really_build(*arguments)

    monkeypatch.setattr(measuring, "SectionMeter", build)
    sections = range(BLOCKS + 1)
    meters.build(sections)
    for size in (1, 2):
        assert None not in meters.measure(sections, get_batch(size), size, 0.0)
    # Of 10,624, 4,224, 4,224 and 6,400 bytes, 8,500 have room for the two blocks.
    assert {section: built.count(section) for section in sections} == {
        0: {0: 2, 1: 2, 2: 2, 3: 2},
        8500: {0: 2, 1: 1, 2: 1, 3: 2},
        None: {0: 1, 1: 1, 2: 1, 3: 1},
    }[room_bytes]


def test_what_does_not_fit_beside_other_sections_is_tried_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyLanguageModel()
    meters = Meters(model, trace(model, get_batch(2)), CPU, Precision(torch.float32, "cpu"))
    meters.build([0, 1])
    really_measure, failures = measuring.measure_in_turn, 3

    def measure(meters: Sequence[SectionMeter], *arguments: Any) -> list[Measurement]:
        nonlocal failures
        if failures > 0:
            failures -= 1
            raise torch.OutOfMemoryError
        return really_measure(meters, *arguments)

    monkeypatch.setattr(measuring, "measure_in_turn", measure)
    first, second = meters.measure([0, 1], get_batch(1), 1, 0.0)
    assert first is None, "neither in turn with the other, nor beside it, nor alone"
    assert second is not None


def test_sections_are_measured_in_the_order_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else small sections would find caches full of what is theirs, as no stage ever does."""
    ran: list[str] = []

    class Watched(SectionMeter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.section = arguments[2].start

        def forward(self, *arguments: Any) -> tuple[list[Tensor], float]:
            ran.append(f"F{self.section}")
            return super().forward(*arguments)

        def backward(self, outputs: list[Tensor]) -> float:
            ran.append(f"B{self.section}")
            took_us = super().backward(outputs)
            assert not outputs, "what it frees is part of its time"
            return took_us

    model = TinyLanguageModel()
    monkeypatch.setattr(measuring, "SectionMeter", Watched)
    meters = Meters(model, trace(model, get_batch(2)), CPU, Precision(torch.float32, "cpu"))
    meters.build([0, 2, 3])
    assert None not in meters.measure([0, 2, 3], get_batch(2), 2, 1e-9)
    memory, first_round = ran[:6], ran[6:12]
    assert memory == ["F0", "B0", "F2", "B2", "F3", "B3"]
    assert first_round == ["F0", "F2", "F3", "B3", "B2", "B0"]
    ran.clear()
    # What would take the memory of several sections, which no cache holds anyway, is measured alone.
    monkeypatch.setattr(compute, "_NO_CACHE_BYTES", 1)
    assert None not in meters.measure([0, 2, 3], get_batch(2), 2, 1e-9)
    assert ran[6:8] == ["F0", "B0"]
    assert ran[-2:] == ["F3", "B3"]


def test_cores_are_taken_to_be_shared_as_they_were_most_of_the_time() -> None:
    clock = Clock(CPU)
    assert clock.sharing == 1.0
    turn_s = 0.0125
    for _ in range(16):  # it has half a core
        clock.note(turn_s, turn_s)
        clock.note(turn_s, 0.0)
        assert clock.sharing <= 2.0
    assert clock.sharing == pytest.approx(2.0)
    clock.note(1.0, 0.05)
    assert clock.sharing == pytest.approx(2.0), "that was one interruption"
    short = Clock(CPU)
    short.note(0.010, 0.005)
    assert short.sharing == 2.0
    quick = Clock(CPU)
    quick.note(0.1, 0.2)
    assert quick.sharing == 1.0


def test_links_are_classed_by_host() -> None:
    near, far = LinkSample((0, 1), 10.0, 1e9, 1.0), LinkSample((1, 2), 200.0, 1e8, 30.0)
    links = classify([near, far], ["a", "a", "b"])
    assert (links.same_vm.latency_us, links.other_vm.latency_us) == (10.0, 200.0)
    alone = classify([near], ["a", "b"])
    assert alone.same_vm == alone.other_vm
    assert alone.same_vm.bandwidth_bytes_per_s == 1e9
    assert ring_sizes(1) == []
    assert ring_sizes(6) == [2, 4, 6]
    assert ring_sizes(4096) == [2, 4, 8, 16, 32]


def test_the_profiler_keeps_its_profile_and_measures_what_is_missing(tmp_path: Path) -> None:
    model = TinyLanguageModel()

    def run(sizes: list[int], **options: Any) -> Profile:
        profiler = Profiler(model, get_batch, out_folder=tmp_path, **options)
        profiler.set_optimizer(torch.optim.SGD(profiler.parameters(), lr=0.1))
        return profiler.profile_all(sizes)

    with pytest.raises(ValueError, match="never measured"):
        run([1], pstages_to_profile=[0, 1])
    first = run([1, 2])
    assert run([2]) == first  # from the cache
    assert run([4], from_cache=False, add_to_existing=True).micro_batches == (1, 2, 4)
    again = run([4], from_cache=False, pstages_to_profile=[1], add_to_existing=True)
    assert again.sections[1].measurements[0] == first.sections[1].measurements[0]
    assert Profile.from_json((tmp_path / "profile.json").read_text()) == again


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from test_profiler_calibration import CPU, TinyLanguageModel, get_batch
from varuna.launch import worker_environment
from varuna.partition import trace
from varuna.profiler import calibrate
from varuna.worker import Worker

worker = Worker.join(worker_environment())
model = TinyLanguageModel()
profile = calibrate(
    model,
    trace(model, get_batch(2)),
    get_batch,
    optimizer=torch.optim.Adam(model.parameters()),
    device=CPU,
    global_batch=worker.environment.global_batch,
    rank=worker.environment.rank,
    world_size=worker.environment.world_size,
    store=worker.rendezvous.store,
    connect=worker.rendezvous.gloo,
    budget_s=1.0,
    host=sys.argv[2].split(",")[worker.environment.rank],
)
if profile is not None:
    print(profile.to_json())
"""


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return WorkerEnvironment(
        job_id="calibration",
        generation=1,
        mode=Mode.CALIBRATE,
        rank=rank,
        local_rank=0,
        world_size=world_size,
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        p=1,
        d=world_size,
        micro_batch=1,
        global_batch=8,
    ).to_environ()


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b", "b"]])
def test_ranks_share_the_work_and_measure_their_links(hosts: list[str]) -> None:
    world_size = len(hosts)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), ",".join(hosts)]
    workers = [
        subprocess.Popen(
            command,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment(rank, world_size, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        deadline_s = time.monotonic() + 600
        outputs = [worker.communicate(timeout=deadline_s - time.monotonic()) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * world_size, outputs
    assert all(not out for out, _err in outputs[1:])
    profile = Profile.from_json(outputs[0][0])
    assert len(profile.sections) == BLOCKS + 1
    assert 1 in profile.micro_batches
    assert profile.environment["ranks"] == str(world_size)
    assert profile.environment["hosts"] == ",".join(sorted(set(hosts)))
    assert datetime.fromisoformat(profile.environment["measured_at"]).tzinfo is not None
    for link in (profile.links.same_vm, profile.links.other_vm):
        assert link.latency_us > 0
    rings = {(measured.ranks, measured.rings) for measured in profile.all_reduce}
    if len(set(hosts)) == 1:
        assert profile.links.same_vm == profile.links.other_vm
        assert rings == {(2, 1), (3, 1)}
    else:
        assert profile.links.same_vm != profile.links.other_vm
        assert rings == {(2, 1), (2, 2)}
    assert json.loads(outputs[0][0])["schema"] == "varuna.profile/1"
