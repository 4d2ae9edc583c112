"""Weights from safetensors files: a stage reads its own tensors, each straight into the memory where it will stay.

The files are those of Hugging Face's `save_pretrained`, or any others with the names of the model's `state_dict()`: one
file, or several with an index. One name of a tied tensor is enough.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.tensor_file import DTYPES, LENGTH_BYTES, TensorEntry, parse_header
from varuna.checkpoint.storage.store import CheckpointStore, local_path
from varuna.diagnostics.loading_progress import LOADING_PROGRESS

__all__ = ["PretrainedWeights"]

_log = structlog.get_logger("varuna")

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors library's limit."""
_PIECE_BYTES = 16 * 1024 * 1024
"""Bytes read at a time: the only memory that reading takes besides the tensors."""


@dataclass(frozen=True)
class _TensorLocation:
    """A tensor's file, and its name there."""

    file: str
    name: str


class PretrainedWeights:
    """Values for a model's parameters and buffers, by their first names. A `varuna.partition.ValueSource`."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        model: nn.Module,
        first_names: Mapping[str, str],
        *,
        logs_differences: bool = True,
    ) -> None:
        """Locates all tensors, and reads none of them yet.

        Args:
            source: the path or URL of a folder written by `save_pretrained`, or of one `.safetensors` file.
            first_names: for every name in `model.state_dict()`: the first name of that tensor.
            logs_differences: whether to log what the files and the model do not have in common.

        Raises:
            ValueError: the files do not fit the model or cannot be read, or they lack a parameter that is on `meta`.
                A missing parameter on the CPU keeps its value.
        """
        self._files = _WeightFiles(os.fspath(source))
        self._places, left_over = _places(self._files, model, first_names)
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        missing = [name for name in dict.fromkeys(first_names.values()) if name in tensors and name not in self._places]
        hollow = [name for name in missing if tensors[name].is_meta and isinstance(tensors[name], nn.Parameter)]
        if hollow:
            raise ValueError(
                f"weights {self._files} lack {_some(hollow)}, which the model has on meta"
                + (f" (they hold, and the model lacks, {_some(left_over)})" if left_over else "")
                + ": give the weights of this model, or build what is new in it on the CPU: model.head = nn.Linear(…)"
            )
        if logs_differences and missing:
            _log.warning("not in the weights: the model's own initial values stay", names=_some(missing))
        if logs_differences and left_over:
            _log.warning("in the weights, but not in the model", names=_some(left_over))

    def __contains__(self, name: object, /) -> bool:
        return name in self._places

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fills `tensor`, whose type and device stay, with the value of `name`. Raises ValueError if it has another
        shape there, or cannot be read."""
        place = self._places[name]
        entry = self._files.find_entry(place)
        if entry.shape != tuple(tensor.shape):
            raise ValueError(
                f"weights {self._files}: {name} is {list(entry.shape)} there and {list(tensor.shape)} in the model: "
                "are they of a model of the same configuration?"
            )
        self._files.read_into(place, entry, tensor)


def _places(
    files: _WeightFiles, model: nn.Module, first_names: Mapping[str, str]
) -> tuple[dict[str, _TensorLocation], list[str]]:
    """The location of each first name's value, and the names in the files that the model lacks."""
    name_in_model = _renaming(model, first_names, files)
    stored: dict[str, str] = {}
    left_over = []
    for name in files.names:
        renamed = name_in_model(name)
        if renamed in first_names:
            stored[renamed] = name
        else:
            left_over.append(name)
    places: dict[str, _TensorLocation] = {}
    for name, first in first_names.items():  # in the model's order: the first of tied names wins
        if name in stored and first not in places:
            places[first] = _TensorLocation(files.names[stored[name]], stored[name])
    return places, left_over


def _renaming(model: nn.Module, names: Collection[str], files: _WeightFiles) -> Callable[[str], str]:
    """Maps a name in the files to the model's. transformers has several names for many tensors."""
    prefix = getattr(model, "base_model_prefix", None)
    rename: Callable[..., tuple[str, str | None]]
    if "transformers" not in sys.modules or not prefix:
        return lambda name: name
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # transformers 4: names in files are the model's, except for the prefix
        transforms, rename = [], _change_prefix
        renamings, converters = [], []
    else:
        transforms = mapping.get_model_conversion_mapping(model)
        rename = loading.rename_source_key
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    known = dict.fromkeys(names, True)

    def name_in_model(name: str) -> str:
        if name in names:
            return name
        renamed, converted = rename(name, renamings, converters, prefix, known)
        if converted is not None and renamed in names:
            raise ValueError(
                f"weights {files}: {name} is one of several tensors that transformers makes {renamed} of; write them "
                "as the model has them: model.save_pretrained(folder, save_original_format=False)"
            )
        return str(renamed)

    return name_in_model


