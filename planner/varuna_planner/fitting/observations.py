"""Measured mini-batch times, to fit hardware to: what ran, how, and how long it took. One JSON list."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from varuna_planner.documents import what_is_wrong
from varuna_planner.profile.document import Profile
from varuna_planner.profile.shapes import ModelFamily, ModelShape, NumberFormat
from varuna_planner.schedule.policies import Policy
from varuna_planner.simulator.prediction import PipelineShape, even_starts
from varuna_proto.wording import count_of

__all__ = ["RateObservation", "parse_observations"]

Count = Annotated[int, Field(ge=1)]


class RateObservation(BaseModel):
    """One row. The model is given by its shape, or by `profile`, the name of a measured profile."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str = ""
    """For people; derived from the other fields by default."""
    model: ModelFamily | None = None
    layers: Count | None = None
    hidden: Count | None = None
    seq: Count | None = None
    heads: Count | None = None
    vocab: Count | None = None
    precision: NumberFormat = NumberFormat.FP16
    boundaries: NumberFormat | None = None
    """As of `ModelShape`."""
    fused_attention: bool = True
    offload_optimizer: bool = False
    """Whether the optimizer and its state were on the host."""
    profile: str | None = None
    """File of a measured profile, instead of the model's shape."""
    measured: Profile | None = Field(default=None, exclude=True)
    """That profile; filled in by `parse_observations`."""
    p: Count
    d: Count
    micro_batch: Count
    global_batch: Count
    minibatch_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    policy: Policy = Policy.WORK_CONSERVING
    gpus_per_vm: Count = 1
    stage_starts: tuple[int, ...] | None = None
    """First section of each stage; left out: stages of equally many layers."""
    recompute: bool = True
    """Whether every stage but the last recomputes; false: none does."""
    run_ahead: Annotated[int, Field(ge=0)] | None = None
    source: str = ""
    """The source of the number."""

    @model_validator(mode="after")
    def _model_or_profile(self) -> RateObservation:
        given = [getattr(self, name) is not None for name in ("model", "layers", "hidden", "seq")]
        if self.profile is None and not all(given):
            raise ValueError('give "model", "layers", "hidden" and "seq", or a measured "profile"')
        if self.profile is not None and any(given):
            raise ValueError(f'"profile" {self.profile} stands in the place of the model: leave out its shape')
        if self.p * self.d > self.global_batch:
            raise ValueError(f"{self.p}×{self.d} GPUs and only {count_of(self.global_batch, 'example')}")
        return self

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        model = self.profile or f"{self.model} {self.layers}×{self.hidden}"
        return f"{model} {self.p}×{self.d} m={self.micro_batch}"

    def model_shape(self) -> ModelShape:
        """Raises ValueError when the row names a profile."""
        if self.model is None or self.layers is None or self.hidden is None or self.seq is None:
            raise ValueError(f"{self.label} has a measured profile, not a model's shape")
        return ModelShape(
            family=self.model,
            layers=self.layers,
            hidden=self.hidden,
            seq=self.seq,
            heads=self.heads or 0,
            vocab=self.vocab or 0,
            precision=self.precision,
            boundaries=self.boundaries,
            fused_attention=self.fused_attention,
        )

    def make_shape(self, sections: int) -> PipelineShape:
        """The plan that ran. Raises ValueError when it is impossible with this number of sections."""
        try:
            return PipelineShape(
                p=self.p,
                d=self.d,
                micro_batch=self.micro_batch,
                global_batch=self.global_batch,
                stage_starts=self.stage_starts or even_starts(sections, self.p, ends_ride=self.profile is None),
                recompute=tuple(self.recompute and stage < self.p - 1 for stage in range(self.p)),
                policy=self.policy,
                run_ahead=self.run_ahead,
                gpus_per_vm=self.gpus_per_vm,
            )
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None


def parse_observations(text: str, read: Callable[[str], str]) -> tuple[RateObservation, ...]:
    """The rows of a JSON list. `read` returns the text of a profile that a row names.

    Raises ValueError naming the row, the field and what is wrong with it.
    """
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"observations: no JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError("observations: expected a JSON list of at least one row")
    return tuple(_parse_row(number, row, read) for number, row in enumerate(rows))


def _parse_row(number: int, row: Any, read: Callable[[str], str]) -> RateObservation:
    try:
        observation = RateObservation.model_validate(row)
    except ValidationError as error:
        raise ValueError(f"observations: row {number}: {what_is_wrong(error)}") from None
    if observation.profile is None:
        return observation
    try:
        measured = Profile.from_json(read(observation.profile))
    except ValueError as error:
        raise ValueError(f"observations: row {number}: {observation.profile}: {error}") from None
    return observation.model_copy(update={"measured": measured})
