"""Cuts the models of the zoo by themselves and compares their training with that of the uncut model.

Letters: K sections, P stages.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repository import ROOT
from stages_by_hand import gradients, run_by_hand
from varuna.distributed.topology import stage_sections
from varuna.partition import ModelMap, PartitionError, Stage, build_stage, loss_of, trace
from zoo_further import FURTHER
from zoo_models import MODELS, Entry

__all__ = ["ARTIFACT", "ZOO", "ZooResult", "as_expected", "summary", "table", "train_cut_and_whole"]

ARTIFACT = ROOT / "test-artifacts" / "zoo.txt"
"""Where the table is left."""


ZOO: dict[str, Entry] = {**MODELS, **FURTHER}
STEPS = 5
TOLERANCE = 2e-5
"""Largest difference that is rounding: sums of fp32 in another order, after five steps."""


@dataclass(frozen=True)
class ZooResult:
    """How a model did in P stages."""

    name: str
    p: int
    sections: int = 0
    splits: int = 0
    """How many ways to make P stages were tried: of two stages all there are."""
    crossing: int = 0
    """Tensors over all stage boundaries, the most of any split."""
    tied: int = 0
    """Parameters that several sections use."""
    difference: float = float("nan")
    """The largest one, of losses, gradients and parameters, relative to the largest element."""
    status: str = "equal"

    @property
    def equal(self) -> bool:
        return self.status == "equal"


def train_cut_and_whole(name: str, stage_counts: Sequence[int]) -> list[ZooResult]:
    """Trains a model of the zoo whole and in P stages, dropout on; one row for each P. Two stages: at every cut."""
    entry = ZOO[name]
    torch.manual_seed(7)
    model = entry.build()
    batches = [entry.inputs() for _ in range(STEPS)]
    try:
        model_map = _trace(model, batches[0], max(stage_counts))
    except PartitionError as error:
        return [ZooResult(name, 0, status=f"refused: {error}")]
    K = len(model_map.sections)
    if K == 1:
        return [ZooResult(name, 1, 1, status=f"one section: {'; '.join(model_map.refused) or 'no repeated blocks'}")]
    whole = _train_whole(model, model_map, batches)
    assert entry.drops == _draws_random_numbers(model, batches[0]), f"{name}: dropout is not as the zoo says"
    return [_compare(name, model, model_map, batches, whole, p) for p in stage_counts if p <= K]


def _trace(model: nn.Module, batch: dict[str, Any], most_stages: int) -> ModelMap:
    """As the structure has it; with sections for the most stages where that gives fewer, and the model has them."""
    model_map = trace(model, batch)
    if 1 < len(model_map.sections) < most_stages:
        with contextlib.suppress(PartitionError):
            return trace(model, batch, cut_points=most_stages - 1)
    return model_map


@dataclass(frozen=True)
class _Step:
    """What plain PyTorch made of one step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    """After it."""


def _draws_random_numbers(model: nn.Module, batch: dict[str, Any]) -> bool:
    tried = copy.deepcopy(model)
    losses = set()
    for seed in range(4):  # a dropout that drops nothing is possible, if hardly four times
        torch.manual_seed(seed)
        losses.add(float(loss_of(tried(**batch)).detach()))
    return len(losses) > 1


def _train_whole(model: nn.Module, model_map: ModelMap, batches: Sequence[dict[str, Any]]) -> list[_Step]:
    whole = copy.deepcopy(model)
    for section, place in enumerate(model_map.cut_places, start=1):  # random streams are the sections'
        whole.get_submodule(place.path).register_forward_hook(
            lambda *_, section=section: torch.manual_seed(section) and None
        )
    optimizer = _optimizer(whole.parameters())
    steps = []
    for batch in batches:
        torch.manual_seed(0)
        loss = loss_of(whole(**batch))
        whole.zero_grad()
        loss.backward()
        summed = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
        optimizer.step()
        steps.append(_Step(loss.detach(), summed, {n: p.detach().clone() for n, p in whole.named_parameters()}))
    return steps


