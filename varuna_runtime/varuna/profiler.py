"""Calibration: what a model costs on this hardware, measured by all ranks in parallel, as one Profile document.

Rank r of W measures sections r, r+W, …; all ranks measure the same micro-batch sizes, doubling from 1, and stop
together when larger ones no longer save time per example, do not fit, or the time is up. Then neighbours
measure their links.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from varuna._gloo import GlooGroup
from varuna.calibration.compute import (
    ADAM_MEMORY,
    Clock,
    OptimizerMemory,
    SectionMeter,
    measure_optimizer,
    worth_doubling,
)
from varuna.calibration.links import Connect, LinkSample, classify, measure_all_reduce, measure_links
from varuna.calibration.peers import Peers
from varuna.example_inputs import GetBatch, example_maker
from varuna.generators import global_generators_kept
from varuna.launch import KeyValueStore, worker_environment
from varuna.partition import ModelMap, trace
from varuna.precision import Precision
from varuna.worker import Worker, choose_device, make_current
from varuna_planner.profile import AllReduceMeasurement, Links, Measurement, Profile, Section, SharedParameter

__all__ = ["Profiler", "calibrate"]

_log = structlog.get_logger(__name__)

_SIZES_EXPECTED = 8
"""Micro-batch sizes among which the time is shared out at first: 1 to 128."""

_PROFILE_FILE = "profile.json"


def calibrate(
    model: nn.Module,
    model_map: ModelMap,
    get_batch: GetBatch,
    *,
    optimizer: Optimizer,
    device: torch.device,
    global_batch: int,
    precision: Precision | None = None,
    optimizer_on_device: bool = True,
    rank: int = 0,
    world_size: int = 1,
    store: KeyValueStore | None = None,
    connect: Connect | None = None,
    budget_s: float = 6.0,
    micro_batches: Sequence[int] | None = None,
    host: str | None = None,
) -> Profile | None:
    """Measure `model` together with the other ranks; the document on rank 0, None elsewhere.

    Args:
        model_map: of `varuna.partition.trace`, the same on every rank.
        get_batch: makes example inputs of a given size.
        optimizer: the one that training will use: how much it keeps per parameter is measured on a copy.
        global_batch: no micro-batch larger than this is measured.
        precision: the one that training will use, and `model_map` was traced under; None: fp32.
        optimizer_on_device: whether the optimizer's state takes the device's memory; else the host's.
        store: the rendezvous store; needed when there are other ranks.
        connect: makes gloo groups (`Rendezvous.gloo`); without it links keep the planner's defaults.
        budget_s: about how long measuring sections may take. The smallest size is measured however long it takes.
        micro_batches: measure exactly these sizes instead of deciding.
        host: names this rank's VM; by default the host's name.

    Raises:
        ValueError: not even the smallest micro-batch fits on the device.
    """
    peers = Peers(rank, world_size, store)
    precision = precision or Precision(torch.float32, device.type)
    meters = _Meters(model, model_map, device, precision)
    mine = range(len(model_map.sections))[rank::world_size]
    sizes = _doubling(global_batch) if micro_batches is None else sorted(set(micro_batches))
    found = _measure_sections(meters, get_batch, peers, mine, sizes, budget_s, decide=micro_batches is None)
    network = _measure_network(peers, connect, device, host or socket.gethostname())
    if found is None or network is None:
        return None
    memory = measure_optimizer(optimizer) if optimizer_on_device else OptimizerMemory(0.0, 0)
    return _document(model, model_map, found, network, memory, precision)


class _Meters:
    """The meters of this rank's sections.

    On a CPU each is built once. On a GPU only one is there at a time: all sections of a rank may be more than fits.
    """

    def __init__(self, model: nn.Module, model_map: ModelMap, device: torch.device, precision: Precision) -> None:
        self._model, self._model_map, self._device, self._precision = model, model_map, device, precision
        self.clock = Clock(device)
        self._kept: dict[int, SectionMeter] = {}

    def measure(self, section: int, inputs: Mapping[str, Any], size: int, slice_s: float) -> Measurement | None:
        """None when the section, or this size of it, does not fit on the device."""
        try:
            return self._of(section).measure(inputs, size, slice_s)
        except torch.OutOfMemoryError:
            _log.info("does not fit", section=section, micro_batch=size)
            return None

    def _of(self, section: int) -> SectionMeter:
        if section in self._kept:
            return self._kept[section]
        meter = SectionMeter(self._model, self._model_map, section, self._device, self.clock, self._precision)
        if self._device.type == "cpu":
            self._kept[section] = meter
        return meter


def _doubling(global_batch: int) -> list[int]:
    return [1 << power for power in range(global_batch.bit_length())]


def _measure_sections(
    meters: _Meters,
    get_batch: GetBatch,
    peers: Peers,
    mine: Sequence[int],
    sizes: Sequence[int],
    budget_s: float,
    *,
    decide: bool,
) -> dict[int, list[Measurement]] | None:
    """Every section's measurements, on rank 0. `decide`: stop early when larger sizes gain nothing or time is up."""
    started_s = time.monotonic()
    slice_s = budget_s / (_SIZES_EXPECTED * max(1, len(mine)))
    found: dict[int, list[Measurement]] = {section: [] for section in mine}
    per_example_us: list[float] = []
    for size in sizes:
        size_started_s = time.monotonic()
        inputs = get_batch(size) if mine else {}
        results = [meters.measure(section, inputs, size, slice_s) for section in mine]
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
    sharing = peers.gather("sharing", meters.clock.sharing if mine else None)
    gathered = peers.gather(
        "sections", {str(i): [each.model_dump() for each in measured] for i, measured in found.items()}
    )
    if gathered is None or sharing is None:
        return None
    # One factor for all: in training every rank shares its cores, whoever had the bad luck in this calibration.
    factor = statistics.median(each for each in sharing if each is not None)
    return {
        int(i): [_scaled(Measurement(**each), factor) for each in measured]
        for part in gathered
        for i, measured in part.items()
    }


