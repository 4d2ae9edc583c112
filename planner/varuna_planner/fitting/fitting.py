"""Fits a hardware entry's free scales to measured mini-batch times: a few factors, the same for all models and shapes.

Each scale multiplies some numbers of the GPU's or the network's entry. The result is the most probable set of factors:
log-normal priors around the table's numbers keep few observations from being explained by many factors, and the
influence of large residuals is bounded (Huber 1964), so that one odd run does not decide. The predictions are the
simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_planner.fitting.observations import RateObservation
from varuna_planner.hardware.table import GpuSpec, Hardware, NetworkSpec
from varuna_planner.profile.document import Links, Profile
from varuna_planner.profile.synthesis import all_reduces, link_of, synthesise
from varuna_planner.simulator.prediction import predict_s

__all__ = ["SCALES", "Fit", "FittedObservation", "FittedScale", "SpeedScale", "fit", "predict_observation_s"]

Floats = npt.NDArray[np.float64]

MODEL_ERROR = 0.03
"""Relative standard deviation of a measured time around the prediction of the right factors: the paper's simulator,
with measured profiles, is off by 2.6 % on average (its table 7)."""

HUBER = 1.5
"""Standard deviations beyond which a residual's influence no longer grows."""

ODD_DEVIATIONS = 6
"""Standard deviations beyond which a row does not match the others (18 %)."""

UNLIKELY_PRIORS = 3
"""Standard deviations of its prior beyond which a factor is implausible."""

_STEP = 0.05
_MOST_STEPS = 30
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class SpeedScale:
    """One free factor."""

    name: str
    of_gpu: bool
    """Whether it scales the GPU's entry, else the network's."""
    fields: tuple[str, ...]
    """The numbers of the entry that it multiplies."""
    prior: float
    """Standard deviation of its logarithm: how well the table's number is known beforehand."""


SCALES = (
    SpeedScale("compute_efficiency", True, ("compute_efficiency", "head_efficiency"), 0.3),
    SpeedScale("micro_batch_overhead", True, ("micro_batch_overhead_us",), 1.0),
    SpeedScale("section_overhead", True, ("section_overhead_us",), 1.0),
    SpeedScale("latency", False, ("latency_us", "all_reduce_hop_us"), 1.0),
    SpeedScale("bandwidth", False, ("bandwidth_efficiency", "all_reduce_efficiency"), 0.5),
    SpeedScale("jitter", False, ("jitter_us",), 1.0),
)


@dataclass(frozen=True, kw_only=True)
class FittedScale:
    """A factor, with its uncertainty."""

    name: str
    factor: float
    interval: tuple[float, float]
    """The 95 % interval, given the prior."""
    learned: float
    """The share by which the observations narrowed the prior's standard deviation: 0 is not at all."""
    fields: Mapping[str, float]
    """The entry's numbers, multiplied by the factor."""

    @property
    def verdict(self) -> str:
        if self.learned >= 0.5:
            return "identified"
        if self.learned >= 0.1:
            return "weakly identified"
        if abs(self.factor - 1) < 0.01:
            return "next to nothing: the table's number stays"
        return "next to nothing: a guess that suits the rows"


