"""Random streams that do not depend on how the model and the batch are cut.

Before a section runs for a micro-batch, the device's generators are seeded from (seed, step, place of the micro-batch's
first example in the global batch, section). So dropout is the same for every P and D, and a recomputed forward draws
the same numbers again. No two micro-batches draw the same ones, also in a step that goes on with smaller ones.
An evaluation has a seed of its own, from its number since the newest step.
Where random numbers belong to examples (random_by_example.py), they are the same for every size of the micro-batches,
too. Then the CPU's generator, which gives the draws their keys, is seeded without the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from varuna.devices.accelerator import get_generator_state, seed_device_generator, set_generator_state
from varuna.partition.cutting.shapes import DrawSpec
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.random_by_example import ExampleStreams
from varuna.pipeline.random_operations import install_hooks
from varuna.pipeline.seed_mixing import mix_seed

__all__ = ["RandomStreams", "evaluation_seed", "preserve_generators", "seed_generators", "stream_seed"]

_MASK = (1 << 64) - 1
_ALL = -1
"""In place of an example: all micro-batches of the step."""


def stream_seed(seed: int, step: int, first_example: int, section: int) -> int:
    """The seed of one random stream, in [0, 2**63). Distinct arguments give unrelated streams.

    `first_example`: of the micro-batch, its place in the global batch.
    """
    state = 0
    for part in (seed, step, first_example, section):
        state = mix_seed(state ^ (part & _MASK))
    return state >> 1


def evaluation_seed(seed: int, number: int) -> int:
    """In place of `seed`, that of the streams of an evaluation, which are no step's.

    `number`: of the evaluation, from 0, since the newest step.
    """
    return mix_seed(mix_seed(seed & _MASK) ^ number)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators from which code on `device` draws: the CPU's, and the device's own."""
    torch.default_generator.manual_seed(seed)
    seed_device_generator(device, seed)


class _SectionedStage(Protocol):
    """A stage: it calls `on_section` as each of its sections starts."""

    on_section: Callable[[int], None] | None


class RandomStreams:
    """The random numbers of a stage's forwards.

    Args:
        draws: the draws of the whole model, if random numbers belong to examples; None: they belong to micro-batches.
    """

    def __init__(self, device: torch.device, draws: Sequence[DrawSpec] | None = None) -> None:
        self._device = device
        self._by_example: ExampleStreams | None = None
        if draws is not None:
            install_hooks()
            self._by_example = ExampleStreams(draws)

    @property
    def places_of_micro_batches(self) -> tuple[str, ...]:
        """The places of draws so far that belong to micro-batches although other draws belong to examples."""
        return () if self._by_example is None else tuple(self._by_example.micro_batch_draws)

    def measured_draws(self, examples: int) -> AbstractContextManager[object]:
        """A context for a forward or backward that is only measured."""
        if self._by_example is None:
            return nullcontext()
        self._by_example.set_examples(0, examples)
        return self._by_example

    @contextmanager
    def seeding_sections(self, stage: _SectionedStage, seed: int, step: int, micro_batch: MicroBatch) -> Iterator[None]:
        """A context for a forward of `micro_batch`, a recompute, or its backward."""
        streams = self._by_example

        def seed_section(section: int) -> None:
            seed_generators(self._device, stream_seed(seed, step, micro_batch.first_example, section))
            if streams is not None:
                torch.default_generator.manual_seed(stream_seed(seed, step, _ALL, section))

        stage.on_section = seed_section
        try:
            if streams is None:
                yield
            else:
                streams.set_examples(micro_batch.first_example, micro_batch.examples)
                with streams:
                    yield
        finally:
            stage.on_section = None


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restores the state of the generators of CPU and `device` after the block."""
    host = torch.default_generator.get_state()
    own = get_generator_state(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(host)
        if own is not None:
            set_generator_state(device, own)
