"""Safetensors files without copies: written from the tensors' own memory, read as views on the file's bytes.

The format: 8 bytes of header length, the header (JSON: each tensor's dtype, shape, offsets), and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "LENGTH_BYTES",
    "HeaderReader",
    "TensorEntry",
    "iterate_pieces",
    "make_header",
    "parse_header",
    "read_tensors",
]

LENGTH_BYTES = 8
ALIGNMENT = 64
"""Bytes, as for torch's own memory. A file's data begins at a multiple of it; most of its tensors do, too."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Exclusive; `start` and `end` are offsets in the file, header included."""

    @property
    def item_bytes(self) -> int:
        return (self.end - self.start) // max(1, math.prod(self.shape))


def make_header(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """A new file's header with its length before it, and each tensor's offset in the file, in the file's order.

    The order is the safetensors library's: the widest types first, so that all are aligned, without holes. Only the
    sizes of `entries` matter, not their offsets.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    offsets: dict[str, int] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].item_bytes, name)):
        tensor = tensors[name]
        offsets[name] = offset
        end = offset + tensor.end - tensor.start
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    data_start = LENGTH_BYTES + len(text)
    return struct.pack("<Q", len(text)) + text, {name: data_start + offset for name, offset in offsets.items()}


def iterate_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a file with these tensors, which must be contiguous, on the CPU, and unchanged meanwhile.

    Raises KeyError for a type that the format does not know.
    """
    sizes = {
        name: TensorEntry(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), start=0, end=tensor.nbytes)
        for name, tensor in tensors.items()
    }
    header, offsets = make_header(sizes, metadata)
    yield memoryview(header)
    for name in offsets:
        if tensors[name].numel():
            array = tensors[name].reshape(-1).view(torch.uint8).numpy()
            yield memoryview(array)  # type: ignore[arg-type]  # numpy arrays are buffers, which its stubs say from 3.12 on


def parse_header(header: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors and the metadata in a header (without its length). Raises ValueError when it is malformed."""
    data_start = LENGTH_BYTES + len(header)
    try:
        document = json.loads(header)
        metadata: dict[str, str] = document.pop("__metadata__", {})
        found = {
            name: TensorEntry(
                dtype=str(entry["dtype"]),
                shape=tuple(int(size) for size in entry["shape"]),
                start=data_start + int(entry["data_offsets"][0]),
                end=data_start + int(entry["data_offsets"][1]),
            )
            for name, entry in document.items()
        }
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no header of a safetensors file: {error!r}") from error
    return found, metadata


class HeaderReader:
    """Reads the header of a file of `size` bytes that comes piece by piece."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._begin = bytearray()

    def add_piece(self, piece: bytes | memoryview) -> None:
        missing = self._wanted() - len(self._begin)
        while missing > 0 and len(piece) and self._wanted() <= self._size:
            self._begin += piece[:missing]
            piece = piece[missing:]
            missing = self._wanted() - len(self._begin)

    def read_outline(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The file's tensors, on `meta`, and its metadata. Raises ValueError as `read_tensors` does."""
        if len(self._begin) < LENGTH_BYTES:
            raise ValueError(f"{len(self._begin)} bytes are too few")
        if self._wanted() > self._size:
            raise ValueError(f"a header of {self._wanted() - LENGTH_BYTES} bytes")
        found, metadata = parse_header(bytes(self._begin[LENGTH_BYTES:]))
        return {
            name: torch.empty(entry.shape, dtype=_dtype_within(name, entry, self._size), device="meta")
            for name, entry in found.items()
        }, metadata

    def _wanted(self) -> int:
        if len(self._begin) < LENGTH_BYTES:
            return LENGTH_BYTES
        (length,) = struct.unpack_from("<Q", self._begin)
        return LENGTH_BYTES + int(length)


def read_tensors(data: bytearray | memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's tensors, as views on `data`, and its metadata. Raises ValueError when it is not such a file."""
    if len(data) < LENGTH_BYTES:
        raise ValueError(f"{len(data)} bytes are too few")
    (length,) = struct.unpack_from("<Q", data)
    if length > len(data) - LENGTH_BYTES:
        raise ValueError(f"a header of {length} bytes")
    found, metadata = parse_header(bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]))
    return {name: _view(data, name, entry) for name, entry in found.items()}, metadata


def _view(data: bytearray | memoryview, name: str, entry: TensorEntry) -> Tensor:
    dtype = _dtype_within(name, entry, len(data))
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start).reshape(entry.shape)


def _dtype_within(name: str, entry: TensorEntry, size: int) -> torch.dtype:
    """The tensor's type. Raises ValueError if it is unknown or the tensor exceeds the file's `size` bytes."""
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name} is of the unknown type {entry.dtype}")
    if entry.end > size or entry.end - entry.start != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name} {list(entry.shape)} does not lie within the file")
    return dtype
