"""The sum by which a checkpoint's files are known to be whole.

XXH3-128 guards against torn writes and flipped bits at the speed of memory, where SHA-256 would take as long as the
writing itself; against somebody who forges checkpoints no unkeyed sum would help, and the store's access rules do.
"""

from __future__ import annotations

import xxhash

__all__ = ["Checksum"]


class Checksum:
    """Of the bytes so far. Its text names the algorithm: `xxh3-128:99aa06d3...`."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        self._sum.update(data)

    def __str__(self) -> str:
        return f"xxh3-128:{self._sum.hexdigest()}"