def _change_prefix(
    name: str, _renamings: Sequence[Any], _converters: Sequence[Any], prefix: str, known: Mapping[str, bool]
) -> tuple[str, None]:
    without = name.removeprefix(f"{prefix}.")
    return (without if without in known else f"{prefix}.{name}" if f"{prefix}.{name}" in known else name), None


class _WeightFiles:
    """The safetensors files of one model."""

    def __init__(self, source: str) -> None:
        self._source = source
        if source.endswith(_PICKLES):
            raise self._pickle(source)
        one_file = source.endswith(".safetensors")
        folder, _, file = source.rpartition("/") if one_file else (source, "", _FILE)
        self._local = local_path(folder or ("/" if source.startswith("/") else "."))
        self._store = CheckpointStore(
            folder if self._local is None else str(self._local), on_answer=LOADING_PROGRESS.count_piece
        )
        self._headers: dict[str, dict[str, TensorEntry]] = {}
        if self._local is not None and not self._local.is_dir():
            raise ValueError(
                f"weights {self}: no such folder; give one with {_FILE} in it, as save_pretrained writes it (one from "
                "the hub: hf download NAME --local-dir FOLDER)"
            )
        self.names = self._names(file, one_file)
        """The file of each tensor."""

    def __str__(self) -> str:
        return self._source

    def _names(self, file: str, one_file: bool) -> dict[str, str]:
        reason = ""
        try:
            return dict.fromkeys(self._header(file), file)
        except CheckpointError as error:
            reason = str(error)
        with self._explain_errors():
            index = None if one_file else self._store.get(_INDEX)
        if index is not None:
            try:
                return {str(name): str(there) for name, there in json.loads(index)["weight_map"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"weights {self}: {_INDEX} is no index of files: {error!r}") from error
        if self._local is not None:
            for path in sorted(self._local.iterdir()) if not one_file else ():
                if path.name.endswith(_PICKLES):
                    raise self._pickle(path.name)
            raise ValueError(f"weights {self}: no {file}" + ("" if one_file else f" and no {_INDEX}") + " there")
        raise ValueError(f"weights {self}: {reason}")

    def _pickle(self, name: str) -> ValueError:
        return ValueError(
            f"weights {self._source}: {name} is a pickle, which may run code when it is read; write safetensors: "
            "AutoModel….from_pretrained(folder).save_pretrained(new_folder), or safetensors.torch.save_file"
        )

    def find_entry(self, place: _TensorLocation) -> TensorEntry:
        with self._explain_errors():
            header = self._header(place.file)
        if place.name not in header:
            raise ValueError(f"weights {self}: {place.file} holds no {place.name}, though {_INDEX} says so")
        return header[place.name]

    def read_into(self, place: _TensorLocation, entry: TensorEntry, tensor: Tensor) -> None:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or not (dtype is tensor.dtype or (dtype.is_floating_point and tensor.is_floating_point())):
            raise ValueError(
                f"weights {self}: {place.name} is {dtype or entry.dtype} there and {tensor.dtype} in the model"
            )
        whole = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = whole.view(-1)
        end = entry.start + tensor.numel() * dtype.itemsize
        with torch.no_grad(), self._explain_errors():
            for start in range(entry.start, end, _PIECE_BYTES):
                length = min(_PIECE_BYTES, end - start)
                piece = bytearray(self._store.get_range(place.file, start, length))
                if len(piece) != length or entry.end != end:
                    raise ValueError(f"weights {self}: {place.file} ends within {place.name}: copy it again")
                first = (start - entry.start) // dtype.itemsize
                flat[first : first + length // dtype.itemsize].copy_(torch.frombuffer(piece, dtype=dtype))
            if whole is not tensor:
                tensor.copy_(whole)

    def _header(self, file: str) -> dict[str, TensorEntry]:
        """Raises CheckpointError when there is no such file."""
        if file not in self._headers:
            start = self._store.get_range(file, 0, LENGTH_BYTES)
            try:
                (length,) = struct.unpack("<Q", start)
                if length > _LONGEST_HEADER:
                    raise ValueError(f"a header of {length} bytes")
                self._headers[file] = parse_header(self._store.get_range(file, LENGTH_BYTES, length))[0]
            except (ValueError, struct.error, CheckpointError) as error:
                raise ValueError(f"weights {self}: {file} is no safetensors file ({error}): copy it again") from error
        return self._headers[file]

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise ValueError(f"weights {self}: {error}") from error


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
