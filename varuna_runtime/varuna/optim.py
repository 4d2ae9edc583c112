"""What happens to the gradients between the last backward and the optimizer: sums, weights, norm, clipping.

Letters: P stages, D replicas, B examples in the global batch, n examples in a micro-batch.

Each micro-batch's backward is weighted with n/B, so the sum over the D replicas' gradients is the gradient of the mean
loss over the global batch, however unevenly the replicas share it. A parameter that several stages use is *tied*: its
gradient is summed over all stages and replicas that hold it, in one collective, so that its copies stay equal to the
last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna.launch import Group

__all__ = ["GradientReducer", "TiedGroup", "clip_factor", "copy_from_first", "scale_gradients"]

BUCKET_BYTES = 25 * 1024 * 1024
"""Gradients travel in flat buffers of about this size: enough to fill a link, not so much as to double memory."""


@dataclass(frozen=True)
class TiedGroup:
    """Parameters that the same stages hold, and the collective among those stages' ranks."""

    group: Group
    names: tuple[str, ...]


class GradientReducer:
    """Sums this rank's gradients with those of the other ranks that hold the same parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: Group,
        tied: Sequence[TiedGroup],
        *,
        counted: Iterable[str],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`counted`: the parameters whose gradient this rank adds to the global norm (over all ranks, each once)."""
        self._parameters = parameters
        self._replicas = replicas
        self._counted = tuple(counted)
        among_tied = {name for group in tied for name in group.names}
        alone = [parameter for name, parameter in parameters.items() if name not in among_tied]
        self._buckets = buckets(alone, bucket_bytes)
        self._tied_buckets = [
            (group.group, buckets([parameters[name] for name in group.names], bucket_bytes)) for group in tied
        ]

    def reduce(self) -> None:
        """Replaces every `.grad` by its sum. A gradient that no rank has stays None, as it would in one process."""
        for group, members in ((self._replicas, self._buckets), *self._tied_buckets):
            if len(group.ranks) > 1:
                for bucket in members:
                    _sum_gradients(bucket, group)

    def squared_norm(self) -> float:
        """This rank's share of the squared L2 norm of the whole model's gradient."""
        gradients = [g for name in self._counted if (g := self._parameters[name].grad) is not None]
        if not gradients:
            return 0.0
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
        return float(norms.square().sum())


def buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The trainable parameters in runs of one dtype and of about `bucket_bytes`; the same on every replica."""
    runs: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        size = parameter.numel() * parameter.element_size()
        if not runs or runs[-1][0].dtype != parameter.dtype or filled + size > bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(parameter)
        filled += size
    return runs


def _sum_gradients(bucket: Sequence[nn.Parameter], group: Group) -> None:
    first = bucket[0]
    # Behind the gradients: who has one at all. A parameter without a gradient must stay without, not get zeros,
    # for the optimizer leaves the one alone and decays the other.
    flags = torch.tensor([float(p.grad is not None) for p in bucket], dtype=first.dtype, device=first.device)
    parts = [
        torch.zeros(p.numel(), dtype=p.dtype, device=p.device) if p.grad is None else p.grad.flatten() for p in bucket
    ]
    flat = torch.cat([*parts, flags])
    group.all_reduce([flat])
    present = flat[-len(bucket) :].tolist()
    offset = 0
    for parameter, has_gradient in zip(bucket, present, strict=True):
        summed = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
        if not has_gradient:
            continue
        if parameter.grad is None:
            parameter.grad = summed.clone()
        else:
            parameter.grad.copy_(summed)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of global norm `norm` are multiplied with, as `torch.nn.utils.clip_grad_norm_` does it."""
    if max_norm is None:
        return 1.0
    if not max_norm > 0:
        raise ValueError(f"clip_grad_max_norm={max_norm}: it must be positive, or None for no clipping")
    return math.nan if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def copy_from_first(tensors: Sequence[Tensor], group: Group) -> None:
    """Makes the tensors those of the group's first rank, in place."""
    with torch.no_grad():
        group.broadcast([t.detach() for t in tensors])
