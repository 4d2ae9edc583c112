"""How large the numbers and texts may be that processes send each other, and that users submit.

Whoever sends stays below the bounds, and whoever receives checks them again: the other side may be broken, or hostile.
"""

from __future__ import annotations

import math

MOST_INT = 2**31 - 1
"""Of generations, ranks and sizes: what the protocol's and the store's narrow integers hold."""
MOST_STEP = 10**9
"""More than any training takes: a step beyond it is a lie or a defect."""
MOST_EXACT = 2**53
"""The largest count that JSON carries exactly: bytes, microseconds."""
MOST_SECONDS = 1e9
"""Thirty years."""
MOST_GPUS = 2**20
"""Of a whole fleet."""
MOST_GPUS_OF_A_VM = 1024
MOST_LOSS = 1e100
"""The sum of any number of losses below it is a number."""

NAME_CHARS = 255
"""What the store's short columns hold."""
URL_CHARS = 4096
ERROR_CHARS = 16_000
"""Of a traceback or the last lines of a log."""


def text_flaw(text: str) -> str | None:
    """Why the text can be neither sent nor stored; None: it can. PostgreSQL holds no NUL, and UTF-8 no surrogate."""
    if "\0" in text:
        return "has a NUL character in it: take it out"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half a character in it ({text[error.start]!r} at {error.start}): it cannot be written as UTF-8"
    return None


def clean_text(text: str, most_chars: int) -> str:
    """The text as it can be sent and stored: without NUL and half characters, and only its last `most_chars`."""
    kept = text[-most_chars:].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return kept if text_flaw(kept) is None else kept.encode(errors="replace").decode()


def bounded(number: float, most: float) -> float:
    """The number, if it is one, brought to between 0 and `most`; what is no number becomes 0."""
    return 0.0 if math.isnan(number) else min(max(number, 0.0), most)
