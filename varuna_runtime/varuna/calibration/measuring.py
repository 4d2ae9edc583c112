"""Calibration: what a model costs on this hardware, measured by all ranks in parallel, as one Profile document.

Rank r of W measures sections r, r+W, …; all ranks measure the same micro-batch sizes, doubling from 1, and stop
together when larger ones no longer save time per example, do not fit, or the time is up. Then neighbours
measure their links, and rings their all-reduces.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from varuna.calibration.compute import Clock, SectionMeter, measure_in_turn, time_stage_overhead, worth_doubling
from varuna.calibration.links import Connect, LinkSample, classify, measure_all_reduce, measure_links
from varuna.calibration.merging import in_step, scaled, with_earlier, without
from varuna.calibration.optimizer import OptimizerCosts, OptimizerMemory, measure_optimizer, time_optimizer
from varuna.calibration.peers import Peers
from varuna.example_inputs import GetBatch
from varuna.launch import KeyValueStore
from varuna.optimizers import Optimizers, listed
from varuna.partition import ModelMap, Values
from varuna.precision import Precision
from varuna_planner.profile import AllReduceMeasurement, Links, Measurement, Profile, Section, SharedParameter

__all__ = [
    "Measured",
    "Meters",
    "Network",
    "calibrate",
    "device_name",
    "document",
    "doubling",
    "measure_network",
    "measure_sections",
]

_log = structlog.get_logger(__name__)

_BUDGET_S, _BUDGET_PER_SECTION_S = 6.0, 0.2
"""96 sections on one rank: 25 s, and 10 s to build them."""

_OVERHEAD_S, _OVERHEAD_SECTIONS = 0.5, 3
"""For measuring what a stage takes on top of its sections: how long, and on stages of how many."""

_SIZES_EXPECTED = 8
"""Micro-batch sizes among which the time is shared out at first: 1 to 128."""


def calibrate(
    model: nn.Module,
    model_map: ModelMap,
    get_batch: GetBatch,
    *,
    optimizer: Optimizers,
    device: torch.device,
    global_batch: int,
    precision: Precision | None = None,
    optimizer_on_device: bool = True,
    averaged: bool = False,
    rank: int = 0,
    world_size: int = 1,
    store: KeyValueStore | None = None,
    connect: Connect | None = None,
    budget_s: float | None = None,
    micro_batches: Sequence[int] | None = None,
    host: str | None = None,
    earlier: Profile | None = None,
    values: Values | None = None,
) -> Profile | None:
    """Measure `model` together with the other ranks; the document on rank 0, None elsewhere.

    Args:
        model_map: of `varuna.partition.trace`, the same on every rank.
        get_batch: makes example inputs of a given size.
        optimizer: the one or several that training will use: how much they keep per parameter is measured on copies.
        global_batch: no micro-batch larger than this is measured.
        precision: the one that training will use, and `model_map` was traced under; None: fp32.
        optimizer_on_device: whether the optimizer's state takes the device's memory; else the host's.
        averaged: whether a moving average of the parameters is kept, where the optimizer's state is.
        store: the rendezvous store; needed when there are other ranks.
        connect: makes gloo groups (`Rendezvous.gloo`); without it links keep the planner's defaults.
        budget_s: about how long measuring sections may take, once they are built; by default 6 s, and 0.2 s for each of
            this rank's sections. The smallest size is measured however long it takes.
        micro_batches: measure exactly these sizes instead of deciding.
        host: names this rank's VM; by default the host's name.
        earlier: a profile of the same model on the same hardware, to be extended: sizes that only it has are kept, and
            its network where it was measured on more ranks. Rank 0's counts.
        values: of parameters and buffers, where they are not the model's own.

    Raises:
        ValueError: not even the smallest micro-batch fits on the device.
    """
    peers = Peers(rank, world_size, store)
    precision = precision or Precision(torch.float32, device.type)
    meters = Meters(model, model_map, device, precision, values=values)
    mine = range(len(model_map.sections))[rank::world_size]
    if budget_s is None:
        budget_s = _BUDGET_S + _BUDGET_PER_SECTION_S * len(mine)
    sizes = doubling(global_batch) if micro_batches is None else sorted(set(micro_batches))
    found = measure_sections(meters, get_batch, peers, mine, sizes, budget_s, decide=micro_batches is None)
    network = measure_network(peers, connect, device, host or socket.gethostname())
    if found is None or network is None:
        return None
    optimizers = listed(optimizer)
    memory = [
        measure_optimizer(each, averaged=averaged) if optimizer_on_device else OptimizerMemory(0.0, 0)
        for each in optimizers
    ]
    network.environment["global_batch"] = str(global_batch)
    if earlier is not None:
        found.by_section = with_earlier(
            found.by_section, in_step(earlier, found.sharing), len(earlier.sections), every_size=True
        )
        network.extend(earlier)
    stepped_on = device if optimizer_on_device else torch.device("cpu")
    step = [time_optimizer(each, stepped_on, meters.clock).times(found.sharing) for each in optimizers]
    return document(model, model_map, found, network, OptimizerCosts(optimizers, memory, step), precision)


class Meters:
    """The meters of this rank's sections.

    Building one takes longer than measuring with it (0.1 s where the model has 1,300 modules), so each is built once
    where the device has room. All sections of a rank may be more than fits: others are built for each measurement.

    Args:
        room_bytes: of parameters that may stay on the device; None: any on a CPU, a quarter of what is free on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        model_map: ModelMap,
        device: torch.device,
        precision: Precision,
        room_bytes: float | None = None,
        values: Values | None = None,
    ) -> None:
        self._model, self._model_map, self._device, self._precision = model, model_map, device, precision
        self._values = values
        self.clock = Clock(device)
        self._kept: dict[int, SectionMeter] = {}
        self.random_by_micro_batch: dict[str, None] = {}
        """Where sections were seen to draw for the whole micro-batch, in order."""
        if room_bytes is None:
            room_bytes = torch.cuda.mem_get_info(device)[0] / 4 if device.type == "cuda" else math.inf
        self._room_bytes = room_bytes

    @property
    def sections(self) -> int:
        """How many the model has."""
        return len(self._model_map.sections)

    def build(self, sections: Sequence[int]) -> None:
        """Build those that may stay, so that it takes no time later. What does not fit is told when it is measured."""
        for section in sections:
            if self._bytes(section) <= self._room_bytes:
                with suppress(torch.OutOfMemoryError):
                    self._of(section)

    def measure(
        self, sections: Sequence[int], inputs: Mapping[str, Any], size: int, slice_s: float
    ) -> list[Measurement | None]:
        """Of each of the sections, which ascend; None where it, or this size of it, does not fit on the device."""
        kept = [section for section in sections if section in self._kept]
        found: dict[int, Measurement | None] = {}
        if kept:
            with suppress(torch.OutOfMemoryError):
                in_turn = measure_in_turn([self._kept[section] for section in kept], inputs, size, slice_s)
                self._note_draws([self._kept[section] for section in kept])
                found.update(zip(kept, in_turn, strict=True))
        return [
            found[section] if section in found else self._alone(section, inputs, size, slice_s) for section in sections
        ]

    def _alone(self, section: int, inputs: Mapping[str, Any], size: int, slice_s: float) -> Measurement | None:
        try:
            meter = self._of(section)
            [measured] = measure_in_turn([meter], inputs, size, slice_s)
            self._note_draws([meter])
            return measured
        except torch.OutOfMemoryError:
            if not self._kept:
                _log.info("does not fit", section=section, micro_batch=size)
                return None
        # Perhaps it does without the other sections. From now on none stays.
        self._kept.clear()
        self._room_bytes = 0
        return self._alone(section, inputs, size, slice_s)

    def _note_draws(self, meters: Sequence[SectionMeter]) -> None:
        for meter in meters:
            self.random_by_micro_batch.update(dict.fromkeys(meter.random.places_of_micro_batches))

    def _of(self, section: int) -> SectionMeter:
        if section in self._kept:
            return self._kept[section]
        meter = self._meter(range(section, section + 1))
        if self._bytes(section) <= self._room_bytes:
            self._room_bytes -= self._bytes(section)
            self._kept[section] = meter
        return meter

    def _meter(self, sections: range) -> SectionMeter:
        return SectionMeter(
            self._model, self._model_map, sections, self._device, self.clock, self._precision, self._values
        )

    def stage_overhead_us(self, sections: range, get_batch: GetBatch, size: int) -> tuple[float, float] | None:
        """What each (forward, backward) of a stage takes on top, told from these sections.

        None where there are not two of them, or the device has no room.
        """
        if len(sections) < 2:
            return None
        self._kept.clear()
        try:
            whole, *parts = (self._meter(each) for each in (sections, *(range(i, i + 1) for i in sections)))
            return time_stage_overhead(whole, parts, get_batch(size), size, _OVERHEAD_S)
        except torch.OutOfMemoryError:
            _log.info("no room to measure what a stage takes on top of its sections", sections=len(sections))
            return None

    def _bytes(self, section: int) -> int:
        parameters = self._model_map.sections[section].parameters
        return sum(self._model_map.parameter_bytes[name] for name in parameters)


