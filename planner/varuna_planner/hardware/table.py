"""GPUs and networks in numbers, to plan before owning any. One JSON document, "varuna.hardware/1".

Peaks, memory and bandwidths come from the vendors' data sheets (dense, without sparsity; links one way). Efficiencies
and overheads are typical of well-written training code; `fitting` corrects them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from varuna_planner.documents import parse_document
from varuna_planner.profile.shapes import NumberFormat

__all__ = ["GpuSpec", "Hardware", "NetworkSpec", "assume_speed", "built_in"]

_PRECISIONS = {"float32": NumberFormat.FP32, "float16": NumberFormat.FP16, "bfloat16": NumberFormat.BF16}

SCHEMA: Literal["varuna.hardware/1"] = "varuna.hardware/1"

Name = Annotated[str, Field(min_length=1, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Microseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _HardwareRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class GpuSpec(_HardwareRecord):
    """One kind of device."""

    name: Name
    peak_flop_per_s: Annotated[dict[NumberFormat, Positive], Field(min_length=1)]
    """Dense matrix products, per precision. A precision that is not here is not supported."""
    memory_bytes: Annotated[int, Field(ge=1)]
    memory_bandwidth_bytes_per_s: Positive
    compute_efficiency: Part
    """The share of the peak in a layer's matrix products. Memory traffic adds to their time, so small ones are
    slower."""
    head_efficiency: Part
    """The same in the head's single product, which is wider than any of a layer's."""
    memory_efficiency: Part = 0.8
    """The share of the memory's bandwidth."""
    section_overhead_us: Microseconds
    """Per section and pass: launching kernels."""
    micro_batch_overhead_us: Microseconds
    """Per micro-batch and pass of a stage: the engine, copies to and from the host, keeping random states."""
    inside_vm: Name
    """The network entry that joins GPUs of one VM."""
    host_link: Name = "pcie3"
    """The network entry that joins the GPU to its host."""
    host_memory_bandwidth_bytes_per_s: Positive = 20e9
    """For an optimizer on the host, per GPU: a VM has some six cores for each."""


class NetworkSpec(_HardwareRecord):
    """One kind of link between two workers. Bandwidths are one way."""

    name: Name
    bandwidth_bytes_per_s: Positive
    bandwidth_efficiency: Part
    """The share of the bandwidth in a message from stage to stage."""
    latency_us: Microseconds
    jitter_us: Microseconds
    """The mean of a random delay on top of the latency."""
    all_reduce_efficiency: Part
    """The share of the bandwidth in a ring all-reduce."""
    all_reduce_hop_us: Microseconds
    """Time of each of its 2(D - 1) hops."""


class Hardware(_HardwareRecord):
    """The document. Raises pydantic.ValidationError (a ValueError) at construction; `from_json` raises clearer text."""

    schema_: Literal["varuna.hardware/1"] = Field(default=SCHEMA, alias="schema")
    gpus: tuple[GpuSpec, ...] = ()
    networks: tuple[NetworkSpec, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Hardware:
        for kind, entries in (("gpus", self.gpus), ("networks", self.networks)):
            names = [entry.name for entry in entries]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind}: {', '.join(twice)} occurs twice: give each entry its own name")
        return self

    def find_gpu(self, name: str) -> GpuSpec:
        """Raises ValueError that lists the known ones."""
        return _find("GPU", name, self.gpus)

    def find_network(self, name: str) -> NetworkSpec:
        """Raises ValueError that lists the known ones."""
        return _find("network", name, self.networks)

    def with_entries(self, other: Hardware) -> Hardware:
        """These entries and those of `other`, which replace entries of the same names."""
        gpus = {gpu.name: gpu for gpu in (*self.gpus, *other.gpus)}
        networks = {network.name: network for network in (*self.networks, *other.networks)}
        return Hardware(gpus=tuple(gpus.values()), networks=tuple(networks.values()))

    def to_json(self) -> str:
        """The document, indented for people; `from_json` reads it back."""
        return self.model_dump_json(by_alias=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Reads a document. Raises ValueError naming the field, its value and what is wrong with it."""
        return parse_document(cls, text, "hardware")


Entry = TypeVar("Entry", GpuSpec, NetworkSpec)


@cache
def built_in() -> Hardware:
    """The table that comes with Varuna. `with_entries` adds to it."""
    table = resources.files("varuna_planner.hardware").joinpath("hardware.json").read_text(encoding="utf-8")
    return Hardware.from_json(table)


def assume_speed(own: str, other: str, precision: str = "") -> float:
    """How many times as fast GPUs called `other` compute as those called `own`, by the table; 1: it lacks one of them.

    Args:
        own, other: as drivers call them, such as `Tesla V100-SXM2-16GB`.
        precision: of the training, as torch calls it; empty: not known.
    """
    gpus = [_find_by_driver_name(name) for name in (own, other)]
    if gpus[0] is None or gpus[1] is None:
        return 1.0
    wanted = _PRECISIONS.get(precision, NumberFormat.FP16)
    flops = [
        gpu.peak_flop_per_s.get(wanted, gpu.peak_flop_per_s.get(NumberFormat.FP16, 0.0)) * gpu.compute_efficiency
        for gpu in gpus
        if gpu is not None
    ]
    return flops[1] / flops[0] if all(flops) else 1.0


def _find_by_driver_name(name: str) -> GpuSpec | None:
    """The entry of whose name the driver's has most parts, the model among them; None: there is none."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = [gpu for gpu in built_in().gpus if gpu.name.split("-")[0] in words]
    return max(found, key=lambda gpu: len(words.intersection(gpu.name.split("-"))), default=None)


def _find(kind: str, name: str, entries: tuple[Entry, ...]) -> Entry:
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(sorted(entry.name for entry in entries))
    raise ValueError(f"no {kind} is called {name!r}: there are {known}; add yours with --hardware FILE.json")
