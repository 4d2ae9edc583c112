"""What a holder has: the files that its stage would make in a checkpoint, laid out over its live tensors.

Nothing is copied where the tensors are in host memory, and no file is written: a file here is a row of views on memory.
"""

from __future__ import annotations

import json
import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_leaves

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import FileEntry, Receipt, SampleCursor, SealedDocument, parse_sealed_document
from varuna.checkpoint.format.tensor_file import LENGTH_BYTES, HeaderReader, iterate_pieces
from varuna.checkpoint.loading.reader import FileContent
from varuna.checkpoint.saving.receipts import make_receipt
from varuna.checkpoint.saving.snapshot import HostBuffers, make_snapshot
from varuna.checkpoint.state.rank_state import TrainingState
from varuna.devices.accelerator import is_accelerator, release_cached_memory

__all__ = [
    "HeldFile",
    "HeldFiles",
    "Inventory",
    "decode_inventories",
    "decode_inventory",
    "encode_inventories",
    "encode_inventory",
    "free_device_memory",
    "make_inventory",
]

_LARGEST_BYTES = 1 << 28
"""Of an inventory; those of large models have a few megabytes."""


class Inventory(SealedDocument):
    """The contents of one holder."""

    schema_: Literal["varuna.inventory/1"] = Field(default="varuna.inventory/1", alias="schema")
    address: str = ""
    """`host:port`, where the holder gives its files."""
    published_as: int | None = None
    """The rank that its process has had since, in a generation that was not to begin with this state."""
    receipt: Receipt
    """Its files, as if it had written them as the only replica of its stage. They have no checksums: each chunk gets
    its own on the way."""
    p: int = Field(ge=1)
    d: int = Field(ge=1)
    """The shape of the generation that it has left."""
    section_count: int = Field(ge=1)
    seed: int
    cursor: SampleCursor | None
    state_dict: dict[str, str]
    headers: dict[str, str]
    """By file: the header, without its length before it."""

    @property
    def rank(self) -> int:
        """Of the holder, in the generation that its process was in last."""
        return self.receipt.rank if self.published_as is None else self.published_as

    @property
    def step(self) -> int:
        return self.receipt.step

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    def find_file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.receipt.files if entry.name == name), None)

    def has_same_file(self, entry: FileEntry, other: Inventory) -> bool:
        """Whether its file of that name is laid out as `entry`, which `other` has."""
        own = self.find_file(entry.name)
        is_alike = self.headers.get(entry.name) == other.headers.get(entry.name)
        return own is not None and own.bytes == entry.bytes and is_alike

    def read_outline(self, entry: FileEntry) -> FileContent:
        """The file's tensors without memory, and its metadata. Raises CheckpointError for a malformed header."""
        header = self.headers.get(entry.name, "").encode()
        reader = HeaderReader(entry.bytes)
        reader.add_piece(struct.pack("<Q", len(header)) + header)
        try:
            return FileContent(*reader.read_outline())
        except ValueError as error:
            raise CheckpointError(
                f"{entry.name} of the process that was rank {self.rank} is not a safetensors file: {error}"
            ) from error


def encode_inventory(inventory: Inventory) -> bytes:
    """As it goes to other processes."""
    return zlib.compress(inventory.to_bytes(), level=1)


def decode_inventory(data: bytes, where: str) -> Inventory:
    """The inverse of `encode_inventory`. Raises CheckpointError for anything else."""
    try:
        unpacked = zlib.decompressobj().decompress(data, _LARGEST_BYTES)
    except zlib.error as error:
        raise CheckpointError(f"{where} is no inventory: {error}") from None
    return parse_sealed_document(Inventory, unpacked, where)


def encode_inventories(inventories: Iterable[Inventory]) -> str:
    """As text, for the rendezvous store and for other ranks."""
    return json.dumps([b64encode(encode_inventory(inventory)).decode() for inventory in inventories])


