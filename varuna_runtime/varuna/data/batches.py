"""The examples of each training step, as a pure function of (seed, step, global batch).

The examples form one endless stream: epoch 0's permutation of the dataset, then epoch 1's, and so on. Step k (counted
from 1) takes the stream's positions [(k-1)·B, k·B), so it may straddle two epochs and a resumed run needs no replay.
A run that continues with another B begins at the first position that no earlier step has used (`sample_cursor.py`).
The B examples of a step are cut into micro-batches. Each replica takes a contiguous run of them
(`varuna_planner.schedule.batching`), so the global batch is the same for every D and m, and
however many of them each replica runs.

The permutation of an epoch is never stored. It is a Feistel network over the smallest even number of bits that holds
the dataset, walked along its cycle until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). This is a bijection in pure integer arithmetic, so it is equal on every platform and version. Its cost per step
grows with the batch and not with the dataset.

Letters: B examples in the global batch, n examples in the dataset, D replicas, m examples in a micro-batch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from varuna.data.batch_contents import BatchContents
from varuna.data.prefetching import prefetch_batches
from varuna.data.sample_cursor import count_samples_before
from varuna.data.seeded_examples import PlacedExample, SeededExamples, SizedDataset
from varuna.diagnostics.step_clock import STEP_CLOCK, Activity
from varuna.distributed.worker_environment import read_process_environment
from varuna_planner.schedule.batching import micro_batches
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = [
    "Batches",
    "RecentBatch",
    "SizedDataset",
    "find_recent_batch",
    "follow_shape",
    "replica_indices",
]

_ROUNDS = 8
_MIN_HALF_BITS = 1


def replica_indices(
    step: int,
    *,
    dataset_size: int,
    global_batch: int,
    micro_batch: int,
    replica: int,
    replicas: int,
    seed: int = 0,
    shuffle: bool = True,
    shift: int = 0,
    shares: Sequence[int] = (),
) -> list[int]:
    """The dataset indices that `replica` of `replicas` trains on in `step` (from 1), in order.

    Joined in replica order they are the step's global batch. It depends only on (seed, step, global_batch) and on
    `shift`: the number of samples that the steps before have used beyond (step - 1) · global_batch.
    `shares`: how many micro-batches each replica runs; empty: as equally many as can be.
    Raises ValueError for an empty dataset, a step or batch below 1, a shift to before the stream's beginning, fewer
    micro-batches than replicas, or shares that are not those of these replicas.
    """
    _check(dataset_size, global_batch)
    place = _Place(micro_batch, replica, replicas, tuple(shares))
    return _stream(_list_positions(place, step, global_batch, shift), dataset_size, seed, shuffle)


def _list_positions(place: _Place, step: int, global_batch: int, shift: int) -> range:
    """The stream's positions that the replica of `place` trains on in `step`."""
    first = _first_position(step, global_batch, shift)
    micro_batch, replica, replicas, shares = place
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} of {replicas}: replicas count from 0")
    run = micro_batches(global_batch, micro_batch, replicas, shares)[replica]
    begin, end = run.start * micro_batch, min(run.stop * micro_batch, global_batch)
    return range(first + begin, first + end)


def _first_position(step: int, global_batch: int, shift: int) -> int:
    """The stream's position at which a step begins."""
    if step < 1:
        raise ValueError(f"step {step}: steps count from 1")
    first = (step - 1) * global_batch + shift
    if first < 0:
        raise ValueError(f"step {step} with a shift of {shift} samples begins before the first one")
    return first


