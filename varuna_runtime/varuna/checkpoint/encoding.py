"""Nested Python state as JSON plus tensors, without pickle.

JSON has no tuples, no tensors, and only text as keys; those are written as one-key objects whose key starts with `$`:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$counter": [[key, count], ...]}`.
Floats survive exactly (shortest round-trip text; NaN and the infinities as Python's json writes them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from varuna.checkpoint.errors import CheckpointError

__all__ = ["decode", "encode"]


def encode(value: Any, where: str) -> tuple[Any, dict[str, Tensor]]:
    """`value` as (JSON value, tensors by name). Tensors are named by their path, which starts with `where`.

    Raises CheckpointError naming the path of the first thing that is neither a number, text, None, a list, a tuple, a
    dict nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, where, tensors), tensors


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum would print as its name
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        while path in tensors:  # keys 1 and "1" of one dict have the same path
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "give numbers, text, None, lists, tuples, dicts or tensors"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Counter):
        return {"$counter": [[_encode(key, f"{path}/{key}", tensors), int(count)] for key, count in value.items()]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if not isinstance(key, str | int | float | bool | None):
            raise CheckpointError(f"{path} has the key {key!r} ({type(key).__name__}): keys must be text or numbers")
        pairs.append([key, _encode(item, f"{path}/{key}", tensors)])
    return {"$dict": pairs}


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given. Raises KeyError when a tensor is missing."""
    if isinstance(encoded, list):
        return [decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match encoded:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"$dict": list(pairs)}:
            return {key: decode(item, tensors) for key, item in pairs}
        case {"$counter": list(pairs)}:
            return Counter({decode(key, tensors): count for key, count in pairs})
    return {key: decode(item, tensors) for key, item in encoded.items()}
