"""What calibration measured for a model on this hardware: all that the planner knows of either. One JSON document.

Names end in their units: `_us` is microseconds, `_bytes` bytes. A section is measured at several micro-batch sizes.
Only sizes at which every section was measured are candidates for a plan; other sizes (a smaller last micro-batch, a
pinned size) are interpolated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from varuna_planner.documents import parse_document

__all__ = [
    "MOST_US",
    "AllReduceMeasurement",
    "GpuTypeSpeeds",
    "Link",
    "Links",
    "Measurement",
    "Profile",
    "SectionProfile",
    "SharedParameter",
    "interpolate",
]

SCHEMA: Literal["varuna.profile/1"] = "varuna.profile/1"

# Far above any measurement, and no sum or quotient of them is infinite: profiles come from jobs, unchecked.
MOST_US = 1e12
_MOST_BYTES = 2**60
_MOST_COUNT = 2**31 - 1
_MOST_CONNECTIONS = 64

Microseconds = Annotated[float, Field(ge=0, le=MOST_US, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=_MOST_BYTES)]
Speed = Annotated[float, Field(gt=1e-6, lt=1e6, allow_inf_nan=False)]


class _ProfileRecord(BaseModel):
    # The text under a field is its description in the schema.
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, use_attribute_docstrings=True)


class Measurement(_ProfileRecord):
    """One section at one micro-batch size; all is per micro-batch."""

    micro_batch: Annotated[int, Field(ge=1, le=_MOST_COUNT)]
    """Examples."""
    forward_us: Microseconds
    """Keeping what the backward needs."""
    backward_us: Microseconds
    """Without recompute."""
    recompute_us: Microseconds
    """The forward once more, before a backward whose activations were not kept."""
    output_bytes: Bytes
    """All that crosses a cut after this section, relayed tensors too."""
    input_bytes: Bytes
    """What a stage that starts with this section must stash."""
    activation_bytes: Bytes
    """What a forward adds to memory until its backward when the section does not recompute: what autograd saves, and
    what the section sends, but nothing of `input_bytes`."""
    working_bytes: Bytes = 0
    """What its passes take beyond all this and the state, for a while. 0: not measured, as on CPUs."""


class SectionProfile(_ProfileRecord):
    """The code between two neighbouring cut-points."""

    index: Annotated[int, Field(ge=0)]
    """From 0, in the order of the forward."""
    name: str
    """That of the model's cut."""
    parameter_bytes: Bytes
    """With the copies that autocast keeps during a step. A tied parameter counts in each section that uses it."""
    cast_bytes: Bytes = 0
    """Of these copies: they are of no use after the step, so that they are neither saved nor moved."""
    optimizer_bytes: Bytes
    """What the optimizer keeps of it on the device."""
    optimizer_us: Microseconds = 0.0
    """The optimizer's step over its parameters."""
    update_bytes: Bytes = 0
    """What that step takes on the device for a while, beside what the optimizer keeps."""
    gradient_bytes: Bytes
    """What an all-reduce has to sum."""
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]
    """Sorted by micro-batch."""

    @property
    def value_bytes(self) -> int:
        """Of the parameters' values."""
        return self.parameter_bytes - self.cast_bytes

    @property
    def state_bytes(self) -> int:
        """What a checkpoint has of it."""
        return self.value_bytes + self.optimizer_bytes

    @model_validator(mode="after")
    def _sizes_ascend(self) -> SectionProfile:
        sizes = [measurement.micro_batch for measurement in self.measurements]
        if sizes != sorted(set(sizes)):
            raise ValueError(
                f"section {self.index} ({self.name}): measurements must ascend by micro_batch, got {sizes}"
            )
        if self.cast_bytes > self.parameter_bytes:
            raise ValueError(
                f"section {self.index} ({self.name}): of {self.parameter_bytes} bytes of parameters, {self.cast_bytes} "
                "cannot be copies"
            )
        return self


