"""The numbers that a micro-batch draws: keyed by its first example, so that no two parts of a step draw the same."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from varuna.pipeline.micro_batches import MicroBatch, cut_spans
from varuna.pipeline.random_streams import RandomStreams


def draw(micro_batch: MicroBatch) -> float:
    stage = SimpleNamespace(on_section=None)
    with RandomStreams(torch.device("cpu")).seeding_sections(stage, 1, 2, micro_batch):
        assert stage.on_section is not None
        stage.on_section(3)
        return float(torch.rand(()))


def test_micro_batches_of_two_sizes_draw_different_numbers_in_one_step() -> None:
    """Its second half has run in micro-batches of four, and the first half runs in micro-batches of two."""
    inputs = {"x": torch.arange(8)}
    (kept,) = cut_spans(inputs, {1: range(4, 8)})
    rest = cut_spans(inputs, {0: range(2), 1: range(2, 4)})
    assert len({draw(one) for one in (kept, *rest)}) == 3
    (again,) = cut_spans(inputs, {2: range(4, 6)})
    assert draw(again) == draw(kept), "the same examples; only one micro-batch of them counts"