@dataclass(frozen=True, kw_only=True)
class FittedObservation:
    """A row with its relative errors: 0.02 is a prediction 2 % too long."""

    name: str
    measured_s: float
    predicted_s: float
    left_out_s: float | None
    """The prediction of a fit without this row; None when it is the only row."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out_s is None else self.left_out_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fitted table, with its errors and warnings."""

    hardware: Hardware
    """The table with the two entries corrected."""
    gpu: str
    network: str
    scales: tuple[FittedScale, ...]
    observations: tuple[FittedObservation, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(abs(row.error) for row in self.observations)

    @property
    def left_out_errors(self) -> tuple[float, ...]:
        return tuple(abs(row.left_out_error) for row in self.observations if row.left_out_error is not None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Signs that the rows and the table describe different machines, one line each."""
        rows = tuple(
            f"{row.name}: measured {row.measured_s:.4g} s, fitted {row.predicted_s:.4g} s: it hardly counts in the "
            "fit; check its shape, its seconds and what else ran there"
            for row in self.observations
            if abs(np.log(row.predicted_s / row.measured_s)) > ODD_DEVIATIONS * MODEL_ERROR
        )
        fields = [field for scale in self.scales for field in scale.fields.items()]
        capped = [name for name, value in fields if name.endswith("_efficiency") and value >= 1.0]
        found = list(rows)
        if capped:
            found.append(f"{', '.join(capped)} would be above 1: rows are faster than the table's peaks; check either")
        for scale, known in zip(self.scales, SCALES, strict=True):
            if abs(np.log(scale.factor)) > UNLIKELY_PRIORS * known.prior:
                found.append(f"{scale.name} at {scale.factor:.3g} times the table's is no such machine: check the rows")
        return tuple(found)

    @property
    def confidence(self) -> str:
        """In words: the expected accuracy of a prediction for a shape that was not observed."""
        left_out = self.left_out_errors
        if not left_out:
            return (
                "one observation: it moves the factors towards itself, and nothing shows how well they predict others"
            )
        mean, worst = sum(left_out) / len(left_out), max(left_out)
        unknown = [scale.name for scale in self.scales if scale.learned < 0.1]
        text = (
            f"a row that the fit has not seen is predicted within {mean:.1%} on average, {worst:.1%} at worst "
            f"({len(left_out)} rows)"
        )
        if unknown:
            text += f"; nothing was learned of {', '.join(unknown)}"
        return text


def fit(observations: Sequence[RateObservation], hardware: Hardware, *, gpu: str, network: str) -> Fit:
    """Fits the entries `gpu` and `network` to all observations jointly.

    Raises ValueError when there are no observations, no such entries, or a row describes a run that is impossible.
    """
    if not observations:
        raise ValueError("there are no observations to fit to: give at least one")
    problem = _FitProblem(tuple(observations), hardware.find_gpu(gpu), hardware.find_network(network), hardware)
    best = _find_most_probable(problem, np.zeros(len(SCALES)))
    residuals = problem.compute_residuals(best)
    deviations = _compute_deviations(problem, best, residuals)
    fitted_gpu, fitted_network = problem.make_entries(best)
    rows = []
    for index, observation in enumerate(observations):
        left_out_s = None
        if len(observations) > 1:
            others = problem.leave_out(index)
            factors = _find_most_probable(others, best)
            left_out_s = predict_observation_s(observation, *problem.make_entries(factors), hardware)
        rows.append(
            FittedObservation(
                name=observation.label,
                measured_s=observation.minibatch_s,
                predicted_s=observation.minibatch_s * float(np.exp(residuals[index])),
                left_out_s=left_out_s,
            )
        )
    scales = []
    for scale, value, deviation in zip(SCALES, best, deviations, strict=True):
        entry: GpuSpec | NetworkSpec = fitted_gpu if scale.of_gpu else fitted_network
        low, high = np.exp(value - 1.96 * deviation), np.exp(value + 1.96 * deviation)
        scales.append(
            FittedScale(
                name=scale.name,
                factor=float(np.exp(value)),
                interval=(float(low), float(high)),
                learned=max(0.0, 1.0 - float(deviation) / scale.prior),
                fields={field: getattr(entry, field) for field in scale.fields},
            )
        )
    return Fit(
        hardware=hardware.with_entries(Hardware(gpus=(fitted_gpu,), networks=(fitted_network,))),
        gpu=gpu,
        network=network,
        scales=tuple(scales),
        observations=tuple(rows),
    )


def predict_observation_s(
    observation: RateObservation, gpu: GpuSpec, network: NetworkSpec, hardware: Hardware
) -> float:
    """The simulator's time for a row with these entries; `hardware` has the link inside VMs.

    A row with a measured profile keeps its sections' times; its network and overhead are the entries'.
    """
    table = hardware.with_entries(Hardware(gpus=(gpu,), networks=(network,)))
    if observation.measured is not None:
        profile = observation.measured.model_copy(
            update={
                "links": Links(same_vm=link_of(table.find_network(gpu.inside_vm)), other_vm=link_of(network)),
                "all_reduce": tuple(all_reduces(network, observation.gpus_per_vm)),
                "stage_overhead_us": gpu.micro_batch_overhead_us,
            }
        )
    else:
        profile = _synthesised(observation, table, gpu.name, network.name)
    return predict_s(profile, observation.make_shape(len(profile.sections)))


def _synthesised(observation: RateObservation, table: Hardware, gpu: str, network: str) -> Profile:
    sizes = {observation.micro_batch, observation.global_batch % observation.micro_batch or observation.micro_batch}
    return synthesise(
        observation.model_shape(),
        table,
        gpu,
        network,
        gpus_per_vm=observation.gpus_per_vm,
        micro_batches=sorted(sizes),
        offload_optimizer=observation.offload_optimizer,
    )


@dataclass(frozen=True)
class _FitProblem:
    observations: tuple[RateObservation, ...]
    gpu: GpuSpec
    network: NetworkSpec
    hardware: Hardware

    def leave_out(self, index: int) -> _FitProblem:
        kept = (*self.observations[:index], *self.observations[index + 1 :])
        return _FitProblem(kept, self.gpu, self.network, self.hardware)

    def make_entries(self, factors: Floats) -> tuple[GpuSpec, NetworkSpec]:
        """The entries with the factors, given as logarithms."""
        updates: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        for scale, value in zip(SCALES, factors, strict=True):
            entry: GpuSpec | NetworkSpec = self.gpu if scale.of_gpu else self.network
            for field in scale.fields:
                scaled = getattr(entry, field) * float(np.exp(value))
                # No device is faster than its data sheet.
                updates[scale.of_gpu][field] = min(scaled, 1.0) if field.endswith("_efficiency") else scaled
        return self.gpu.model_copy(update=updates[True]), self.network.model_copy(update=updates[False])

    def compute_residuals(self, factors: Floats) -> Floats:
        """The logarithm of predicted over measured, one per observation."""
        gpu, network = self.make_entries(factors)
        return np.array(
            [
                np.log(predict_observation_s(observation, gpu, network, self.hardware) / observation.minibatch_s)
                for observation in self.observations
            ]
        )


_PRIORS = np.array([scale.prior for scale in SCALES])


def _compute_loss(residuals: Floats, factors: Floats) -> float:
    """The negative logarithm of the posterior."""
    size = np.abs(residuals) / MODEL_ERROR
    huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
    return float(huber.sum() + ((factors / _PRIORS) ** 2).sum() / 2)


def _compute_curvature(residuals: Floats, jacobian: Floats, error: float = MODEL_ERROR) -> tuple[Floats, Floats]:
    """(Gauss-Newton approximation of the loss's second derivatives, weights of the residuals)."""
    weights = np.minimum(1.0, HUBER * error / np.maximum(np.abs(residuals), 1e-12)) / error**2
    return jacobian.T @ (jacobian * weights[:, None]) + np.diag(_PRIORS**-2.0), weights


def _find_most_probable(problem: _FitProblem, start: Floats) -> Floats:
    """The factors with the least loss, by damped Gauss-Newton steps (Levenberg, Marquardt) with reweighting."""
    factors, damping = start, 1e-2
    residuals = problem.compute_residuals(factors)
    for _ in range(_MOST_STEPS):
        jacobian = _compute_jacobian(problem.compute_residuals, factors, residuals)
        curvature, weights = _compute_curvature(residuals, jacobian)
        slope = jacobian.T @ (weights * residuals) + factors / _PRIORS**2
        before = _compute_loss(residuals, factors)
        while damping < 1e4:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
            tried = factors + np.clip(step, -1.0, 1.0)
            found = problem.compute_residuals(tried)
            if _compute_loss(found, tried) < before:
                break
            damping *= 8
        else:
            break
        factors, residuals, damping = tried, found, max(damping / 4, 1e-4)
        if before - _compute_loss(residuals, factors) < _TOLERANCE:
            break
    return factors


def _compute_jacobian(function: Callable[[Floats], Floats], at: Floats, value: Floats) -> Floats:
    """[residuals, factors], by central differences: a makespan has corners."""
    steps = _STEP * np.eye(len(at))
    columns = [(function(at + step) - function(at - step)) / (2 * _STEP) for step in steps]
    return np.stack(columns, axis=1) if len(value) else np.zeros((0, len(at)))


def _compute_deviations(problem: _FitProblem, factors: Floats, residuals: Floats) -> Floats:
    """Standard deviations of the logarithms of the factors; wider where the residuals are larger than assumed."""
    error = max(MODEL_ERROR, float(np.sqrt(np.mean(residuals**2))))
    curvature, _ = _compute_curvature(
        residuals, _compute_jacobian(problem.compute_residuals, factors, residuals), error
    )
    deviations: Floats = np.minimum(np.sqrt(np.diag(np.linalg.inv(curvature))), _PRIORS)
    return deviations