class SharedParameter(_ProfileRecord):
    """A parameter that several sections use (tied weights): its gradients are summed over their stages."""

    name: str
    """The first of its names in the model."""
    sections: Annotated[tuple[int, ...], Field(min_length=2)]
    """Indices of the sections that use it."""
    bytes: Bytes
    """Of its gradient too."""


class GpuTypeSpeeds(_ProfileRecord):
    """How GPUs of another type than the profile's compute the same sections."""

    gpu_type: Annotated[str, Field(min_length=1)]
    """Its name, as the agents of its VMs report it."""
    section_speeds: Annotated[tuple[Speed, ...], Field(min_length=1)]
    """For each section: the profile's times over the times of this type; above 1 it is faster."""


class Link(_ProfileRecord):
    """Between two workers, one way."""

    latency_us: Microseconds
    """Of a message without content, on a link at rest."""
    bandwidth_bytes_per_s: Annotated[float, Field(ge=1e-3, le=_MOST_BYTES, allow_inf_nan=False)]
    """Of a large message, on top of the latency."""
    jitter_us: Microseconds = 0.0
    """Mean of what comes on top of latency_us."""
    connections: Annotated[int, Field(ge=1, le=_MOST_CONNECTIONS)] = 1
    """TCP connections over which a large message goes side by side at this bandwidth; more are hardly faster."""


class Links(_ProfileRecord):
    """Link classes. The defaults, for when a lone GPU could measure none, are an ordinary 10 Gb/s network."""

    same_vm: Link = Link(latency_us=50, bandwidth_bytes_per_s=2.5e9)
    """Between workers on one VM."""
    other_vm: Link = Link(latency_us=200, bandwidth_bytes_per_s=1.25e9)
    """Between workers on different VMs."""
    other_zone: Link | None = None
    """Between workers on VMs in different zones; None: as between other VMs."""


class AllReduceMeasurement(_ProfileRecord):
    """One all-reduce over a ring of workers, while others like it run over the same VMs' network."""

    ranks: Annotated[int, Field(ge=2, le=_MOST_COUNT)]
    """Workers in the ring."""
    bytes: Annotated[int, Field(ge=1, le=_MOST_BYTES)]
    """What each of them brings."""
    us: Annotated[float, Field(gt=0, le=MOST_US, allow_inf_nan=False)]
    """From its start to its end, in microseconds."""
    rings: Annotated[int, Field(ge=1, le=_MOST_COUNT)] = 1
    """Rings at once, this one among them: those of the stages whose workers share their VMs' network."""


