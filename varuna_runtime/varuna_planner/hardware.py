"""GPUs and networks in numbers, to plan before owning any. One JSON document, "varuna.hardware/1".

Peaks, memory and bandwidths are the vendors' data sheets' (dense, without sparsity; links one way). Efficiencies and
overheads are no vendor's: they are what well-written training code commonly reaches, and what `fitting` corrects.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from varuna_planner.documents import parse_document
from varuna_planner.shapes import Precision

__all__ = ["Gpu", "Hardware", "Network", "built_in"]

SCHEMA: Literal["varuna.hardware/1"] = "varuna.hardware/1"

Name = Annotated[str, Field(min_length=1, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Microseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Gpu(_Frozen):
    """One kind of device."""

    name: Name
    peak_flop_per_s: Annotated[dict[Precision, Positive], Field(min_length=1)]
    """Dense matrix products, per precision. A precision that is not here is not supported."""
    memory_bytes: Annotated[int, Field(ge=1)]
    memory_bandwidth_bytes_per_s: Positive
    compute_efficiency: Part
    """Of the peak, in the matrix products of a layer, memory traffic aside. Traffic comes on top: that is the curve by
    which small products are slower."""
    head_efficiency: Part
    """The same in the head's product, which is one, and wider than any of a layer's."""
    memory_efficiency: Part = 0.8
    """Of the memory's bandwidth."""
    section_overhead_us: Microseconds
    """Per section and pass: launching kernels."""
    micro_batch_overhead_us: Microseconds
    """Per micro-batch and pass of a stage: the engine, copies to and from the host, keeping random states."""
    inside_vm: Name
    """The network entry that joins GPUs of one VM."""
    host_link: Name = "pcie3"
    """The network entry that joins the GPU to its host."""
    host_memory_bandwidth_bytes_per_s: Positive = 20e9
    """What an optimizer on the host has of its memory's, per GPU: a VM has some six cores for each."""


class Network(_Frozen):
    """One kind of link between two workers. Bandwidths are one way."""

    name: Name
    bandwidth_bytes_per_s: Positive
    bandwidth_efficiency: Part
    """Of the bandwidth, in a message from stage to stage."""
    latency_us: Microseconds
    jitter_us: Microseconds
    """Mean of what comes on top of the latency."""
    all_reduce_efficiency: Part
    """Of the bandwidth, in a ring all-reduce."""
    all_reduce_hop_us: Microseconds
    """Time of each of its 2(D - 1) hops."""


class Hardware(_Frozen):
    """The document. Raises pydantic.ValidationError (a ValueError) at construction; `from_json` raises clearer text."""

    schema_: Literal["varuna.hardware/1"] = Field(default=SCHEMA, alias="schema")
    gpus: tuple[Gpu, ...] = ()
    networks: tuple[Network, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Hardware:
        for kind, entries in (("gpus", self.gpus), ("networks", self.networks)):
            names = [entry.name for entry in entries]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind}: {', '.join(twice)} is there twice: give each entry a name of its own")
        return self

    def gpu(self, name: str) -> Gpu:
        """Raises ValueError naming those that there are."""
        return _find("GPU", name, self.gpus)

    def network(self, name: str) -> Network:
        """Raises ValueError naming those that there are."""
        return _find("network", name, self.networks)

    def with_entries(self, other: Hardware) -> Hardware:
        """These entries, those of `other` replacing the ones with the same names."""
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


Entry = TypeVar("Entry", Gpu, Network)


@cache
def built_in() -> Hardware:
    """The table that comes with Varuna. `with_entries` adds to it."""
    table = resources.files("varuna_planner").joinpath("hardware.json").read_text(encoding="utf-8")
    return Hardware.from_json(table)


def _find(kind: str, name: str, entries: tuple[Entry, ...]) -> Entry:
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(sorted(entry.name for entry in entries))
    raise ValueError(f"no {kind} is called {name!r}: there are {known}; add yours with --hardware FILE.json")
