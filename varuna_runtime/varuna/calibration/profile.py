"""Calibration: what a model costs on this hardware, measured by all ranks in parallel, as one Profile document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from varuna.calibration.clock import ComputeClock
from varuna.calibration.fleet_network import FleetNetwork, measure_network
from varuna.calibration.measurements import compare_types, merge_measurements, rescale_profile
from varuna.calibration.optimizer_costs import OptimizerCosts, OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.rank_types import RankTypes
from varuna.calibration.section_meters import SectionMeters
from varuna.calibration.sections import SectionMeasurements, list_doubled_sizes, measure_sections
from varuna.calibration.subject import CalibrationSubject
from varuna.partition import ModelMap
from varuna_planner.profile.document import GpuTypeSpeeds, Measurement, Profile, SectionProfile, SharedParameter

__all__ = ["calibrate", "compare_sections", "make_profile", "measure_optimizer_costs"]

_BUDGET_S, _BUDGET_PER_SECTION_S = 6.0, 0.2
"""96 sections on one rank: 25 s, and 10 s to build them."""


def calibrate(
    subject: CalibrationSubject,
    optimizer: OptimizerSetup,
    *,
    global_batch: int,
    peers: CalibrationPeers | None = None,
    budget_s: float | None = None,
    micro_batches: Sequence[int] | None = None,
    earlier: Profile | None = None,
) -> Profile | None:
    """Measures the subject together with the other ranks; returns the profile on rank 0, None elsewhere.

    Its times are those of the type of GPU that most ranks have; of the other types it has the sections' speeds.

    Args:
        global_batch: the largest micro-batch that is measured.
        peers: the ranks that measure together; None: this process alone.
        budget_s: about how long measuring sections may take, once they are built; by default 6 s, and 0.2 s for each
            section of the rank that has most. The smallest size is measured however long it takes.
        micro_batches: the sizes to measure; None: doubling from 1 as long as it pays.
        earlier: a profile of the same model on the same hardware, which this one extends: sizes and types of GPU that
            only it has stay in, and its network if it was measured on more ranks. Rank 0's counts.

    Raises:
        ValueError: not even the smallest micro-batch fits on the device.
    """
    peers = peers or CalibrationPeers()
    types = peers.share_types()
    meters = SectionMeters(subject)
    count = len(subject.model_map.sections)
    if budget_s is None:
        budget_s = _BUDGET_S + _BUDGET_PER_SECTION_S * types.count_most_sections(count)
    sizes = list_doubled_sizes(global_batch) if micro_batches is None else sorted(set(micro_batches))
    by_type = measure_sections(
        meters,
        peers,
        types,
        sections=range(count),
        sizes=sizes,
        budget_s=budget_s,
        decide=micro_batches is None,
    )
    network = measure_network(peers, subject.device, types)
    costs = measure_optimizer_costs(optimizer, peers, types, subject.device, meters.clock)
    if by_type is None or network is None or costs is None:
        return None
    network.environment["global_batch"] = str(global_batch)
    sections = by_type[types.own]
    other_types = compare_sections(by_type, types, earlier, count)
    if earlier is not None:
        sections.by_section = merge_measurements(
            sections.by_section, rescale_profile(earlier, sections.sharing), len(earlier.sections), every_size=True
        )
        network.add_earlier(earlier)
    return make_profile(
        subject,
        sections,
        network,
        costs.scale_times(sections.sharing),
        gpu_type=types.own,
        other_gpu_types=other_types,
    )


def measure_optimizer_costs(
    optimizer: OptimizerSetup, peers: CalibrationPeers, types: RankTypes, device: torch.device, clock: ComputeClock
) -> OptimizerCosts | None:
    """The optimizer's costs on the profile's own type, as on cores of its own; returns them on rank 0, None elsewhere.

    One rank measures them. On the other types the optimizer is taken to be as much faster as the sections are.
    """
    costs = optimizer.measure_costs(device, clock) if peers.rank == types.leader else None
    gathered = peers.gather_values("optimizer", None if costs is None else costs.to_json())
    if gathered is None:
        return None
    numbers = gathered[types.leader]
    assert numbers is not None
    return OptimizerCosts.from_json(optimizer.list_known(), numbers)


def compare_sections(
    by_type: Mapping[str, SectionMeasurements], types: RankTypes, earlier: Profile | None, count: int
) -> tuple[GpuTypeSpeeds, ...]:
    """The speeds of the model's `count` sections on all types of GPU that are known besides the profile's own."""
    others = {gpu_type: measured.by_section for gpu_type, measured in by_type.items() if gpu_type != types.own}
    return compare_types(by_type[types.own].by_section, others, earlier, count, own_type=types.own)


def make_profile(
    subject: CalibrationSubject,
    sections: SectionMeasurements,
    network: FleetNetwork,
    costs: OptimizerCosts,
    *,
    gpu_type: str,
    other_gpu_types: tuple[GpuTypeSpeeds, ...],
) -> Profile:
    """`sections`, `costs`: on the profile's own type of GPU, which is `gpu_type`."""
    model_map = subject.model_map
    return Profile(
        gpu_type=gpu_type,
        other_gpu_types=other_gpu_types,
        environment={
            **network.environment,
            "precision": str(subject.precision.dtype).removeprefix("torch."),
            "sharing": f"{sections.sharing:.4g}",
        },
        sections=tuple(
            _make_section(subject, index, sections.by_section[index], costs) for index in sorted(sections.by_section)
        ),
        shared_parameters=tuple(
            SharedParameter(name=name, sections=uses, bytes=model_map.parameter_bytes[name])
            for name, uses in model_map.shared.items()
        ),
        stage_overhead_us=sections.stage_overhead_us,
        micro_batch_kept_for=_list_random_places(model_map, sections),
        links=network.links,
        all_reduce=tuple(network.all_reduce),
    )


def _list_random_places(model_map: ModelMap, sections: SectionMeasurements) -> str:
    """Places that the dry run has found, and those that only the device's kernels show."""
    known = model_map.random_by_micro_batch
    seen = [place for place in sections.random_by_micro_batch if not any(each.startswith(place) for each in known)]
    return "; ".join([*known, *seen])


def _make_section(
    subject: CalibrationSubject, index: int, measurements: list[Measurement], costs: OptimizerCosts
) -> SectionProfile:
    """A section with its memory. Tied parameters count in every section that uses them."""
    model_map = subject.model_map
    section = model_map.sections[index]
    trained = [subject.model.get_parameter(name) for name in section.parameters]
    trained = [parameter for parameter in trained if parameter.requires_grad]
    cast_bytes = subject.precision.cast_bytes(trained)
    return SectionProfile(
        index=index,
        name=section.name,
        parameter_bytes=sum(model_map.parameter_bytes[name] for name in section.parameters) + cast_bytes,
        cast_bytes=cast_bytes,
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        optimizer_bytes=costs.bytes_for(trained),
        optimizer_us=costs.us_for(trained),
        update_bytes=costs.step_bytes_for(trained),
        measurements=tuple(measurements),
    )
