"""Tensors that share blocks of pinned memory: none overlaps another, and little of the blocks is left over."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from varuna.devices.pinned_arena import PinnedArena

PAGE = 4096


def make_arena() -> PinnedArena:
    """With blocks in memory that is not pinned, because this machine may have no accelerator."""
    return PinnedArena(lambda size: torch.empty(size, dtype=torch.uint8))


def gpt_state(hidden: int, layers: int) -> list[tuple[int, ...]]:
    """The shapes of parameters and Adam's moments."""
    norm, square = [(hidden,), (hidden,)], (hidden, hidden)
    attention = [(3 * hidden, hidden), (3 * hidden,), square, (hidden,)]
    perceptron = [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    return [*norm, *attention, *perceptron] * layers * 3


@pytest.mark.parametrize("hidden", [768, 1600, 1920, 3072])
def test_little_of_the_blocks_is_left_over(hidden: int) -> None:
    shapes = gpt_state(hidden, layers=6)
    total = sum(4 * math.prod(shape) for shape in shapes)
    arena = PinnedArena(lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))
    arena.expect_bytes(total)
    for shape in shapes:
        stride = torch.empty(shape, device="meta").stride()
        arena.make_tensor(shape, stride, torch.float32)
    rounded = sum(1 << (4 * math.prod(shape) - 1).bit_length() for shape in shapes)
    assert arena.block_bytes < 1.1 * total < rounded


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * PAGE), max_size=20),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
    is_expected=st.booleans(),
)
def test_tensors_have_memory_of_their_own(sizes: list[int], dtype: torch.dtype, is_expected: bool) -> None:
    arena, tensors = make_arena(), list[Tensor]()
    if is_expected:
        arena.expect_bytes(sum(sizes) * dtype.itemsize)
    for number, size in enumerate(sizes):
        tensors.append(arena.make_tensor((size,), (1,), dtype).fill_(number))
    assert [tensor.tolist() for tensor in tensors] == [[number] * size for number, size in enumerate(sizes)]
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.nbytes)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(places))


def test_a_tensor_has_the_strides_that_are_asked_for() -> None:
    arena, like = make_arena(), torch.arange(24.0).reshape(4, 6).t()
    arena.make_tensor((5,), (1,), torch.float32)
    made = arena.make_tensor(like.shape, like.stride(), like.dtype).copy_(like)
    assert made.stride() == like.stride()
    assert torch.equal(made, like)
