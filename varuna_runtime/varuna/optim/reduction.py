"""The gradients between the last backward and the optimizer: sums, weights, norm, clipping.

Letters: P stages, D replicas, B examples in the global batch, n examples in a micro-batch.

Each micro-batch's backward is weighted with n/B, so the sum over the D replicas' gradients is the gradient of the mean
loss over the global batch, also when the replicas' shares differ. A parameter that several stages use is *tied*: its
gradient is summed over all stages and replicas that hold it, in one collective, so that its copies stay bit-identical.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from varuna.diagnostics.timeline import ALL_REDUCE, Timeline
from varuna.distributed.groups import RankGroup

__all__ = [
    "GradientReducer",
    "TiedGroup",
    "broadcast_from_first",
    "clip_factor",
    "global_gradient_norm",
    "is_stepping",
    "scale_gradients",
    "stepping",
]

BUCKET_BYTES = 25 * 1024 * 1024
"""The size of the flat buffers that gradients are sent in: it fills a link. When links are slower than the backward,
all of them may be on their way at once, so a stage needs up to the bytes of its gradients for them."""


@dataclass(frozen=True)
class TiedGroup:
    """Parameters that the same stages hold, and the collective among those stages' ranks."""

    group: RankGroup
    names: tuple[str, ...]


class GradientReducer:
    """Sums this rank's gradients with those of the other ranks that hold the same parameters.

    With `mark_last_backward` before the last backward of a step, the sums overlap that backward: each bucket is sent as
    soon as its gradients are final. Collectives must begin in the same order on all replicas, so buckets go in one
    fixed order: last parameters first, because a backward finishes those first. `reduce_gradients` sends the rest and
    waits. Parameters that several stages hold come last, beside the others' sums.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: RankGroup,
        tied: Sequence[TiedGroup],
        *,
        counted: Iterable[str],
        bucket_bytes: int = BUCKET_BYTES,
        timeline: Timeline | None = None,
        may_overlap: Callable[[], bool] = lambda: True,
    ) -> None:
        """`counted`: the parameters whose gradient this rank adds to the global norm; each counts on one rank.

        `may_overlap`: false when this rank is about to leave the others, so that no sum begins in a backward.
        """
        self._parameters = parameters
        self._replicas = replicas
        self._tied = tuple(tied)
        self._counted = tuple(counted)
        self._bucket_bytes = bucket_bytes
        self._timeline = timeline or Timeline()
        self._may_overlap = may_overlap
        self._hooks: list[RemovableHandle] = []
        self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Puts the trained parameters into buckets. Called by all ranks between passes."""
        self.remove_hooks()
        among_tied = {name for group in self._tied for name in group.names}
        alone = [parameter for name, parameter in self._parameters.items() if name not in among_tied]
        self._buckets = [
            _Bucket(members, self._replicas) for members in reversed(make_buckets(alone, self._bucket_bytes))
        ]
        self._tied_buckets = [
            _Bucket(members, group.group)
            for group in self._tied
            for members in make_buckets([self._parameters[name] for name in group.names], self._bucket_bytes)
        ]
        self._started = False
        self._launched = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._final, bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.members
            if len(self._replicas.ranks) > 1
        ]

    def remove_hooks(self) -> None:
        """Ends the work of this object: another one sums the gradients from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def mark_last_backward(self) -> None:
        """Before the last backward of a step: every gradient that it adds to is final."""
        self._started = True

    def _final(self, bucket: _Bucket, parameter: Tensor) -> None:
        if not self._started:
            return
        bucket.final.add(id(parameter))
        if bucket.wait is not None:
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} got a second gradient in one backward, after its first "
                "one was sent to the other replicas: use torch.utils.checkpoint with use_reentrant=False"
            )
        while self._launched < len(self._buckets) and self._buckets[self._launched].is_final and self._may_overlap():
            try:
                self._launch_next()
            except (RuntimeError, SystemExit):
                if self._may_overlap():
                    raise
                # This rank is leaving, which it learns at the next wait. An exception out of a hook would leave a part
                # of the graph in autograd's queue, and with it parameters that the process is to be rid of.
                return

    def _require_dense(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                name = next(name for name, one in self._parameters.items() if one is parameter)
                layout = str(parameter.grad.layout).removeprefix("torch.")
                raise RuntimeError(
                    f"the gradient of {name} is {layout}, but only dense gradients "
                    "can be summed, clipped and scaled: leave sparse=True out of the call that uses it"
                )

    def _launch_next(self) -> None:
        self._require_dense(self._buckets[self._launched].members)
        self._buckets[self._launched].start_sum()
        self._launched += 1

    def reduce_gradients(self, before_copy: Callable[[], None] = lambda: None) -> None:
        """Replaces every `.grad` by its sum. A gradient that no rank has stays None, as in one process.

        `before_copy`: called before a sum replaces gradients; until the first call all are this rank's own.
        """
        self._started = False
        self._require_dense(self._parameters.values())
        with_replicas = len(self._replicas.ranks) > 1
        while with_replicas and self._launched < len(self._buckets):
            self._launch_next()
        for bucket in self._tied_buckets:  # beside the others, which have begun
            bucket.start_sum()
        for number, bucket in enumerate(self._buckets if with_replicas else ()):
            bucket.finish_sum(self._timeline, f"bucket {number}", before_copy)
        self._launched = 0
        for number, bucket in enumerate(self._tied_buckets):
            bucket.finish_sum(self._timeline, f"tied {number}", before_copy)

    def squared_norm(self) -> float:
        """This rank's share of the squared L2 norm of the whole model's gradient."""
        return _squared_norm(self._parameters[name] for name in self._counted)


class _Bucket:
    """Gradients that are summed in one collective."""

    def __init__(self, members: Sequence[nn.Parameter], group: RankGroup) -> None:
        self.members = members
        self.final: set[int] = set()
        self.wait: Callable[[], None] | None = None
        """Waits for the collective; None before it begins."""
        self._group = group
        self._flat = torch.empty(0)
        self._began_ns = 0

    @property
    def is_final(self) -> bool:
        return len(self.final) == len(self.members)

    def start_sum(self) -> None:
        """Starts the sum of the present gradients."""
        first = self.members[0]
        # Flags behind the gradients tell which parameters have one. A parameter without a gradient must not get zeros,
        # because the optimizer leaves the former alone and decays the latter.
        # They are made on the device: a copy from the host would wait for all that the device still has to do.
        flags = torch.ones(len(self.members), dtype=first.dtype, device=first.device)
        for number, parameter in enumerate(self.members):
            if parameter.grad is None:
                flags[number].zero_()
        parts = [
            torch.zeros(p.numel(), dtype=p.dtype, device=p.device) if p.grad is None else p.grad.flatten()
            for p in self.members
        ]
        self._began_ns = time.perf_counter_ns()
        self._flat = torch.cat([*parts, flags])
        self.wait = self._group.start_all_reduce([self._flat])

    def finish_sum(self, timeline: Timeline, name: str, before_copy: Callable[[], None]) -> None:
        """Waits for the sum and copies it into the gradients."""
        assert self.wait is not None, "finish before start_sum"
        self.wait()
        before_copy()
        timeline.add_span(ALL_REDUCE, name, self._began_ns, time.perf_counter_ns(), bytes=self._flat.nbytes)
        flat, self._flat = self._flat, torch.empty(0)
        self.wait = None
        self.final.clear()
        # What this rank has a gradient of, a rank has one of. Only for the rest the host waits for the flags.
        is_complete = all(parameter.grad is not None for parameter in self.members)
        present = [] if is_complete else flat[-len(self.members) :].tolist()
        offset = 0
        for number, parameter in enumerate(self.members):
            summed = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(summed)
            elif present[number]:
                parameter.grad = summed.clone()


def make_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
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


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor for gradients of global norm `norm`, as in `torch.nn.utils.clip_grad_norm_`."""
    if max_norm is None:
        return 1.0
    if not max_norm > 0:
        raise ValueError(f"clip_grad_max_norm={max_norm}: it must be positive, or None for no clipping")
    return math.nan if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))


