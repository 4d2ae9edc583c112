"""Calibration of a small real model: in one process, and in two over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from own_ports import own_ports
from repository import TRAINING_SCRIPTS
from tiny_language_model import BLOCKS, CPU, TOKENS, WIDTH, WORDS, TinyLanguageModel, get_batch
from varuna.calibration import section_meter, section_meters, sections
from varuna.calibration.clock import ComputeClock
from varuna.calibration.links import LinkSample, classify_links, ring_sizes
from varuna.calibration.optimizer_costs import OptimizerSetup, measure_optimizer, time_host_copies, time_optimizer
from varuna.calibration.profile import calibrate
from varuna.calibration.profiler import Profiler
from varuna.calibration.section_meter import SectionMeter
from varuna.calibration.section_meters import SectionMeters
from varuna.calibration.sections import is_worth_doubling
from varuna.calibration.subject import CalibrationSubject
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace
from varuna_planner.profile.document import Measurement, Profile
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan


def subject_of(model: nn.Module) -> CalibrationSubject:
    return CalibrationSubject(
        model, trace(model, get_batch(2)), get_batch, CPU, TrainingPrecision(torch.float32, "cpu")
    )


def profile_alone(**options: Any) -> Profile:
    model = TinyLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    subject = subject_of(model)
    random_state = torch.get_rng_state()
    profile = calibrate(subject, OptimizerSetup(optimizer), global_batch=12, **options)
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


def test_one_process_measures_every_section(monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow this machine is, the time is not up before the second size.
    monkeypatch.setattr(sections, "time", SimpleNamespace(monotonic=lambda: 0.0))
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
    # Measured on forwards alone, and reported for forwards and backwards alike.
    assert profile.stage_overhead_us > 0.8 * everywhere_us / 2
    in_all_us = sum(each.forward_us for each in profile.measurements_at(1)) / float(profile.environment["sharing"])
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
        first, second, third, last = profile.measurements_at(m)
        assert [each.output_bytes for each in (first, second, third, last)] == [m * hidden] * 3 + [0]
        numbers = m * TOKENS * 8
        assert first.input_bytes == numbers, "the model's input"
        assert (second.input_bytes, third.input_bytes) == (m * hidden, m * hidden)
        assert last.input_bytes == m * hidden + numbers, "and the labels"
        # A block keeps tanh's output, and what it sends. Its own input is the sum that the one before has sent.
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
    time = time_optimizer(optimizer, torch.device("cpu"), ComputeClock(torch.device("cpu")))
    assert 0 < time.element_us < 1
    assert time.us_for(2, 10**7) > time.us_for(2, 10**6) > time.us_for(2, 0) == 2 * time.tensor_us > 0
    assert not optimizer.state
    assert not parameter.any()
    assert time.scale_times(2).us_for(1, 10) == pytest.approx(2 * time.us_for(1, 10))


def test_an_optimizer_on_the_host_is_timed_with_what_it_moves() -> None:
    cpu, optimizer = torch.device("cpu"), torch.optim.Adam([nn.Parameter(torch.zeros(8))])
    copies = time_host_copies(optimizer, cpu, ComputeClock(cpu))
    assert 0 < copies.gradient_us < 1
    assert 0 < copies.parameter_us < 1


def test_an_optimizer_that_cannot_be_copied_is_taken_to_cost_no_time() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("only with my own parameters")

    odd = Odd([nn.Parameter(torch.zeros(8))], lr=0.1)
    assert time_optimizer(odd, torch.device("cpu"), ComputeClock(torch.device("cpu"))).us_for(5, 10**9) == 0


def test_larger_micro_batches_are_measured_while_they_pay() -> None:
    assert is_worth_doubling([100.0])
    assert is_worth_doubling([100.0, 99.0])
    assert is_worth_doubling([100.0, 60.0, 50.0])
    assert is_worth_doubling([100.0, 101.0, 80.0])
    assert not is_worth_doubling([100.0, 60.0, 59.0, 58.0])


@pytest.mark.parametrize("room_bytes", [0, 8500, None])
def test_sections_that_cannot_all_stay_on_the_device_are_measured_too(
    room_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyLanguageModel()
    meters = SectionMeters(subject_of(model), room_bytes)
    built: list[int] = []
    really_build = section_meters.SectionMeter

    def build(*arguments: Any) -> SectionMeter:
        built.append(arguments[1].start)
        return really_build(*arguments)

    monkeypatch.setattr(section_meters, "SectionMeter", build)
    sections = range(BLOCKS + 1)
    meters.build_meters(sections)
    for size in (1, 2):
        assert None not in meters.measure_sections(sections, get_batch(size), size, 0.0)
    # Of 10,624, 4,224, 4,224 and 6,400 bytes, 8,500 have room for the two blocks.
    assert {section: built.count(section) for section in sections} == {
        0: {0: 2, 1: 2, 2: 2, 3: 2},
        8500: {0: 2, 1: 1, 2: 1, 3: 2},
        None: {0: 1, 1: 1, 2: 1, 3: 1},
    }[room_bytes]


def test_what_does_not_fit_beside_other_sections_is_tried_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyLanguageModel()
    meters = SectionMeters(subject_of(model))
    meters.build_meters([0, 1])
    really_measure, failures = section_meters.measure_in_turn, 3

    def measure(meters: Sequence[SectionMeter], *arguments: Any) -> list[Measurement]:
        nonlocal failures
        if failures > 0:
            failures -= 1
            raise torch.OutOfMemoryError
        return really_measure(meters, *arguments)

    monkeypatch.setattr(section_meters, "measure_in_turn", measure)
    first, second = meters.measure_sections([0, 1], get_batch(1), 1, 0.0)
    assert first is None, "neither in turn with the other, nor beside it, nor alone"
    assert second is not None


def test_sections_are_measured_in_the_order_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise small sections would find the caches full of their own data, which no stage does."""
    ran: list[str] = []

    class Watched(SectionMeter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.section = arguments[1].start

        def forward(self, *arguments: Any) -> tuple[list[Tensor], float]:
            ran.append(f"F{self.section}")
            return super().forward(*arguments)

        def backward(self, outputs: list[Tensor]) -> float:
            ran.append(f"B{self.section}")
            took_us = super().backward(outputs)
            assert not outputs, "what it frees is part of its time"
            return took_us

    model = TinyLanguageModel()
    monkeypatch.setattr(section_meters, "SectionMeter", Watched)
    meters = SectionMeters(subject_of(model))
    meters.build_meters([0, 2, 3])
    assert None not in meters.measure_sections([0, 2, 3], get_batch(2), 2, 1e-9)
    memory, first_round = ran[:6], ran[6:12]
    assert memory == ["F0", "B0", "F2", "B2", "F3", "B3"]
    assert first_round == ["F0", "F2", "F3", "B3", "B2", "B0"]
    ran.clear()
    # A section that no cache can hold is measured alone, because several would take too much memory.
    monkeypatch.setattr(section_meter, "_NO_CACHE_BYTES", 1)
    assert None not in meters.measure_sections([0, 2, 3], get_batch(2), 2, 1e-9)
    assert ran[6:8] == ["F0", "B0"]
    assert ran[-2:] == ["F3", "B3"]


def test_cores_are_taken_to_be_shared_as_they_were_most_of_the_time() -> None:
    clock = ComputeClock(CPU)
    assert clock.sharing == 1.0
    turn_s = 0.0125
    for _ in range(16):  # it has half a core
        clock.record_sharing(turn_s, turn_s)
        clock.record_sharing(turn_s, 0.0)
        assert clock.sharing <= 2.0
    assert clock.sharing == pytest.approx(2.0)
    clock.record_sharing(1.0, 0.05)
    assert clock.sharing == pytest.approx(2.0), "that was one interruption"
    short = ComputeClock(CPU)
    short.record_sharing(0.010, 0.005)
    assert short.sharing == 2.0
    quick = ComputeClock(CPU)
    quick.record_sharing(0.1, 0.2)
    assert quick.sharing == 1.0


def test_links_are_classed_by_host() -> None:
    near, far = LinkSample((0, 1), 10.0, 1e9, 1.0), LinkSample((1, 2), 200.0, 1e8, 30.0)
    links = classify_links([near, far], ["a", "a", "b"])
    assert (links.same_vm.latency_us, links.other_vm.latency_us) == (10.0, 200.0)
    alone = classify_links([near], ["a", "b"])
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
from tiny_language_model import BLOCKS, TOKENS, WIDTH, WORDS, CPU, TinyLanguageModel, get_batch
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.profile import calibrate
from varuna.calibration.subject import CalibrationSubject
from varuna.distributed.worker_environment import read_worker_environment
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace
from varuna.worker.worker import WorkerProcess

worker = WorkerProcess.join_generation(read_worker_environment())
model = TinyLanguageModel()
profile = calibrate(
    CalibrationSubject(model, trace(model, get_batch(2)), get_batch, CPU, TrainingPrecision(torch.float32, "cpu")),
    OptimizerSetup(torch.optim.Adam(model.parameters())),
    global_batch=worker.environment.plan.global_batch,
    peers=CalibrationPeers(
        worker.environment.rank,
        worker.environment.world_size,
        worker.rendezvous.store,
        connect=worker.rendezvous.connect_gloo,
        host=sys.argv[2].split(",")[worker.environment.rank],
    ),
    budget_s=1.0,
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
        plan=Plan(p=1, d=world_size, micro_batch=1, global_batch=8),
    ).to_environ()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b", "b"]])
def test_ranks_share_the_work_and_measure_their_links(hosts: list[str]) -> None:
    world_size = len(hosts)
    (port,) = own_ports(1)
    command = [sys.executable, "-c", WORKER, str(TRAINING_SCRIPTS), ",".join(hosts)]
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
