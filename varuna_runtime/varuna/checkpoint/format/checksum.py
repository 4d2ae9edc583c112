"""The checksum that shows whether a checkpoint's file is whole.

XXH3-128 detects torn writes and flipped bits at the speed of memory; SHA-256 would take as long as the write itself.
No unkeyed checksum protects against forged checkpoints: the store's access rules do that.
"""

from __future__ import annotations

import xxhash

__all__ = ["Checksum"]


class Checksum:
    """The checksum of the bytes so far. Its text names the algorithm: `xxh3-128:99aa06d3...`."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        self._sum.update(data)

    def __str__(self) -> str:
        return f"xxh3-128:{self._sum.hexdigest()}"