def _compare(
    name: str, model: nn.Module, model_map: ModelMap, batches: Sequence[dict[str, Any]], whole: Sequence[_Step], p: int
) -> ZooResult:
    K = len(model_map.sections)
    splits = [[range(cut), range(cut, K)] for cut in range(1, K)] if p == 2 else [stage_sections((), p, K)]
    crossing, difference = 0, 0.0
    for split in splits:
        stages = [build_stage(model, model_map, run.start, run.stop, device="cpu") for run in split]
        crossing = max(crossing, sum(len(stage.receives) for stage in stages))
        difference = max(difference, _train_cut(stages, batches, whole))
    status = "equal" if difference <= TOLERANCE else "DIFFERENT"
    return ZooResult(name, p, K, len(splits), crossing, len(model_map.shared), difference, status)


def _train_cut(stages: Sequence[Stage], batches: Sequence[dict[str, Any]], whole: Sequence[_Step]) -> float:
    """The largest difference in any step."""
    optimizers = [_optimizer(stage.parameters.values()) for stage in stages]
    difference = 0.0
    for batch, expected in zip(batches, whole, strict=True):
        loss, summed = _backward(stages, batch)
        difference = max(
            difference,
            _largest_difference({"loss": loss}, {"loss": expected.loss}),
            _largest_difference(summed, expected.gradients),
        )
        for optimizer in optimizers:
            optimizer.step()
        for stage in stages:
            held = {name: expected.parameters[name] for name in stage.parameters}
            difference = max(difference, _largest_difference(dict(stage.parameters), held))
    return difference


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Adam would blow up gradients that are nothing but rounding, as those of attention's key biases are.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _backward(stages: Sequence[Stage], batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients summed over the stages that share a parameter; they are left there, too."""
    for stage in stages:
        stage.on_section = torch.manual_seed  # type: ignore[assignment] # its result is not used
        for parameter in stage.parameters.values():
            parameter.grad = None
    loss, _ = run_by_hand(list(stages), batch)
    summed = gradients(stages)
    for stage in stages:
        for name, parameter in stage.parameters.items():
            parameter.grad = summed[name].clone() if name in summed else None
    return loss, summed


def _largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of each tensor relative to its largest element, but no less than a thousandth of the largest of all."""
    assert ours.keys() == theirs.keys()
    least = 1e-3 * max((float(tensor.detach().abs().max()) for tensor in theirs.values()), default=0.0)
    return max(
        (
            float((ours[name].detach() - tensor).abs().max()) / max(least, float(tensor.abs().max()))
            for name, tensor in theirs.items()
        ),
        default=0.0,
    )


def as_expected(entry: Entry, rows: Sequence[ZooResult]) -> bool:
    """Equal, or refused for the reason that the zoo gives."""
    if entry.refused:
        return all(entry.refused in row.status for row in rows)
    return all(row.equal for row in rows)


def table(rows: Sequence[ZooResult]) -> str:
    lines = [f"{'model':26}{'P':>2}{'sections':>10}{'splits':>8}{'crossing':>10}{'tied':>6}{'difference':>12}  status"]
    lines += [
        f"{row.name:26}{row.p:2}{row.sections:10}{row.splits:8}{row.crossing:10}{row.tied:6}{row.difference:12.1e}"
        f"  {row.status}"
        for row in rows
    ]
    return "\n".join(lines)


def summary(rows: Sequence[ZooResult]) -> str:
    """One row for each model, in Markdown, as docs/models.md has it."""
    lines = [
        "| model | sections | splits | crossing | tied | difference | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        splits, crossing = sum(row.splits for row in own), max(row.crossing for row in own)
        difference = max(row.difference for row in own)
        flaw = next((row.status for row in own if not row.equal), None)
        if flaw is None:
            figures = (
                f"{splits} | {crossing} | {own[0].tied} | {format(difference, '.0e') if difference else 0} | equal"
            )
        else:
            figures = f"| | | | {flaw}"
        lines.append(f"| {name} | {own[0].sections or ''} | {figures} |")
    return "\n".join(lines)
