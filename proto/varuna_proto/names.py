"""Names of jobs and VMs that become parts of paths."""

from __future__ import annotations

import re

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