def _scaled(measured: Measurement, factor: float) -> Measurement:
    return measured.model_copy(
        update={
            "forward_us": measured.forward_us * factor,
            "backward_us": measured.backward_us * factor,
            "recompute_us": measured.recompute_us * factor,
        }
    )


class _Network:
    """What rank 0 learnt about the fleet."""

    def __init__(self, environment: dict[str, str], links: Links, all_reduce: list[AllReduceMeasurement]) -> None:
        self.environment = environment
        self.links = links
        self.all_reduce = all_reduce


def _measure_network(peers: Peers, connect: Connect | None, device: torch.device, host: str) -> _Network | None:
    """Links and all-reduces, on rank 0; every rank calls it. Without `connect` or others, the planner's defaults."""
    samples: list[LinkSample] = []
    all_reduce: list[AllReduceMeasurement] = []
    if connect is not None and peers.world_size > 1:
        samples = measure_links(peers.rank, peers.world_size, connect)
        all_reduce = measure_all_reduce(peers.rank, peers.world_size, connect)
    hosts = peers.gather("hosts", host)
    gathered = peers.gather("links", [sample.to_json() for sample in samples])
    if hosts is None or gathered is None:
        return None
    links = classify([LinkSample.from_json(each) for part in gathered for each in part], hosts)
    return _Network(_environment(device, hosts), links, all_reduce)


