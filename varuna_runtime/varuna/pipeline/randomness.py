"""Random streams that do not depend on how the job is cut up.

Before a section runs for a micro-batch, the device's generators are seeded from (seed, step, micro-batch of the global
batch, section). So dropout is the same for every P and D, and a recomputed forward draws the same numbers again.
Where random numbers belong to examples (example_streams.py), they are the same for every size of the micro-batches too;
then the CPU's generator, which gives the draws their keys, is seeded without the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from varuna.partition.draws import DrawSpec
from varuna.pipeline.example_streams import ExampleStreams
from varuna.pipeline.mixing import mix
from varuna.pipeline.random_operations import install_hooks

__all__ = ["RandomStreams", "generators_left_as_found", "seed_generators", "stream_seed"]

_MASK = (1 << 64) - 1
_ALL = -1
"""In the place of a micro-batch: all of the step's."""


def stream_seed(seed: int, step: int, micro_batch: int, section: int) -> int:
    """The seed of one random stream, in [0, 2**63). Distinct arguments give unrelated streams."""
    state = 0
    for part in (seed, step, micro_batch, section):
        state = mix(state ^ (part & _MASK))
    return state >> 1


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators that code on `device` draws from: the CPU's, and the device's own."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class _Sectioned(Protocol):
    """A stage: it calls `on_section` as each of its sections starts."""

    on_section: Callable[[int], None] | None


class _MicroBatch(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def first_example(self) -> int: ...
    @property
    def examples(self) -> int: ...


class RandomStreams:
    """What the forwards of a stage draw.

    Args:
        draws: those of the whole model, for numbers that belong to examples; None: they belong to micro-batches.
    """

    def __init__(self, device: torch.device, draws: Sequence[DrawSpec] | None = None) -> None:
        self._device = device
        self._by_example: ExampleStreams | None = None
        if draws is not None:
            install_hooks()
            self._by_example = ExampleStreams(draws)

    @property
    def places_of_micro_batches(self) -> tuple[str, ...]:
        """Where what was drawn so far belongs to micro-batches although other draws belong to examples."""
        return () if self._by_example is None else tuple(self._by_example.left_to_micro_batch)

    def drawing(self, examples: int) -> AbstractContextManager[object]:
        """For around a forward or backward that is only measured."""
        if self._by_example is None:
            return nullcontext()
        self._by_example.set_examples(0, examples)
        return self._by_example

    @contextmanager
    def running(self, stage: _Sectioned, seed: int, step: int, micro_batch: _MicroBatch) -> Iterator[None]:
        """For around a forward of `micro_batch`, a recompute, or its backward."""
        streams = self._by_example

        def seed_section(section: int) -> None:
            seed_generators(self._device, stream_seed(seed, step, micro_batch.index, section))
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
def generators_left_as_found(device: torch.device) -> Iterator[None]:
    """Puts the generators of CPU and `device` back to where they were, whatever happens inside."""
    host = torch.default_generator.get_state()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(host)
        if own is not None:
            torch.cuda.set_rng_state(own, device)