class Profile(_ProfileRecord):
    """The document. Raises pydantic.ValidationError (a ValueError) at construction; `from_json` raises clearer text."""

    schema_: Literal["varuna.profile/1"] = Field(default=SCHEMA, alias="schema")
    """Which kind of document this is."""
    environment: dict[str, str] = {}
    """What it was measured on, and when: versions, device names, hosts."""
    gpu_type: str = ""
    """The type of GPU whose times it has, as the agents of its VMs report it; empty: not known."""
    sections: Annotated[tuple[SectionProfile, ...], Field(min_length=1)]
    """In the order of the forward."""
    other_gpu_types: tuple[GpuTypeSpeeds, ...] = ()
    """The types of GPU that have computed the same sections besides."""
    shared_parameters: tuple[SharedParameter, ...] = ()
    """Tied weights."""
    stage_overhead_us: Microseconds = 0.0
    """Of each forward, recompute and backward of a stage, on top of its sections' times: the engine's own."""
    micro_batch_kept_for: str = ""
    """Why a job has to keep the size of the micro-batches that it begins with: random numbers that would be others with
    another size. Empty: it need not."""
    links: Links = Links()
    """What carries activations one way and their gradients the other."""
    all_reduce: tuple[AllReduceMeasurement, ...] = ()
    """Empty: estimated from the links."""

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        indices = [section.index for section in self.sections]
        if indices != list(range(len(indices))):
            place = next(place for place, index in enumerate(indices) if index != place)
            raise ValueError(f"sections must be numbered from 0 in order: number {place} is called {indices[place]}")
        if not self.micro_batches:
            raise ValueError("no micro-batch size was measured for every section: calibrate all at the same sizes")
        types = [self.gpu_type, *(other.gpu_type for other in self.other_gpu_types)]
        if len(set(types)) != len(types):
            raise ValueError(f"a type of GPU is there twice: {', '.join(types)}")
        for other in self.other_gpu_types:
            if len(other.section_speeds) != len(indices):
                raise ValueError(
                    f"GPU type {other.gpu_type} has the speeds of {len(other.section_speeds)} sections, and the model "
                    f"has {len(indices)}"
                )
        for shared in self.shared_parameters:
            if not all(0 <= section < len(indices) for section in shared.sections):
                raise ValueError(f"shared parameter {shared.name}: no such sections {shared.sections}")
        return self

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """The sizes at which every section was measured, ascending."""
        sizes = [{measurement.micro_batch for measurement in section.measurements} for section in self.sections]
        return tuple(sorted(set.intersection(*sizes)))

    @property
    def is_of_accelerator(self) -> bool:
        """Whether it was measured on one, and not on a CPU."""
        return not self.environment.get("device", "cpu").startswith("cpu")

    @property
    def known_gpu_types(self) -> frozenset[str]:
        """The types of GPU whose times it has; an empty name where its own is not known."""
        return frozenset((self.gpu_type, *(other.gpu_type for other in self.other_gpu_types)))

    def measurements_at(self, micro_batch: int) -> tuple[Measurement, ...]:
        """Each section at a micro-batch size: as measured, else interpolated."""
        return tuple(interpolate(section.measurements, micro_batch) for section in self.sections)

    def describe_misfit(self, names: Sequence[str]) -> str | None:
        """Why this is no profile of a model with sections of these names; None: it may be one."""
        own = [section.name for section in self.sections]
        for index, (mine, theirs) in enumerate(zip(own, names, strict=False)):
            if mine != theirs:
                return f"section {index} is {mine!r} in this profile and {theirs!r} in the model"
        if len(own) != len(names):
            return f"this profile has {len(own)} sections and the model has {len(names)}"
        return None

    def to_json(self) -> str:
        """The document, indented for people; `from_json` reads it back."""
        return self.model_dump_json(by_alias=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads a document. Raises ValueError naming the field, its value and what is wrong with it."""
        return parse_document(cls, text, "profile")


def interpolate(measurements: Sequence[Measurement], micro_batch: int) -> Measurement:
    """A section at any micro-batch size, from measurements that ascend by size.

    Between two sizes on the line through them, beyond the largest on the line of the last two (never shrinking), below
    the smallest no faster than in proportion and no slower than the smallest itself.
    """
    for measurement in measurements:
        if measurement.micro_batch == micro_batch:
            return measurement
    values: dict[str, Any] = {"micro_batch": micro_batch}
    for name in Measurement.model_fields.keys() - values:
        value = _value_at([(m.micro_batch, float(getattr(m, name))) for m in measurements], micro_batch)
        values[name] = math.ceil(value) if name.endswith("_bytes") else value
    return Measurement(**values)


def _value_at(points: Sequence[tuple[int, float]], x: int) -> float:
    (first_x, first), (last_x, last) = points[0], points[-1]
    if len(points) == 1:
        return first * x / first_x
    if x < first_x:
        (next_x, following) = points[1]
        line = first + (following - first) * (x - first_x) / (next_x - first_x)
        return min(max(line, first * x / first_x), first)
    if x > last_x:
        (previous_x, previous) = points[-2]
        return max(last, last + (last - previous) * (x - last_x) / (last_x - previous_x))
    for (left_x, left), (right_x, right) in itertools.pairwise(points):
        if left_x <= x <= right_x:
            return left + (right - left) * (x - left_x) / (right_x - left_x)
    raise AssertionError(f"{x} lies between {first_x} and {last_x}")
