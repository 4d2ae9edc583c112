"""Which examples belong to a training step, as a pure function of (seed, step, global batch).

The examples form one endless stream: epoch 0's permutation of the dataset, then epoch 1's, and so on. Step k (counted
from 1) takes the stream's positions [(k-1)·B, k·B), so it may straddle two epochs and a resumed run needs no replay.
A run that goes on with another B begins at the first position that no earlier step has used (`varuna.sample_cursor`).
The B examples of a step are cut into micro-batches, of which each replica takes a contiguous run
(`varuna_planner.batching`): the global batch is the same whatever D and m are.

The permutation of an epoch is never materialised. It is a Feistel network over the smallest even number of bits that
holds the dataset, walked along its cycle until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002): a bijection in pure integer arithmetic, so equal on every platform and version, with a cost per step
in proportion to the batch and none to the dataset.

Letters: B examples in the global batch, n examples in the dataset, D replicas, m examples in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from varuna.launched import environment_of_process
from varuna.local_copy import local_copy
from varuna.sample_cursor import samples_before
from varuna_planner.batching import micro_batches
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["Batches", "SizedDataset", "local_copy", "replica_indices"]

_ROUNDS = 8
_MIN_HALF_BITS = 1


class SizedDataset(Protocol):
    """What `Batches` asks of a dataset: a length and random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
) -> list[int]:
    """The dataset indices that `replica` of `replicas` trains on in `step` (from 1), in order.

    Joined in replica order they are the step's global batch, which depends on (seed, step, global_batch) only, and on
    `shift`: how many samples more (or fewer) than (step - 1) · global_batch the steps before have used.
    Raises ValueError for an empty dataset, a step or batch below 1, a shift to before the stream's beginning, or fewer
    micro-batches than replicas.
    """
    _check(dataset_size, global_batch)
    if step < 1:
        raise ValueError(f"step {step}: steps count from 1")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} of {replicas}: replicas count from 0")
    run = micro_batches(global_batch, micro_batch, replicas)[replica]
    begin, end = run.start * micro_batch, min(run.stop * micro_batch, global_batch)
    first = (step - 1) * global_batch + shift
    if first < 0:
        raise ValueError(f"step {step} with a shift of {shift} samples begins before the first one")
    return _stream(range(first + begin, first + end), dataset_size, seed, shuffle)


class Batches:
    """Yields `(step, batch)` for this process' replica, from `first_step` to `last_step` (included; None: for ever).

    Under the launcher the replica, the micro-batch and the global batch are read from the environment; under torchrun
    and its like they are those of this process' `Varuna`, which is made before. A plain process gets the whole global
    batch. `collate` turns a list of dataset items into the batch, a dict of model inputs
    (default: PyTorch's `default_collate`, which needs items that are dicts).

    Made after `Varuna.resume` with `first_step=resume() + 1`, it begins with the first sample that the training has not
    used yet, also where the steps before had another global batch.
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
        environ: Mapping[str, str] | None = None,
    ) -> None:
        worker = environment_of_process() if environ is None else WorkerEnvironment.from_environ(environ)
        self.global_batch = _global_batch(global_batch, worker)
        _check(len(dataset), self.global_batch)
        if first_step < 1:
            raise ValueError(f"first_step {first_step}: steps count from 1")
        used = samples_before(first_step)
        self._shift = 0 if used is None else used - (first_step - 1) * self.global_batch
        self._dataset = dataset
        self._seed = seed
        self._first_step = first_step
        self._last_step = last_step
        self._shuffle = shuffle
        self._collate = default_collate if collate is None else collate
        self._micro_batch, self._replica, self._replicas = self.global_batch, 0, 1
        # A calibration has one replica per rank however small the batch is, and takes no training step.
        if worker is not None and worker.mode is Mode.TRAIN:
            self._micro_batch, self._replica, self._replicas = worker.micro_batch, worker.rank // worker.p, worker.d

    def indices(self, step: int) -> list[int]:
        """The dataset indices of this replica in `step`."""
        return replica_indices(
            step,
            dataset_size=len(self._dataset),
            global_batch=self.global_batch,
            micro_batch=self._micro_batch,
            replica=self._replica,
            replicas=self._replicas,
            seed=self._seed,
            shuffle=self._shuffle,
            shift=self._shift if step >= self._first_step else 0,
        )

    def batch(self, step: int) -> dict[str, Any]:
        """This replica's examples of `step`, collated. Raises TypeError when collating gives no dict."""
        collated = self._collate([self._dataset[index] for index in self.indices(step)])
        if not isinstance(collated, Mapping):
            raise TypeError(
                f"a batch must be a dict of model inputs by name, and collating gave a {type(collated).__name__}: "
                "let the dataset's items be dicts, or pass collate="
            )
        return dict(collated)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        step = self._first_step
        while self._last_step is None or step <= self._last_step:
            yield step, self.batch(step)
            step += 1


def _global_batch(asked: int | None, worker: WorkerEnvironment | None) -> int:
    if worker is None:
        if asked is None:
            raise ValueError("global_batch is not known outside the varuna launcher: pass global_batch=")
        return asked
    if asked is not None and asked != worker.global_batch:
        raise ValueError(
            f"global_batch={asked}, but the job was submitted with a global batch of {worker.global_batch}: "
            "leave the argument out, or submit the job with this one"
        )
    return worker.global_batch


def _check(dataset_size: int, global_batch: int) -> None:
    if dataset_size < 1:
        raise ValueError("the dataset is empty: there is nothing to train on")
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
