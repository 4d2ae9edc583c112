"""Numbers that JSON lacks, as one-key objects that keep their type.

`{"$complex": [real, imaginary]}`, `{"$fraction": "1/3"}`, `{"$decimal": "0.1"}`, `{"$int": "0x…"}` for integers of more
digits than Python prints, `{"$numpy": [type, number]}` for NumPy scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, DecimalException
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["decode_number", "encode_number", "is_number"]

_PRINTED_BITS = 4096
"""Python refuses to print integers of more than 4300 digits, which have more than three times as many bits."""


def is_number(value: Any) -> bool:
    """Whether `encode_number` accepts `value`."""
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, bool | int | float | complex | Fraction | Decimal)


def encode_number(value: Any) -> Any:
    """A JSON value for any number."""
    if isinstance(value, np.generic):
        return {"$numpy": [value.dtype.name, _encode_numpy(value)]}
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        # int(): an IntEnum would print as its name.
        return int(value) if value.bit_length() <= _PRINTED_BITS else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, Fraction):
        return {"$fraction": [encode_number(value.numerator), encode_number(value.denominator)]}
    return {"$decimal": str(value)}


def _encode_numpy(value: Any) -> Any:
    if value.dtype.kind == "c":
        return [_encode_numpy(value.real), _encode_numpy(value.imag)]
    if value.dtype.kind == "f" and value.dtype.itemsize > 8:
        return str(value)  # more precise than Python's floats
    return value.item()


def decode_number(encoded: dict[str, Any]) -> Any:
    """The number in an object that `encode_number` made; None for any other. Raises ValueError or TypeError."""
    if len(encoded) != 1:
        return None
    [(key, content)] = encoded.items()
    decode = _DECODERS.get(key)
    return None if decode is None else decode(content)


def _decode_complex(content: Any) -> complex:
    real, imaginary = content
    return complex(real, imaginary)


def _decode_fraction(content: Any) -> Fraction:
    numerator, denominator = (decode_number(part) if isinstance(part, dict) else part for part in content)
    return Fraction(numerator, denominator)


def _decode_decimal(content: Any) -> Decimal:
    try:
        return Decimal(content)
    except DecimalException as error:
        raise ValueError(f"{content!r} is no decimal number") from error


def _decode_numpy(content: Any) -> Any:
    name, number = content
    kind = np.dtype(name)
    if kind.kind == "c":
        value = np.empty((), dtype=kind)
        value.real, value.imag = number
        return value[()]
    return kind.type(number)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$complex": _decode_complex,
    "$fraction": _decode_fraction,
    "$decimal": _decode_decimal,
    "$int": lambda content: int(content, 16),
    "$numpy": _decode_numpy,
}