def decode_inventories(text: str | bytes, where: str) -> list[Inventory]:
    """The inverse of `encode_inventories`. Raises CheckpointError for anything else."""
    try:
        return [decode_inventory(b64decode(each), where) for each in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where} is no inventory: {error}") from None


@dataclass(frozen=True)
class HeldFile:
    """A file over live tensors."""

    bytes: int
    pieces: tuple[memoryview, ...]
    """The header, and the tensors' own memory."""

    def iterate_chunks(self, offset: int, chunk_bytes: int) -> Iterator[list[memoryview]]:
        """The bytes from `offset` on, in chunks of `chunk_bytes` (the last may be smaller), each in parts."""
        chunk: list[memoryview] = []
        room = chunk_bytes
        for piece in self.pieces:
            if offset >= len(piece):
                offset -= len(piece)
                continue
            at, offset = offset, 0
            while at < len(piece):
                part = piece[at : at + room]
                chunk.append(part)
                at += len(part)
                room -= len(part)
                if not room:
                    yield chunk
                    chunk, room = [], chunk_bytes
        if chunk:
            yield chunk


@dataclass(frozen=True)
class HeldFiles:
    """What a holder gives, and its inventory."""

    inventory: Inventory
    files: dict[str, HeldFile]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class _LiveTensors(HostBuffers):
    """Hands out the tensors themselves; those on a GPU, and those that are not contiguous, as copies."""

    def copy_tensor(self, key: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor.detach().resolve_conj().resolve_neg().contiguous()
        return super().copy_tensor(key, tensor)


def make_inventory(
    state: TrainingState,
    step: int,
    *,
    generation: int,
    rank: int,
    published_as: int | None = None,
    buffers: HostBuffers | None = None,
) -> HeldFiles:
    """What the process that was `rank` of `generation` holds after `step` steps: its whole stage.

    `published_as`: its rank since then. `buffers`: memory for copies of all tensors; None: the files lie over the
    tensors themselves, which must not change while they are given. Raises CheckpointError for state that no checkpoint
    can hold.
    """
    copied = make_snapshot(
        state,
        step,
        generation=generation,
        replica=0,
        replicas=1,
        rank=rank,
        buffers=_LiveTensors() if buffers is None else buffers,
        has_job_states=True,
    )
    files: dict[str, HeldFile] = {}
    entries: list[FileEntry] = []
    for file in copied.files:
        try:
            pieces = tuple(iterate_pieces(file.tensors, file.metadata))
        except KeyError as error:
            raise CheckpointError(f"{file.name} has a tensor of {error}, which no checkpoint can hold") from None
        files[file.name] = HeldFile(sum(map(len, pieces)), pieces)
        entries.append(
            FileEntry(
                name=file.name,
                kind=file.kind,
                section=file.section,
                holds=file.holds,
                bytes=files[file.name].bytes,
                checksum="",
            )
        )
    position = state.position
    receipt = make_receipt(copied, entries, generation=generation, rank=rank, world_size=position.p * position.d)
    inventory = Inventory(
        published_as=published_as,
        receipt=receipt,
        p=position.p,
        d=position.d,
        section_count=copied.section_count,
        seed=copied.seed,
        cursor=copied.cursor,
        state_dict=copied.state_dict,
        headers={name: bytes(file.pieces[0][LENGTH_BYTES:]).decode() for name, file in files.items()},
    )
    return HeldFiles(inventory, files)


def free_device_memory(state: TrainingState) -> None:
    """Ends the use of the device's memory by `state`, which is of no use afterwards."""
    tensors = [*state.tensors.values(), *state.averages.values()]
    tensors += [tensor.grad for tensor in state.parameters.values() if tensor.grad is not None]
    kept = [value for optimizer in state.optimizers for value in optimizer.state.values()]
    tensors += [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if is_accelerator(tensor.device):
            tensor.untyped_storage().resize_(0)
    release_cached_memory(tensor.device for tensor in tensors)