class _Place(NamedTuple):
    """Which part of a global batch this process trains on."""

    micro_batch: int
    replica: int
    replicas: int
    shares: tuple[int, ...] = ()
    """As `Plan.shares`."""

    @classmethod
    def in_shape(cls, environment: WorkerEnvironment) -> _Place:
        plan = environment.plan
        return cls(plan.micro_batch, environment.rank // plan.p, plan.d, plan.shares)


class Batches:
    """Yields `(step, batch)` for this process' replica, from `first_step` to `last_step` (included; None: without end).

    Under the launcher the replica, its share, the micro-batch and the global batch come from the environment; under
    torchrun and similar launchers they come from this process' `Varuna`, which must exist before. A plain process gets
    the whole global batch. `collate` turns a list of dataset items into the batch, a dict of model inputs (default:
    PyTorch's `default_collate`, which needs dicts as items).

    With `workers=n`, n processes make the batches ahead of the steps, each two at most, so that no step waits for its
    data unless they are slower than training. They are forked from this one when the loop begins, and again when this
    process goes on in another shape.

    What `dataset[i]` draws from the global generators of torch (on the CPU), NumPy and Python follows from `seed` and
    the example's place in the stream: it is the same in every shape. What `collate` draws follows from `seed` and the
    place of its first example: it is the same on all stages of a replica. The script's own draws go on as if nothing
    had been drawn. In a thread of the script's own the generators are not seeded.

    If it is made after `Varuna.resume` with `first_step=resume() + 1`, it begins with the first sample that the
    training has not used, even if the steps before had another global batch.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        first_step: int = 1,
        last_step: int | None = None,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        worker = read_process_environment() if environ is None else WorkerEnvironment.from_environ(environ)
        self.global_batch = _global_batch(global_batch, worker)
        _check(len(dataset), self.global_batch)
        if first_step < 1:
            raise ValueError(f"first_step {first_step}: steps count from 1")
        if workers < 0:
            raise ValueError(f"workers={workers}: give the number of processes that make batches, or 0 for none")
        used = count_samples_before(first_step)
        self._shift = 0 if used is None else used - (first_step - 1) * self.global_batch
        self._dataset = dataset
        self._seed = seed
        self._first_step = first_step
        self._last_step = last_step
        self._shuffle = shuffle
        self._workers = workers
        self._examples = SeededExamples(dataset, default_collate if collate is None else collate, seed)
        # A calibration has one replica per rank however small the batch is, and takes no training step.
        trains = worker is not None and worker.mode is Mode.TRAIN
        self._place = _Place.in_shape(worker) if trains and worker is not None else _Place(self.global_batch, 0, 1)
        self._made: deque[_MadeBatch] = deque(maxlen=2)
        """What it made last: that of the step under way, and the next one, which a script may have already."""
        if trains and environ is None:
            _followers.add(self)

    def indices(self, step: int) -> list[int]:
        """The dataset indices of this replica in `step`."""
        return [example.number for example in self._list_examples(self._place, step)]

    def _list_examples(self, place: _Place, step: int) -> list[PlacedExample]:
        return self._find_examples(_list_positions(place, step, self.global_batch, self._shift_at(step)))

    def _find_examples(self, positions: range) -> list[PlacedExample]:
        indices = _stream(positions, len(self._dataset), self._seed, self._shuffle)
        return list(map(PlacedExample, positions, indices))

    def batch(self, step: int) -> dict[str, Any]:
        """This replica's examples of `step`, collated. Raises TypeError when collating gives no dict."""
        place = self._place  # it may be another one before a thread of the script has made the batch
        with STEP_CLOCK.measure(Activity.DATA):
            batch = self._make_batch(place, step)
        return self._give_out(step, batch, place)

    def _give_out(self, step: int, batch: dict[str, Any], place: _Place) -> dict[str, Any]:
        if self in _followers:
            self._made.append(_MadeBatch(step, batch, BatchContents(batch), batch, place))
        return batch

    def _shift_at(self, step: int) -> int:
        return self._shift if step >= self._first_step else 0

    def _make_batch(self, place: _Place, step: int) -> dict[str, Any]:
        return self._examples.make_batch(self._list_examples(place, step))

    def _collate_examples(self, step: int, spans: Iterable[range]) -> dict[str, Any]:
        """The examples at these places in the global batch of `step`, whatever replica has them."""
        first = _first_position(step, self.global_batch, self._shift_at(step))
        positions = (range(first + span.start, first + span.stop) for span in spans)
        return self._examples.make_batch([example for run in positions for example in self._find_examples(run)])

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        steps = count(self._first_step) if self._last_step is None else range(self._first_step, self._last_step + 1)
        if self._workers:
            yield from self._prefetch(steps)
        else:
            for step in steps:
                yield step, self.batch(step)

    def _prefetch(self, steps: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        started_at: _Place | None = None
        with ExitStack() as workers:
            for step in steps:
                place = self._place
                with STEP_CLOCK.measure(Activity.DATA):
                    if place != started_at:  # what was made ahead is of another part of its steps
                        workers.close()
                        started_at = place
                        ahead = workers.enter_context(closing(self._start_workers(place, step)))
                    batch = next(ahead)
                yield step, self._give_out(step, batch, place)

    def _start_workers(self, place: _Place, first_step: int) -> Generator[dict[str, Any]]:
        steps = count(first_step) if self._last_step is None else range(first_step, self._last_step + 1)
        return prefetch_batches(
            self._examples,
            (self._list_examples(place, step) for step in steps),
            self._examples.collate_items,
            workers=self._workers,
            seed=_first_position(first_step, self.global_batch, self._shift_at(first_step)),
        )


@dataclass
class _MadeBatch:
    """A batch that the script has got."""

    step: int
    given: dict[str, Any]
    """The dict that the script got, which it may have changed."""
    contents: BatchContents
    """What it had then."""
    batch: dict[str, Any]
    """As it is at `place`."""
    place: _Place


@dataclass(frozen=True)
class RecentBatch:
    """One of the batches that a `Batches` made last, which can be made again for another place of this process."""

    source: Batches
    made: _MadeBatch

    def renew(self) -> Mapping[str, Any]:
        """The batch as it is at the present place."""
        made, place = self.made, self.source._place
        if made.place != place:
            made.batch, made.place = self.source._make_batch(place, made.step), place
        return self._leave_out_removed(made.batch)

    def fetch_examples(self, spans: Iterable[range]) -> Mapping[str, Any]:
        """The examples at these places of the global batch that it is a part of, in order."""
        return self._leave_out_removed(self.source._collate_examples(self.made.step, spans))

    def _leave_out_removed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch` without the names that the script has removed from the dict that it got."""
        given = self.made.given
        return batch if batch.keys() == given.keys() else {name: batch[name] for name in batch if name in given}


_followers: weakref.WeakSet[Batches] = weakref.WeakSet()
"""All that take their place from this process's worker."""


def find_recent_batch(inputs: Mapping[str, Any]) -> RecentBatch | None:
    """The batch that `inputs` is, the object itself; None: it is none that a `Batches` of this process made last, or
    the script has changed what is in it, so that it would be another one if it were made again."""
    for source in list(_followers):
        for made in list(source._made):  # a copy, because a thread of the script may make the next one meanwhile
            if inputs is made.given:
                return RecentBatch(source, made) if made.contents.are_in(inputs) else None
            if inputs is made.batch:
                return RecentBatch(source, made)
    return None


def follow_shape(environment: WorkerEnvironment) -> None:
    """Makes all `Batches` of this process follow it into another shape."""
    for source in _followers:
        source._place = _Place.in_shape(environment)


def _global_batch(given: int | None, worker: WorkerEnvironment | None) -> int:
    if worker is None or (worker.mode is Mode.INSPECT and given is not None):  # no job says another
        if given is None:
            raise ValueError("global_batch is not known outside the varuna launcher: pass global_batch=")
        return given
    if given is not None and given != worker.plan.global_batch:
        raise ValueError(
            f"global_batch={given}, but the job was submitted with a global batch of {worker.plan.global_batch}: "
            "leave the argument out, or submit the job with this one"
        )
    return worker.plan.global_batch


def _check(dataset_size: int, global_batch: int) -> None:
    if dataset_size < 1:
        raise ValueError("the dataset is empty: give one with at least one example")
    if global_batch < 1:
        raise ValueError(f"global_batch {global_batch}: it must be at least 1 example")


def _stream(positions: range, size: int, seed: int, shuffle: bool) -> list[int]:
    """The dataset index at each position of the endless stream of epochs."""
    indices: list[int] = []
    for epoch in range(positions.start // size, (positions.stop - 1) // size + 1):
        begin = max(positions.start, epoch * size) - epoch * size
        end = min(positions.stop, (epoch + 1) * size) - epoch * size
        if shuffle:
            indices.extend(_permuted(range(begin, end), size, seed, epoch).tolist())
        else:
            indices.extend(range(begin, end))
    return indices


def _permuted(positions: range, size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The images of `positions` under epoch `epoch`'s permutation of [0, size)."""
    half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    images = _feistel(np.arange(positions.start, positions.stop, dtype=np.uint64), keys, half_bits)
    outside = np.flatnonzero(images >= size)
    while outside.size:  # ends: each walk stays on a cycle that began inside [0, size)
        images[outside] = _feistel(images[outside], keys, half_bits)
        outside = outside[images[outside] >= size]
    return images


def _feistel(values: NDArray[np.uint64], keys: Sequence[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    """A permutation of [0, 4**half_bits)."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    counters = np.arange(_ROUNDS, dtype=np.uint64)
    # Two rounds of mixing, so that neither (seed, epoch) = (1, 0) and (0, 1) nor neighbouring ones share keys.
    of_seed = _mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    of_epoch = _mix(of_seed ^ np.uint64(epoch % (1 << 64)))
    return list(_mix(of_epoch + counters))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's output function: every bit of the input moves every bit of the output. Overflow wraps by design."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