def doubling(global_batch: int) -> list[int]:
    """The micro-batch sizes that are measured as long as they pay."""
    return [1 << power for power in range(global_batch.bit_length())]


@dataclass
class Measured:
    """What rank 0 learnt about the sections."""

    by_section: dict[int, list[Measurement]]
    sharing: float
    """How many times as long things took as they would on cores of their own; it is in the measurements already."""
    stage_overhead_us: float = 0.0
    """What each op of a stage takes on top of its sections; it is in none of the measurements."""
    random_by_micro_batch: tuple[str, ...] = ()
    """Places in the user's code."""


def measure_sections(
    meters: Meters,
    get_batch: GetBatch,
    peers: Peers,
    mine: Sequence[int],
    sizes: Sequence[int],
    budget_s: float,
    *,
    decide: bool,
) -> Measured | None:
    """Every section's measurements, on rank 0. `decide`: stop early when larger sizes gain nothing or time is up."""
    meters.build(mine)
    started_s = time.monotonic()
    slice_s = budget_s / (_SIZES_EXPECTED * max(1, len(mine)))
    found: dict[int, list[Measurement]] = {section: [] for section in mine}
    per_example_us: list[float] = []
    for size in sizes:
        size_started_s = time.monotonic()
        inputs = get_batch(size) if mine else {}
        results = meters.measure(mine, inputs, size, slice_s)
        fits = None not in results
        total_us = sum(result.forward_us + result.backward_us for result in results if result is not None)
        parts = peers.gather(f"size{size}", total_us if fits else None)
        verdict = None
        if parts is not None:
            known_us = [part for part in parts if part is not None]
            all_fit = len(known_us) == len(parts)
            per_example_us.append(sum(known_us) / size)
            now_s = time.monotonic()
            in_time = now_s - started_s + (now_s - size_started_s) <= budget_s
            verdict = {
                "keep": all_fit,
                "go_on": all_fit and (not decide or (in_time and worth_doubling(per_example_us))),
            }
        told: dict[str, bool] = peers.tell(f"after{size}", verdict)
        if told["keep"]:
            for section, result in zip(mine, results, strict=True):
                assert result is not None
                found[section].append(result)
        elif size == sizes[0]:
            raise ValueError(
                f"a section of the model does not fit on its device with a micro-batch of {size}: "
                "put more cut-points into the model, or use devices with more memory"
            )
        if not told["go_on"]:
            break
    overhead_us = meters.stage_overhead_us(_some_sections(peers, meters.sections), get_batch, sizes[0])
    overheads_us = peers.gather("overhead", overhead_us)
    sharing = peers.gather("sharing", meters.clock.sharing if mine else None)
    gathered = peers.gather(
        "sections", {str(i): [each.model_dump() for each in measured] for i, measured in found.items()}
    )
    places = peers.gather("random", list(meters.random_by_micro_batch))
    if gathered is None or sharing is None or overheads_us is None or places is None:
        return None
    # One factor for all: in training every rank shares its cores, whoever had the bad luck in this calibration.
    factor = statistics.median(each for each in sharing if each is not None)
    known = [each for each in overheads_us if each is not None] or [(0.0, 0.0)]
    forward_us, backward_us = (statistics.median(times) for times in zip(*known, strict=True))
    return Measured(
        {
            int(i): [scaled(without(Measurement(**each), forward_us, backward_us), factor) for each in measured]
            for part in gathered
            for i, measured in part.items()
        },
        factor,
        # The planner adds one figure to forwards, backwards and recomputes alike.
        stage_overhead_us=(forward_us + backward_us) / 2 * factor,
        random_by_micro_batch=tuple(dict.fromkeys(place for part in places for place in part)),
    )


