"""Names of jobs and VMs that become parts of paths, and of types of GPU."""

from __future__ import annotations

import re

_LONGEST_GPU_TYPE = 255
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_plain(name: str) -> bool:
    """1 to 63 letters, digits, `.`, `_` or `-`, the first a letter or digit: one segment of a path, never `..`."""
    return _PLAIN.fullmatch(name) is not None


def plain(name: str, what: str) -> str:
    """The name, if it may be a segment of a path. Raises ValueError that starts with `what`."""
    if not is_plain(name):
        raise ValueError(
            f"{what} {name[:80]!r} is no plain name: 1 to 63 letters, digits, '.', '_' or '-', the first a letter or "
            "digit, are taken"
        )
    return name


def clean_gpu_type(name: str) -> str:
    """A GPU type's name, as a driver or an operator gives it, as all store and compare it; empty: there is none."""
    return "".join(sign for sign in name if sign.isprintable())[:_LONGEST_GPU_TYPE]
