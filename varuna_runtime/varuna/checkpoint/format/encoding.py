"""Nested Python state as JSON plus tensors, without pickle.

JSON has no tuples, no tensors, and only text keys, so these are written as one-key objects whose key starts with `$`:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$counter": [[key, count], ...]}`,
`{"$array": [type, shape, name]}` for NumPy arrays, and the numbers of `varuna.checkpoint.format.numbers`.
Floats survive exactly (shortest round-trip text; NaN and the infinities as Python's json writes them).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.numbers import decode_number, encode_number, is_number

__all__ = ["decode_state", "encode_state"]

_DEEPEST = 100
"""Levels of nesting: far more than a state needs, and well below the interpreter's recursion limit."""


def encode_state(value: Any, where: str) -> tuple[Any, dict[str, Tensor]]:
    """`value` as (JSON value, tensors by name). Tensors are named by their path, which starts with `where`.

    Raises CheckpointError, with the path, for the first value that is not a number, text, None, a list, a tuple, a
    dict, a tensor or an array of numbers, and for a value that is nested too deeply (a list that holds itself).
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, where, tensors), tensors


def _encode(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise CheckpointError(f"{path[:80]}… is nested more than {_DEEPEST} levels deep: does it hold itself?")
    if value is None or isinstance(value, str):
        return value
    if is_number(value):
        return encode_number(value)
    if isinstance(value, Tensor):
        return {"$tensor": _put_tensor(value, path, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": [value.dtype.str, list(value.shape), _put_tensor(_array_bytes(value, path), path, tensors)]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{index}", tensors, depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors, depth + 1)
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "give numbers, text, None, lists, tuples, dicts, tensors or arrays of numbers"
    )


def _put_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Add the tensor to `tensors`; returns its name there."""
    while path in tensors:  # keys 1 and "1" of one dict have the same path
        path += "'"
    tensors[path] = value
    return path


def _array_bytes(value: np.ndarray[Any, Any], path: str) -> Tensor:
    if value.dtype.kind not in "biufc":
        raise CheckpointError(f"{path} is an array of {value.dtype}, which a checkpoint cannot hold: give numbers")
    return torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0)


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if isinstance(value, Counter):
        pairs = [[_encode(key, f"{path}/{key}", tensors, depth), int(count)] for key, count in value.items()]
        return {"$counter": pairs}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}/{key}", tensors, depth) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if not (key is None or isinstance(key, str) or is_number(key)):
            raise CheckpointError(f"{path} has the key {key!r} ({type(key).__name__}): keys must be text or numbers")
        encoded_key = _encode(key, path, tensors)
        shown = key if isinstance(encoded_key, str | int | float | None) else json.dumps(encoded_key)
        pairs.append([encoded_key, _encode(item, f"{path}/{shown}", tensors, depth)])
    return {"$dict": pairs}


def decode_state(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode_state`. Raises CheckpointError for malformed content or a missing tensor."""
    try:
        return _decode(encoded, tensors)
    except KeyError as error:
        raise CheckpointError(f"its state names {error}, and no file holds a tensor of that name") from None
    except (TypeError, ValueError, RecursionError) as error:  # items that are not pairs, unhashable keys
        raise CheckpointError(f"its state is malformed: {error}") from None


def _decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match encoded:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$array": [str(kind), list(shape), str(name)]}:
            return np.frombuffer(bytearray(tensors[name].numpy().tobytes()), dtype=kind).reshape(shape)
        case {"$tuple": list(items)}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$dict": list(pairs)}:
            return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
        case {"$counter": list(pairs)}:
            return Counter({_decode(key, tensors): count for key, count in pairs})
    number = decode_number(encoded)
    return {key: _decode(item, tensors) for key, item in encoded.items()} if number is None else number