def _some_sections(peers: Peers, count: int) -> range:
    """Neighbours in the model, other ones on each rank, for what a stage takes depends on where it is in the model."""
    length = min(count, _OVERHEAD_SECTIONS)
    first = (count - length) * (2 * peers.rank + 1) // (2 * peers.world_size)
    return range(first, first + length)


@dataclass
class Network:
    """What rank 0 learnt about the fleet."""

    environment: dict[str, str]
    links: Links
    all_reduce: list[AllReduceMeasurement]

    def extend(self, earlier: Profile) -> None:
        """Add what an earlier profile of this model on this hardware was measured for, and on a larger fleet."""
        now, before = self.environment, earlier.environment
        now["global_batch"] = max(now["global_batch"], before.get("global_batch", "1"), key=int)
        if int(before.get("ranks", "0")) > int(now["ranks"]):
            self.links, self.all_reduce = earlier.links, list(earlier.all_reduce)
            now["ranks"], now["hosts"] = before["ranks"], before["hosts"]


def measure_network(peers: Peers, connect: Connect | None, device: torch.device, host: str) -> Network | None:
    """Links and all-reduces, on rank 0; every rank calls it. Without `connect` or others, the planner's defaults."""
    samples: list[LinkSample] = []
    all_reduce: list[AllReduceMeasurement] = []
    hosts = peers.share("hosts", host)
    if connect is not None and peers.world_size > 1:
        samples = measure_links(peers.rank, peers.world_size, connect)
        all_reduce = measure_all_reduce(peers.rank, hosts, connect)
    gathered = peers.gather("links", [sample.to_json() for sample in samples])
    if gathered is None:
        return None
    links = classify([LinkSample.from_json(each) for part in gathered for each in part], hosts)
    return Network(_environment(device, hosts), links, all_reduce)


