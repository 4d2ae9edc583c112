"""Random numbers that belong to examples, so that an example has the same ones in every micro-batch.

While a pass runs, torch's random operations call these streams (random_operations.py). Each draw gets a key from the
CPU's generator, which every section seeds from (seed, step, section). Activation checkpointing restores that generator,
so that it replays the keys too. The numbers of an example depend only on the key and on its place i in the global
batch:

- Neighbouring examples form groups of fixed size g, which torch's own kernel draws at once, from a generator that is
  seeded with (key, group). g depends on the size of an example's part, so that a group takes hardly longer than one
  example. A micro-batch drops the numbers of its first and last group that it does not need.
- A draw whose shape does not depend on the batch is equal for the whole step: all micro-batches have the same numbers,
  as in a step of plain PyTorch on the whole batch.
- A draw that cannot be divided by examples belongs to the micro-batch, with a seed from (key, first example). The
  profile records this, and the job then keeps its micro-batch size.

Letters: n examples in the micro-batch, k rows of the drawn tensor for each example, e numbers for each example, g.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from varuna.devices.accelerator import seed_device_generator
from varuna.diagnostics.user_code import user_code
from varuna.partition.cutting.shapes import DrawSpec
from varuna.pipeline.seed_mixing import mix_seed

__all__ = ["DrawLayout", "ExampleStreams", "active_streams", "bystander_generator"]

_log = structlog.get_logger("varuna")

_aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_LARGEST_GROUP = 64
_GROUP_NUMBERS_CPU = 512
"""Numbers in a group: drawing this many takes about as long as seeding a generator."""
_GROUP_NUMBERS = 1 << 19
"""On an accelerator: the kernel for this many takes no longer than its launch."""

Fill = Callable[[Tensor, torch.Generator], object]
"""Fills a contiguous tensor with random numbers."""

_active: dict[int, ExampleStreams] = {}
"""By thread: the streams of the pass that runs in it."""
_strangers: dict[torch.device, torch.Generator] = {}
"""Generators for other threads while a pass runs, which would otherwise advance its generator."""


def active_streams() -> ExampleStreams | None:
    """The streams of the pass, or of the backward, that runs in this thread."""
    streams = _active.get(threading.get_ident())
    if streams is None and torch._C._current_graph_task_id() != -1 and len(_active) == 1:
        streams = next(iter(_active.values()))  # a thread of autograd, in which checkpointing runs forwards again
    return streams


def bystander_generator(device: torch.device) -> torch.Generator | None:
    """The generator for a thread without a pass while others have one; None: the global generator."""
    if not _active:
        return None
    if device not in _strangers:
        _strangers[device] = torch.Generator(device)
        _strangers[device].seed()
    return _strangers[device]


class DrawLayout:
    """Finds the dimension of the examples in a drawn tensor, by the draws of the dry run."""

    def __init__(self, draws: Sequence[DrawSpec]) -> None:
        self._draws = draws
        self._known: dict[tuple[tuple[int, ...], int], tuple[bool, int | None]] = {}

    def find_examples_dim(self, shape: tuple[int, ...], examples: int) -> tuple[bool, int | None]:
        """(whether the draw belongs to examples or to the step; the dimension of the examples, None if to the step)."""
        known = self._known.get((shape, examples))
        if known is None:
            known = self._known[shape, examples] = self._find(shape, examples)
        return known

    def _find(self, shape: tuple[int, ...], examples: int) -> tuple[bool, int | None]:
        fitting = [draw for draw in self._draws if draw.matches_shape(shape, examples)]
        fitting = fitting or [draw for draw in self._draws if draw.may_match_shape(shape, examples)]
        dims = {draw.batch_dim for draw in fitting}
        if len(dims) != 1 or any(draw.problem for draw in fitting):
            return False, None
        return True, dims.pop()


class ExampleStreams:
    """The draws of one rank's passes. Active in a `with` block, for this thread and the backwards that it starts."""

    def __init__(self, draws: Sequence[DrawSpec]) -> None:
        self._layout = DrawLayout(draws)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._key = torch.empty((), dtype=torch.int64)
        self._first = 0
        self._examples = 1
        self.micro_batch_draws: dict[str, str] = {}
        """By place in the user's code: the operation of a draw that belongs to micro-batches."""

    def set_examples(self, first: int, examples: int) -> None:
        """Sets the micro-batch that runs next: its first example in the global batch, and its number of examples."""
        self._first, self._examples = first, examples

    def __enter__(self) -> None:
        self._before = _active.get(threading.get_ident())
        _active[threading.get_ident()] = self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _active[threading.get_ident()]
        else:
            _active[threading.get_ident()] = self._before

    # For the handlers of operations

    def belongs_to_step(self, shape: tuple[int, ...]) -> bool:
        """Whether all micro-batches of a step get the same numbers."""
        return self._layout.find_examples_dim(shape, self._examples) == (True, None)

    def new_key(self) -> int:
        """The key of the next draw."""
        _aten.random_.default.redispatch(_CPU, self._key)
        return int(self._key.item())

    def seeded_generator(self, device: torch.device, seed: int) -> torch.Generator:
        """A generator of Varuna's on `device`, with this seed."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(seed >> 1)

    def micro_batch_generator(self, func: Any, device: torch.device) -> torch.Generator:
        """The generator for a draw that belongs to the micro-batch, which is recorded."""
        self.record_micro_batch_draw(func)
        return self.seeded_generator(device, mix_seed(self.new_key() ^ self._first))

    def seed_micro_batch(self, func: Any, device: torch.device) -> None:
        """Seeds the device's global generator for an operation that accepts no other. Records the draw."""
        self.record_micro_batch_draw(func)
        seed_device_generator(device, mix_seed(self.new_key() ^ self._first) >> 1)

    def record_micro_batch_draw(self, func: Any) -> None:
        place = user_code()
        if place not in self.micro_batch_draws:
            self.micro_batch_draws[place] = str(func)
            _log.info(
                "random numbers of this operation belong to micro-batches, not to examples",
                operation=str(func),
                at=place,
            )

    def fill_tensor(self, func: Any, tensor: Tensor, fill: Fill) -> None:
        """Fills `tensor` with the numbers of its examples."""
        keyed, dim = self._layout.find_examples_dim(tuple(tensor.shape), self._examples)
        if tensor.numel() == 0:
            return
        if not keyed:
            fill(tensor, self.micro_batch_generator(func, tensor.device))
        elif dim is None:
            fill(tensor, self.seeded_generator(tensor.device, mix_seed(self.new_key())))
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
            begin, generator = group * g - self._first, self.seeded_generator(device, mix_seed(key ^ group))
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

    def draw_each_example(
        self, func: Any, tensors: Sequence[Tensor], shape: tuple[int, ...], draw: Callable[..., Tensor]
    ) -> Tensor:
        """Draws example by example with `draw(generator, *tensors)`, for distributions that differ between numbers.

        `shape`: the shape of the result.
        """
        device, n = tensors[0].device, self._examples
        keyed, dim = self._layout.find_examples_dim(shape, n)
        if not keyed:
            return draw(self.micro_batch_generator(func, device), *tensors)
        key = self.new_key()
        if dim is None:
            return draw(self.seeded_generator(device, mix_seed(key)), *tensors)
        k = shape[dim] // n
        behind = len(shape) - dim  # broadcasting counts dimensions from the last
        parts = []
        for i in range(n):
            own = [
                t.narrow(-behind, i * k, k) if t.dim() >= behind and t.shape[-behind] == n * k else t for t in tensors
            ]
            parts.append(draw(self.seeded_generator(device, mix_seed(key ^ (self._first + i))), *own))
        return torch.cat(parts, dim)