def _environment(device: torch.device, hosts: Sequence[str]) -> dict[str, str]:
    """What the figures hold for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{device.type}: {name}",
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "ranks": str(len(hosts)),
        "hosts": ",".join(sorted(set(hosts))),
    }


def _document(
    model: nn.Module,
    model_map: ModelMap,
    found: Mapping[int, list[Measurement]],
    network: _Network,
    memory: OptimizerMemory,
    precision: Precision,
) -> Profile:
    return Profile(
        environment={**network.environment, "precision": str(precision.dtype).removeprefix("torch.")},
        sections=tuple(_section(model, model_map, index, found[index], memory) for index in sorted(found)),
        shared_parameters=tuple(
            SharedParameter(name=name, sections=uses, bytes=model_map.parameter_bytes[name])
            for name, uses in model_map.shared.items()
        ),
        links=network.links,
        all_reduce=tuple(network.all_reduce),
    )


def _section(
    model: nn.Module, model_map: ModelMap, index: int, measurements: list[Measurement], memory: OptimizerMemory
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
        optimizer_bytes=sum(memory.bytes_for(parameter.numel()) for parameter in trained),
        measurements=tuple(measurements),
    )


class Profiler(nn.Module):
    """Profiles a model by the seeds' three steps: wrap it, set the optimizer, `profile_all`.

    Every worker does the same; without the launcher, one process profiles alone. The result is the document that the
    manager's calibration makes, and lies as `profile.json` in `out_folder`.

    Args:
        model: on the CPU (or `meta`), returning its mean loss.
        get_batch: `get_batch(size, device="cpu")` gives example inputs as a dict; or one such dict, of any batch size.
        device: the CUDA device or its index; -1: the local rank's. An index does not matter on CPUs.
        gpus_per_node: ranks per VM, in order of ranks; None: ranks on one host name are on one VM.
        fp16, dtype: the precision of the training, as for `Varuna`.
        out_folder: where the profile is kept.
        pstages_to_profile: sections to measure, the others being taken from the profile in `out_folder`; None: all.
        from_cache: return the profile in `out_folder` when it has all that is asked for.
        add_to_existing: keep the micro-batch sizes of the profile in `out_folder` beside those measured now.

    Raises:
        ValueError: an argument does not fit the model, or contradicts the launcher.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch: Callable[..., Mapping[str, Any]] | Mapping[str, Any],
        device: int | str | torch.device | None = -1,
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | Path = "profiles",
        pstages_to_profile: Sequence[int] | None = None,
        from_cache: bool = True,
        add_to_existing: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if gpus_per_node is not None and gpus_per_node < 1:
            raise ValueError(f"gpus_per_node {gpus_per_node}: a node has at least one GPU")
        self._model = model
        self._get_batch = example_maker(get_batch)
        self._worker = Worker.join(worker_environment())
        self._device = make_current(choose_device(self._worker.environment, device, -1))
        self._precision = Precision.of(fp16, dtype, self._device)
        self._precision.check_parameters(model.named_parameters())
        self._gpus_per_node = gpus_per_node
        self._path = Path(out_folder) / _PROFILE_FILE
        self._from_cache = from_cache
        self._add_to_existing = add_to_existing
        self._optimizer: Optimizer | None = None
        self._calls = 0
        with global_generators_kept(self._device), self._precision.dry_run():
            self._model_map = trace(model, self._get_batch(2))
        count = len(self._model_map.sections)
        self._sections = list(range(count)) if pstages_to_profile is None else sorted(set(pstages_to_profile))
        if any(not 0 <= section < count for section in self._sections):
            raise ValueError(f"pstages_to_profile {self._sections}: the model has sections 0 to {count - 1}")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, by their names in it: for making the optimizer."""
        return self._model.named_parameters(prefix, recurse, remove_duplicate)

    def set_optimizer(
        self,
        optimizer: Optimizer,
        amp_opt_level: str = "O2",
        loss_scale: float | Literal["dynamic"] = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float | None = None,
    ) -> None:
        """The optimizer that training will use: how much it keeps per parameter goes into the profile.

        The other arguments, which cost neither time nor memory, are for the seeds' sake.
        """
        self._optimizer = optimizer

    def profile_all(self, microbatch_sizes: Sequence[int]) -> Profile:
        """Measure at these micro-batch sizes, all workers together; the whole profile, on every one of them.

        Without `set_optimizer` memory is reckoned for Adam, which keeps two numbers per parameter.
        Raises ValueError when a size is below 1, or a section was measured neither now nor before.
        """
        sizes = sorted(set(microbatch_sizes))
        if not sizes or sizes[0] < 1:
            raise ValueError(f"microbatch_sizes {list(microbatch_sizes)}: give sizes of at least one example")
        environment = self._worker.environment
        self._calls += 1  # each has its own names in the store
        store = PrefixStore(f"profile{self._calls}", self._worker.rendezvous.store)
        peers = Peers(environment.rank, environment.world_size, store)
        before = self._existing() if peers.rank == 0 else None
        enough = self._from_cache and before is not None and set(sizes) <= set(before.micro_batches)
        profile = before if peers.tell("cached", enough) else self._measure(peers, sizes, before)
        return Profile.from_json(peers.tell("profile", None if profile is None else profile.to_json()))

    def _measure(self, peers: Peers, sizes: Sequence[int], before: Profile | None) -> Profile | None:
        """The new profile, kept in the folder, on rank 0; None elsewhere."""
        meters = _Meters(self._model, self._model_map, self._device, self._precision)
        mine = self._sections[peers.rank :: peers.world_size]
        found = _measure_sections(meters, self._get_batch, peers, mine, sizes, budget_s=60.0, decide=False)
        network = _measure_network(peers, self._connect, self._device, self._host())
        if found is None or network is None:
            return None
        merged = _with_earlier(found, before, len(self._model_map.sections), every_size=self._add_to_existing)
        memory = ADAM_MEMORY if self._optimizer is None else measure_optimizer(self._optimizer)
        profile = _document(self._model, self._model_map, merged, network, memory, self._precision)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(profile.to_json())
        return profile

    def _connect(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        return self._worker.rendezvous.gloo(f"profile{self._calls}/{name}", ranks)

    def _host(self) -> str:
        if self._gpus_per_node is None:
            return socket.gethostname()
        return f"node{self._worker.environment.rank // self._gpus_per_node}"

    def _existing(self) -> Profile | None:
        """The profile in the folder, if it is of a model with these sections."""
        if not self._path.is_file():
            return None
        try:
            profile = Profile.from_json(self._path.read_text())
        except ValueError as error:
            _log.warning("the earlier profile cannot be read", path=str(self._path), error=str(error))
            return None
        names = [section.name for section in self._model_map.sections]
        return profile if [section.name for section in profile.sections] == names else None


def _with_earlier(
    found: Mapping[int, list[Measurement]], before: Profile | None, count: int, *, every_size: bool
) -> dict[int, list[Measurement]]:
    """What was measured now, completed by what was measured before; now wins where both have a size."""
    earlier = {} if before is None else {section.index: section.measurements for section in before.sections}
    missing = [section for section in range(count) if section not in found and section not in earlier]
    if missing:
        raise ValueError(
            f"sections {missing} were never measured: leave pstages_to_profile out, or keep the profile of an earlier "
            "run in out_folder"
        )
    merged = {}
    for section in range(count):
        kept = earlier.get(section, ()) if every_size or section not in found else ()
        by_size = {each.micro_batch: each for each in (*kept, *found.get(section, ()))}
        merged[section] = [by_size[size] for size in sorted(by_size)]
    return merged
