"""Random numbers that belong to examples, so that they are the same in every micro-batch.

While a pass runs, torch's random operations come here (random_operations.py). Each draw gets a key from the CPU's
generator, which every section seeds from (seed, step, section): so activation checkpointing, which puts that generator
back, replays the keys too. The numbers of example i then follow from the key and from i, its place in the global batch,
alone:

- Neighbouring examples form groups of fixed size g, which are drawn at once, by torch's own kernel, from a generator
  that is seeded with (key, group). g follows from the size of an example's part: a group takes hardly longer than one
  example, and a micro-batch throws away what it does not need of its first and last group.
- A draw whose shape does not depend on the batch is made once for the step: all micro-batches have the same numbers, as
  in a step of plain PyTorch on the whole batch.
- Whatever cannot be told apart by examples is drawn for the micro-batch, as (key, first example) has it. The profile
  says so, and the job then keeps its micro-batch.

Letters: n examples in the micro-batch, k rows of the drawn tensor for each example, e numbers for each example, g.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from varuna.partition.draws import DrawSpec
from varuna.pipeline.mixing import mix
from varuna.places import users_code

__all__ = ["ExampleStreams", "Layout", "stranger_generator", "streams_here"]

_log = structlog.get_logger("varuna")

_aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_LARGEST_GROUP = 64
_GROUP_NUMBERS_CPU = 512
"""Numbers in a group: what takes about as long to draw as to seed a generator."""
_GROUP_NUMBERS = 1 << 19
"""On an accelerator: what its kernel takes is not more than what launching it takes."""

Fill = Callable[[Tensor, torch.Generator], object]
"""Fills a contiguous tensor with random numbers."""

_active: dict[int, ExampleStreams] = {}
"""By thread: whose pass runs there."""
_strangers: dict[torch.device, torch.Generator] = {}
"""What other threads draw from while a pass runs, which would move its generator."""


def streams_here() -> ExampleStreams | None:
    """Those of the pass that runs in this thread, or whose backward does."""
    streams = _active.get(threading.get_ident())
    if streams is None and torch._C._current_graph_task_id() != -1 and len(_active) == 1:
        streams = next(iter(_active.values()))  # a thread of autograd's, in which checkpointing runs forwards again
    return streams


def stranger_generator(device: torch.device) -> torch.Generator | None:
    """What a thread draws from that has no pass, while others have; None: from the global generator, as ever."""
    if not _active:
        return None
    if device not in _strangers:
        _strangers[device] = torch.Generator(device)
        _strangers[device].seed()
    return _strangers[device]


class Layout:
    """Which dimension of a drawn tensor is the examples', told by the dry run's draws."""

    def __init__(self, draws: Sequence[DrawSpec]) -> None:
        self._draws = draws
        self._known: dict[tuple[tuple[int, ...], int], tuple[bool, int | None]] = {}

    def find(self, shape: tuple[int, ...], examples: int) -> tuple[bool, int | None]:
        """(whether the draw belongs to examples or to the step, its dimension of examples; None: to the step)."""
        known = self._known.get((shape, examples))
        if known is None:
            known = self._known[shape, examples] = self._find(shape, examples)
        return known

    def _find(self, shape: tuple[int, ...], examples: int) -> tuple[bool, int | None]:
        fitting = [draw for draw in self._draws if draw.fits(shape, examples)]
        fitting = fitting or [draw for draw in self._draws if draw.could_be(shape, examples)]
        dims = {draw.batch_dim for draw in fitting}
        if len(dims) != 1 or any(draw.problem for draw in fitting):
            return False, None
        return True, dims.pop()


class ExampleStreams:
    """The draws of one rank's passes. In a `with` block it is this thread's, and that of backwards it begins."""

    def __init__(self, draws: Sequence[DrawSpec]) -> None:
        self._layout = Layout(draws)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._key = torch.empty((), dtype=torch.int64)
        self._first = 0
        self._examples = 1
        self.left_to_micro_batch: dict[str, str] = {}
        """Draws that belong to micro-batches: by their place in the user's code, the operation."""

    def set_examples(self, first: int, examples: int) -> None:
        """The micro-batch that runs next: its first example in the global batch, and how many it has."""
        self._first, self._examples = first, examples

    def __enter__(self) -> None:
        self._before = _active.get(threading.get_ident())
        _active[threading.get_ident()] = self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _active[threading.get_ident()]
        else:
            _active[threading.get_ident()] = self._before

    # What the operations' handlers ask for

    def belongs_to_step(self, shape: tuple[int, ...]) -> bool:
        """Whether all micro-batches have the same numbers."""
        return self._layout.find(shape, self._examples) == (True, None)

    def new_key(self) -> int:
        """The next draw's."""
        _aten.random_.default.redispatch(_CPU, self._key)
        return int(self._key.item())

    def generator(self, device: torch.device, seed: int) -> torch.Generator:
        """A generator of our own, seeded."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(seed >> 1)

    def micro_batch_generator(self, func: Any, device: torch.device) -> torch.Generator:
        """For a draw that belongs to the micro-batch; it is noted."""
        self.note_micro_batch(func)
        return self.generator(device, mix(self.new_key() ^ self._first))

    def seed_micro_batch(self, func: Any, device: torch.device) -> None:
        """Seeds the device's global generator for an operation that takes no other."""
        self.note_micro_batch(func)
        seed = mix(self.new_key() ^ self._first) >> 1
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

    def note_micro_batch(self, func: Any) -> None:
        place = users_code()
        if place not in self.left_to_micro_batch:
            self.left_to_micro_batch[place] = str(func)
            _log.info("random numbers belong to the micro-batch here, not to examples", operation=str(func), at=place)

    def fill(self, func: Any, tensor: Tensor, fill: Fill) -> None:
        """Fills `tensor` with the numbers of its examples."""
        keyed, dim = self._layout.find(tuple(tensor.shape), self._examples)
        if tensor.numel() == 0:
            return
        if not keyed:
            fill(tensor, self.micro_batch_generator(func, tensor.device))
        elif dim is None:
            fill(tensor, self.generator(tensor.device, mix(self.new_key())))
        else:
            self._fill_examples(tensor, dim, fill)

    def _fill_examples(self, tensor: Tensor, dim: int, fill: Fill) -> None:
        n, device = self._examples, tensor.device
        key, e = self.new_key(), tensor.numel() // n
        budget = _GROUP_NUMBERS_CPU if device.type == "cpu" else _GROUP_NUMBERS
        g = 1 << (min(max(budget // e, 1), _LARGEST_GROUP).bit_length() - 1)
        in_place = dim == 0 and tensor.is_contiguous()
        rows = tensor.view(n, e) if in_place else tensor.new_empty((n, e))
        for group in range(self._first // g, (self._first + n - 1) // g + 1):
            begin, generator = group * g - self._first, self.generator(device, mix(key ^ group))
            if begin >= 0 and begin + g <= n:
                fill(rows[begin : begin + g], generator)
            else:
                whole = tensor.new_empty((g, e))
                fill(whole, generator)
                low, high = max(begin, 0), min(begin + g, n)
                rows[low:high] = whole[low - begin : high - begin]
        if not in_place:
            moved = tensor.movedim(dim, 0)
            moved.copy_(rows.view(moved.shape))

    def each_example(
        self, func: Any, tensors: Sequence[Tensor], shape: tuple[int, ...], draw: Callable[..., Tensor]
    ) -> Tensor:
        """For operations whose distribution differs from number to number: `draw(generator, *tensors)`, by examples.

        `shape`: of the result.
        """
        device, n = tensors[0].device, self._examples
        keyed, dim = self._layout.find(shape, n)
        if not keyed:
            return draw(self.micro_batch_generator(func, device), *tensors)
        key = self.new_key()
        if dim is None:
            return draw(self.generator(device, mix(key)), *tensors)
        k = shape[dim] // n
        behind = len(shape) - dim  # broadcasting counts dimensions from the last
        parts = []
        for i in range(n):
            own = [
                t.narrow(-behind, i * k, k) if t.dim() >= behind and t.shape[-behind] == n * k else t for t in tensors
            ]
            parts.append(draw(self.generator(device, mix(key ^ (self._first + i))), *own))
        return torch.cat(parts, dim)
