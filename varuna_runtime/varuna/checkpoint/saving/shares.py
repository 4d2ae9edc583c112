"""Which replica writes which tensors: each an equal part of the stage's bytes, also of one large section."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils._pytree import tree_leaves

from varuna.checkpoint.state.rank_state import TrainingState

__all__ = ["choose_share", "count_bytes"]


def choose_share(state: TrainingState, replica: int, replicas: int) -> list[str]:
    """The parameters and buffers that `replica` of `replicas` writes, with their optimizer state.

    Replicas hold the same tensors, so all compute the same shares without communication. One replica writes the whole
    of a tensor, and its tensors are neighbours, so that few files are needed. Frozen tensors, which are rarely written,
    are divided separately.
    """
    own = [name for name in state.tensors if state.section_of[name] in state.sections]
    names = sorted(own, key=lambda name: state.section_of[name])  # stable: else in the model's order
    frozen = [name for name in names if name in state.frozen]
    return [
        *_part([name for name in names if name not in state.frozen], state, replica, replicas),
        *_part(frozen, state, replica, replicas),
    ]


def _part(names: list[str], state: TrainingState, replica: int, replicas: int) -> Iterable[str]:
    """The names whose middle lies in the replica's part of the bytes, laid end to end."""
    sizes = {name: count_bytes(name, state) for name in names}
    total = max(1, sum(sizes.values()))
    begin = 0
    for name, size in sizes.items():
        middle = 2 * begin + size
        if min(middle * replicas // (2 * total), replicas - 1) == replica:
            yield name
        begin += size


def count_bytes(name: str, state: TrainingState) -> int:
    """Bytes of a parameter or buffer with its optimizer state and its average."""
    tensor = state.tensors[name]
    kept = state.optimizer_state_of(tensor) if name in state.parameters else None
    average = state.averages.get(name)
    further = [*tree_leaves(kept or {}), *([] if average is None else [average])]
    return tensor.nbytes + sum(value.nbytes for value in further if isinstance(value, Tensor))
