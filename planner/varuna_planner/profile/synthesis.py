"""A profile without a GPU: from a model's shape and the hardware table, what calibration would have measured.

A section's forward takes the time of its matrix products at the rate that the device reaches, plus the time to move
all its bytes through the device's memory, plus a constant for launching its kernels; its backward does twice the work.
Small products move more bytes per FLOP and are therefore less efficient, as on real devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from varuna_planner.hardware.table import GpuSpec, Hardware, NetworkSpec
from varuna_planner.profile.document import AllReduceMeasurement, Link, Links, Measurement, Profile, SectionProfile
from varuna_planner.profile.shapes import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    VALUE_BYTES,
    ModelFamily,
    ModelShape,
    SectionShape,
)

__all__ = ["HOST_BYTES", "MICRO_BATCHES", "all_reduces", "link_of", "synthesise"]

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Micro-batch sizes to synthesise, as calibration would measure them."""

_TOKEN_BYTES = 8
"""The size of a token's number; its label has the same."""

_ADAM_BYTES = 7 * 4
"""Bytes per parameter that a step moves through memory: all four values read, all but the gradient written."""

HOST_BYTES = 2 * GRADIENT_BYTES + OPTIMIZER_BYTES
"""Bytes per parameter on the host when the optimizer is there: a copy, its gradient, its moments."""

_RINGS = (2, 8)
_RING_BYTES = (1024 * 1024, 1024**3)
"""Message sizes of the synthesised all-reduces: more than the model's parameters, so that its errors show."""


def synthesise(
    shape: ModelShape,
    hardware: Hardware,
    gpu: str,
    network: str,
    *,
    gpus_per_vm: int = 1,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    offload_optimizer: bool = False,
) -> Profile:
    """The profile of a model on hardware from the table.

    Args:
        shape: the model.
        hardware: the table in which `gpu` and `network` are.
        gpu, network: names. The network joins VMs; what joins GPUs of one VM is the GPU's `inside_vm`.
        gpus_per_vm: GPUs of each VM, whose stages then share its network when all reduce at once.
        micro_batches: sizes to synthesise.
        offload_optimizer: the optimizer and its state are on the host, as with `Varuna(..., offload_optimizer=True)`.

    Raises:
        ValueError: no such GPU or network, or the GPU does not know the model's precision.
    """
    device, between, inside = (
        hardware.find_gpu(gpu),
        hardware.find_network(network),
        hardware.find_network(hardware.find_gpu(gpu).inside_vm),
    )
    if shape.precision not in device.peak_flop_per_s:
        known = ", ".join(device.peak_flop_per_s)
        raise ValueError(f"{gpu} does not compute in {shape.precision}: use one of {known} (--precision)")
    sections = shape.list_sections()
    offload_us = (
        _offload_us_per_parameter(device, hardware.find_network(device.host_link)) if offload_optimizer else None
    )
    each = " each of encoder and decoder" if shape.family is ModelFamily.T5 else ""
    return Profile(
        environment={
            "source": "synthesised, not measured",
            "model": (
                f"{shape.family}: {shape.layers} layers{each}, hidden {shape.hidden}, {shape.seq} tokens, "
                f"{shape.parameters / 1e9:.3g} billion parameters"
            ),
            "precision": shape.precision.value,
            **({"boundaries": shape.boundaries.value} if shape.boundaries else {}),
            "optimizer": "on the host" if offload_optimizer else "on the device",
            "device": gpu,
            "network": network,
        },
        sections=tuple(
            _section(
                shape,
                device,
                index,
                sections=sections,
                micro_batches=sorted(set(micro_batches)),
                offload_us=offload_us,
            )
            for index in range(len(sections))
        ),
        shared_parameters=shape.shared_parameters(),
        stage_overhead_us=device.micro_batch_overhead_us,
        links=Links(same_vm=link_of(inside), other_vm=link_of(between)),
        all_reduce=tuple(all_reduces(between, gpus_per_vm)),
    )


