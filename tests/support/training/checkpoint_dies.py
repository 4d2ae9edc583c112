"""The script of a rank that dies by SIGKILL while it saves a checkpoint, each rank at another point of the save.

Its one argument is a JSON file with a "folder". Rank r has `rank<r>/store` and `rank<r>/copies` there. It dies in the
middle of the r-th file that it writes (its copies, then the store's), or else before or after the manifest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from varuna.checkpoint import CheckpointWriter, ShapePosition, TrainingState
from varuna.checkpoint.format.tensor_file import iterate_pieces
from varuna.checkpoint.saving import host_files, writer
from varuna.checkpoint.storage.store import CheckpointStore

SECTIONS = 2
WRITES = 2 * (SECTIONS + 1)
"""The sections and the user's state, each as a copy and in the store."""
POINTS = WRITES + 2
"""At which it dies."""


def values(step: int) -> dict[str, Tensor]:
    return {f"weight{section}": torch.full((1 << 16,), float(10 * step + section)) for section in range(SECTIONS)}


def state(parameters: Mapping[str, Tensor]) -> TrainingState:
    return TrainingState(
        sections=range(SECTIONS),
        section_count=SECTIONS,
        parameters={name: nn.Parameter(value) for name, value in parameters.items()},  # trained: written at every save
        section_of={f"weight{section}": section for section in range(SECTIONS)},
        user={"scale": torch.tensor(1.0)},
    )


def checkpointer(folder: Path, generation: int) -> CheckpointWriter:
    return CheckpointWriter(
        str(folder / "store"),
        generation=generation,
        position=ShapePosition(rank=0, p=1, d=1),
        local=str(folder / "copies"),
    )


def save(of: CheckpointWriter, step: int) -> str:
    assert of.start_save(step, state(values(step)))
    outcome = of.wait(600.0)
    assert outcome is not None
    return outcome.result


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


def main() -> None:
    point = int(os.environ["RANK"])
    written = -1

    def deadly_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
        nonlocal written
        written += 1
        for piece in iterate_pieces(tensors, metadata):
            yield piece[: len(piece) // 2]
            if written == point:
                die()
            yield piece[len(piece) // 2 :]

    create = CheckpointStore.create

    def deadly_create(self: CheckpointStore, path: str, data: bytes) -> bool:
        if point == WRITES:
            die()
        create(self, path, data)
        die()

    of = checkpointer(Path(json.loads(Path(sys.argv[1]).read_text())["folder"]) / f"rank{point}", generation=2)
    host_files.iterate_pieces = writer.iterate_pieces = deadly_pieces
    CheckpointStore.create = deadly_create  # type: ignore[method-assign]
    save(of, 2)


if __name__ == "__main__":
    main()
