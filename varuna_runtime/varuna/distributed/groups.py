"""Collectives among some ranks of a generation, which a worker can leave at any moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions

from varuna.devices.accelerator import wait_for_event
from varuna.devices.copy_stream import CopyStream
from varuna.devices.cuda_alone import takes_device_tensors
from varuna.devices.out_of_memory import is_memory_error
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.gloo import NEVER, GlooGroup, Work

__all__ = ["RankGroup"]


class RankGroup:
    """Collectives among some ranks; a wait for one ends when the worker must leave.

    They run asynchronously inside gloo, and completion callbacks wake the caller, which waits on the departure.
    """

    def __init__(self, group: GlooGroup | None, ranks: Sequence[int], departure: Departure) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._departure = departure
        self._unfinished = 0
        self._copies = CopyStream()

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over the ranks, in place. Every rank passes the same shapes in the same order."""
        self.start_all_reduce(tensors)()

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Starts an `all_reduce` and returns a wait for its end. All ranks start collectives in the same order."""
        if self._group is None:
            return lambda: None
        options = AllreduceOptions()
        options.timeout = NEVER
        staged = _StagedTensors(tensors, self._copies)
        wait = self._start([partial(self._group.allreduce, [t], options) for t in staged.on_host])

        def wait_and_return() -> None:
            wait()
            staged.return_values()

        return wait_and_return

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copies each tensor from the group's first rank to the others, in place."""
        if self._group is None:
            return
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = NEVER
        staged = _StagedTensors(tensors, self._copies)
        self._start([partial(self._group.broadcast, [t], options) for t in staged.on_host])()
        staged.return_values()

    @property
    def is_idle(self) -> bool:
        """Whether no collective is under way."""
        return self._unfinished == 0

    def _start(self, operations: Sequence[Callable[[], Work]]) -> Callable[[], None]:
        self._departure.raise_if_leaving()
        try:
            works = [operation() for operation in operations]
        except RuntimeError as error:
            self._lost(error)
            raise
        unfinished = len(works)
        with self._departure.condition:
            self._unfinished += unfinished

        def finished(_: object) -> None:
            nonlocal unfinished
            with self._departure.condition:
                unfinished -= 1
                self._unfinished -= 1
                self._departure.condition.notify_all()

        # Counted here, because `is_completed` turns true only after the callbacks have run.
        for work in works:
            work.get_future().then(finished)

        def wait() -> None:
            self._departure.wait_until(lambda: unfinished == 0)
            try:
                for work in works:
                    work.wait(NEVER)  # returns or raises at once, because it is finished
            except RuntimeError as error:
                self._lost(error)
                raise

        return wait

    def _lost(self, error: RuntimeError) -> None:
        """Leaves the generation, because a peer is gone; not where this rank's own device has no memory left."""
        if is_memory_error(error):
            return
        reason = f"a collective among ranks {self.ranks} failed: {first_line(error)}"
        self._departure.leave_generation(PeerLost(reason, suspects=self.ranks))
        self._departure.raise_if_leaving()


class _StagedTensors:
    """The tensors of a collective as its backend takes them: themselves, or pinned copies of those that it refuses."""

    def __init__(self, tensors: Sequence[Tensor], copies: CopyStream) -> None:
        self._refused = [tensor for tensor in tensors if not takes_device_tensors(tensor.device)]
        self._copies = copies
        self._values, copied = copies.to_host(self._refused)
        if copied is not None:
            wait_for_event(copied)  # such a backend reads host memory as soon as the collective starts
        values = iter(self._values)
        self.on_host = [next(values) if not takes_device_tensors(each.device) else each for each in tensors]

    def return_values(self) -> None:
        """After the collective: copies what it has left in the copies back into the tensors."""
        if self._refused:
            self._copies.update_on_device(self._refused, self._values)
