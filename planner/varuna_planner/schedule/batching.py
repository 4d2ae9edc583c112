"""How a global batch is cut into micro-batches, and which replica runs which.

Letters: B examples in the global batch, m examples in a micro-batch, M micro-batches, D replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import floor


def count_micro_batches(global_batch: int, micro_batch: int) -> int:
    """M = ceil(B / m). Raises ValueError when either is less than 1."""
    if global_batch < 1:
        raise ValueError(f"global batch is {global_batch}: it needs at least 1 example")
    if micro_batch < 1:
        raise ValueError(f"micro-batch is {micro_batch}: it needs at least 1 example")
    return -(-global_batch // micro_batch)


def micro_batch_sizes(global_batch: int, micro_batch: int) -> tuple[int, ...]:
    """Examples in each of the M micro-batches of a global batch; the last may be smaller."""
    count = count_micro_batches(global_batch, micro_batch)
    return (micro_batch,) * (count - 1) + (global_batch - micro_batch * (count - 1),)


def shared_micro_batch(*sizes: int) -> int | None:
    """The smallest of several sizes of micro-batches, if it divides all of them: then each micro-batch of a larger size
    is some whole ones of the smallest. None if it does not."""
    smallest = min(sizes)
    return None if any(size % smallest for size in sizes) else smallest


def renumber_micro_batches(numbers: Iterable[int], *, before: int, after: int, global_batch: int) -> tuple[int, ...]:
    """The micro-batches of a global batch by their numbers, when each has `after` examples in place of `before`.

    `after` divides `before`, if there are any. The last micro-batch may be smaller, so it may have fewer parts.
    """
    numbers = tuple(numbers)
    assert not numbers or before % after == 0, f"micro-batches of {before} are not made of micro-batches of {after}"
    parts, count = before // after, count_micro_batches(global_batch, after)
    return tuple(part for number in numbers for part in range(number * parts, min((number + 1) * parts, count)))


def micro_batches(global_batch: int, micro_batch: int, d: int, shares: Sequence[int] = ()) -> tuple[range, ...]:
    """The micro-batches of each of the d replicas, as ranges of indices into the global batch's M micro-batches.

    Args:
        shares: how many each replica runs. If empty, the first M mod d replicas run ceil(M/d), the others floor(M/d).

    Raises:
        ValueError: a replica would get none, or the shares are not those of d replicas that run M.
    """
    count = count_micro_batches(global_batch, micro_batch)
    if d < 1:
        raise ValueError(f"d={d}: a job needs at least 1 replica")
    if d > count:
        raise ValueError(
            f"d={d}, but a global batch of {global_batch} has at most {count} micro-batches of {micro_batch}: "
            f"use at most {count} replicas, a smaller micro-batch or a larger global batch"
        )
    if not shares:
        return split_evenly(count, d)
    if len(shares) != d or sum(shares) != count or min(shares) < 1:
        raise ValueError(
            f"shares {list(shares)} of {d} replicas: give {d} whole numbers of at least 1 whose sum is the {count} "
            f"micro-batches of {micro_batch} in a global batch of {global_batch}"
        )
    ends = tuple(accumulate(shares))
    return tuple(range(end - share, end) for end, share in zip(ends, shares, strict=True))


def apportion(count: int, weights: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """`count` things in shares of at least `least`, in proportion to the weights as nearly as can be: what is left over
    goes to the largest remainders; of equal ones, to the first.

    Raises ValueError when there are too few things, or a weight is not above 0.
    """
    if count < least * len(weights) or min(weights, default=0) <= 0:
        raise ValueError(f"{count} things cannot have shares of {list(weights)}, each of at least {least}")
    whole = sum(weights)
    quotas = [count * weight / whole for weight in weights]
    shares = [max(least, floor(quota)) for quota in quotas]
    # Those that lie furthest below their quotas get one more; those furthest above give one back, if they may.
    while sum(shares) < count:
        shares[max(range(len(shares)), key=lambda i: (quotas[i] - shares[i], -i))] += 1
    while sum(shares) > count:
        shares[max((i for i in range(len(shares)) if shares[i] > least), key=lambda i: shares[i] - quotas[i])] -= 1
    return tuple(shares)


def split_evenly(count: int, d: int) -> tuple[range, ...]:
    """`count` things in d runs whose lengths differ by at most 1, the longer ones first. Runs may be empty."""
    share, more = divmod(count, d)
    starts = [run * share + min(run, more) for run in range(d + 1)]
    return tuple(range(starts[run], starts[run + 1]) for run in range(d))