_norm_in_step: ContextVar[float | None] = ContextVar("varuna_norm_in_step", default=None)
"""While `Varuna.step` steps the optimizer: the L2 norm of the whole model's gradient."""


@contextmanager
def stepping(gradient_norm: float) -> Iterator[None]:
    """Around the optimizer's step; `gradient_norm` is that of the whole model's present gradient."""
    token = _norm_in_step.set(gradient_norm)
    try:
        yield
    finally:
        _norm_in_step.reset(token)


def is_stepping() -> bool:
    return _norm_in_step.get() is not None


def global_gradient_norm(parameters: Iterable[Tensor]) -> float:
    """The L2 norm of the whole model's gradient, for optimizers that need it, such as NVLAMB.

    Inside an optimizer that `Varuna.step` steps, the norm is that of the clipped gradients of all stages; a tied
    parameter counts once. In a plain process it is the norm of the gradients of `parameters`, which are all parameters
    of the model.
    """
    known = _norm_in_step.get()
    if known is not None:
        return known
    return math.sqrt(_squared_norm(parameters))


def _squared_norm(parameters: Iterable[Tensor]) -> float:
    """Of all their gradients. Each norm is computed in fp32, their sum in fp64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    # Stacked first: a device takes longer to launch a conversion for each parameter than for all of this.
    return float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def broadcast_from_first(tensors: Sequence[Tensor], group: RankGroup) -> None:
    """Makes the tensors those of the group's first rank, in place."""
    with torch.no_grad():
        group.broadcast_tensors([t.detach() for t in tensors])