def _forward_us(section: SectionShape, shape: ModelShape, gpu: GpuSpec, micro_batch: int) -> float:
    """A section's forward without launch overhead."""
    reached = gpu.head_efficiency if section.is_head else gpu.compute_efficiency
    flops = micro_batch * sum(product.flops for product in section.products)
    values = micro_batch * section.streamed_values + sum(p.moved_values(micro_batch) for p in section.products)
    compute_s = flops / (gpu.peak_flop_per_s[shape.precision] * reached)
    memory_s = values * shape.precision.value_bytes / (gpu.memory_bandwidth_bytes_per_s * gpu.memory_efficiency)
    return (compute_s + memory_s) * 1e6


def _accumulation_us(section: SectionShape, gpu: GpuSpec) -> float:
    """The time for a backward to add its gradients to those of earlier micro-batches: two reads and a write."""
    moved = 3 * section.parameters * GRADIENT_BYTES
    return moved / (gpu.memory_bandwidth_bytes_per_s * gpu.memory_efficiency) * 1e6


def _offload_us_per_parameter(gpu: GpuSpec, link: NetworkSpec) -> float:
    """The time of a step on the host: copy the gradient there, run Adam, copy the parameter back, in sequence."""
    moved_s = 2 * GRADIENT_BYTES / (link.bandwidth_bytes_per_s * link.bandwidth_efficiency)
    return (moved_s + _ADAM_BYTES / gpu.host_memory_bandwidth_bytes_per_s) * 1e6


def _section(
    shape: ModelShape,
    gpu: GpuSpec,
    index: int,
    *,
    sections: Sequence[SectionShape],
    micro_batches: Sequence[int],
    offload_us: float | None,
) -> SectionProfile:
    """`offload_us`: the time per parameter of the optimizer's step on the host; None: it runs on the device, where it
    takes almost none."""
    section = sections[index]
    crossing_bytes = shape.boundary_value_bytes
    tokens_bytes = 2 * shape.seq * _TOKEN_BYTES
    input_bytes = sections[index - 1].output_values * crossing_bytes if index else tokens_bytes
    measurements = []
    for micro_batch in micro_batches:
        forward = _forward_us(section, shape, gpu, micro_batch)
        accumulation = _accumulation_us(section, gpu)
        measurements.append(
            Measurement(
                micro_batch=micro_batch,
                forward_us=forward + gpu.section_overhead_us,
                backward_us=2 * (forward + gpu.section_overhead_us) + accumulation,
                recompute_us=forward + gpu.section_overhead_us,
                output_bytes=micro_batch * section.output_values * crossing_bytes,
                input_bytes=micro_batch * input_bytes,
                activation_bytes=micro_batch * section.kept_values * shape.precision.value_bytes,
            )
        )
    return SectionProfile(
        index=index,
        name=section.name,
        parameter_bytes=section.parameters * (VALUE_BYTES + shape.precision.cast_bytes),
        cast_bytes=section.parameters * shape.precision.cast_bytes,
        gradient_bytes=section.parameters * GRADIENT_BYTES,
        optimizer_bytes=0 if offload_us is not None else section.parameters * OPTIMIZER_BYTES,
        optimizer_us=section.parameters * (offload_us or 0.0),
        measurements=tuple(measurements),
    )


def link_of(network: NetworkSpec) -> Link:
    return Link(
        latency_us=network.latency_us,
        bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * network.bandwidth_efficiency,
        jitter_us=network.jitter_us,
    )


def all_reduces(network: NetworkSpec, gpus_per_vm: int) -> list[AllReduceMeasurement]:
    """Rings over the network: one alone, and as many at once as a VM has GPUs, which share it (paper, section 4.3)."""
    bytes_per_us = network.bandwidth_bytes_per_s * network.all_reduce_efficiency / 1e6
    return [
        AllReduceMeasurement(
            ranks=ranks,
            bytes=count,
            us=2 * (ranks - 1) * (network.all_reduce_hop_us + count / ranks / bytes_per_us * rings),
            rings=rings,
        )
        for rings in dict.fromkeys((1, gpus_per_vm))
        for ranks in _RINGS
        for count in _RING_BYTES
    ]
