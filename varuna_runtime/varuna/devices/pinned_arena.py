"""Pinned host memory for many tensors that stay, cut from large blocks.

PyTorch's allocator of pinned memory rounds every request up to a power of two, so a tensor that asks for memory of its
own takes up to twice its size. Its setting that limits this (`pinned_max_round_threshold_mb`, torch 2.13) is no way
out: a block that was not rounded is reused for larger requests of the same power of two. So blocks here are powers of
two by themselves, and chosen so that little of them is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["PinnedArena"]

_PAGE_BYTES = 4096
"""Tensors begin at pages, as those of the allocator do."""
_WASTE = 8
"""One block for all that is expected may be larger by this part of it."""
_GROWTH = 4
"""What is not expected gets a block for at most so many tensors of its size."""


def _allocate_pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PinnedArena:
    """Makes tensors in pinned memory. A block is freed when all its tensors are gone."""

    def __init__(self, allocate: Callable[[int], Tensor] = _allocate_pinned) -> None:
        """`allocate`: makes the memory of a block of so many bytes."""
        self._allocate = allocate
        self._open: list[tuple[Tensor, int]] = []
        """Blocks with room, and the bytes of each that are taken."""
        self._expected_bytes = 0
        self.block_bytes = 0
        """Of all blocks that were made."""

    def expect_bytes(self, count: int) -> None:
        """Tensors of so many bytes are going to be made: their blocks are chosen for all of them."""
        self._expected_bytes += count

    def make_tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor without values. `stride`: of a dense tensor, with its dimensions in any order."""
        size = math.prod(shape) * dtype.itemsize
        taken = _page_bytes(size)
        place = next((i for i, (block, used) in enumerate(self._open) if used + taken <= block.nbytes), None)
        if place is None:
            place = len(self._open)
            self._open.append((self._make_block(max(taken, _PAGE_BYTES)), 0))
        self._expected_bytes = max(0, self._expected_bytes - taken)
        block, used = self._open[place]
        if used + taken == block.nbytes:
            del self._open[place]
        else:
            self._open[place] = (block, used + taken)
        return block.view(dtype).as_strided(shape, stride, used // dtype.itemsize)

    def _make_block(self, taken: int) -> Tensor:
        size = self._choose_size(taken)
        self.block_bytes += size
        return self._allocate(size)

    def _choose_size(self, taken: int) -> int:
        alone = _power_above(taken)
        if self._expected_bytes < taken:
            grown = min(_GROWTH * taken, self.block_bytes // 2)
            return max(alone, _power_above(grown + 1) // 2)
        left = self._expected_bytes
        whole = _power_above(left)
        if whole - left <= left // _WASTE:
            return whole
        return max(whole // 2, alone) if whole // 2 >= 2 * taken else alone


def _page_bytes(count: int) -> int:
    return -(-count // _PAGE_BYTES) * _PAGE_BYTES


def _power_above(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(count - 1, 0).bit_length()