def _environment(device: torch.device, hosts: Sequence[str]) -> dict[str, str]:
    """What the figures hold for."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "ranks": str(len(hosts)),
        "hosts": ",".join(sorted(set(hosts))),
    }


def device_name(device: torch.device) -> str:
    """Kind and model of the device, such as `cuda: NVIDIA H200`."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{device.type}: {next(names, platform.machine())}"


def document(
    model: nn.Module,
    model_map: ModelMap,
    found: Measured,
    network: Network,
    costs: OptimizerCosts,
    precision: Precision,
) -> Profile:
    return Profile(
        environment={
            **network.environment,
            "precision": str(precision.dtype).removeprefix("torch."),
            "sharing": f"{found.sharing:.4g}",
        },
        sections=tuple(
            _section(model, model_map, index, found.by_section[index], costs) for index in sorted(found.by_section)
        ),
        shared_parameters=tuple(
            SharedParameter(name=name, sections=uses, bytes=model_map.parameter_bytes[name])
            for name, uses in model_map.shared.items()
        ),
        stage_overhead_us=found.stage_overhead_us,
        micro_batch_kept_for=_random_places(model_map, found),
        links=network.links,
        all_reduce=tuple(network.all_reduce),
    )


def _random_places(model_map: ModelMap, found: Measured) -> str:
    """What the dry run knows, and what only the device's kernels show."""
    known = model_map.random_by_micro_batch
    seen = [place for place in found.random_by_micro_batch if not any(each.startswith(place) for each in known)]
    return "; ".join([*known, *seen])


def _section(
    model: nn.Module,
    model_map: ModelMap,
    index: int,
    measurements: list[Measurement],
    costs: OptimizerCosts,
) -> Section:
    """A section with its memory. Tied parameters count in each section that uses them: a stage with one needs them."""
    section = model_map.sections[index]
    trained = [model.get_parameter(name) for name in section.parameters]
    trained = [parameter for parameter in trained if parameter.requires_grad]
    return Section(
        index=index,
        name=section.name,
        parameter_bytes=sum(model_map.parameter_bytes[name] for name in section.parameters),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        optimizer_bytes=costs.bytes_for(trained),
        optimizer_us=costs.us_for(trained),
        measurements=tuple(measurements),
    )
