"""Bounds of the numbers and texts that processes send each other, and that users submit.

The sender stays below the bounds, and the receiver checks them again, because the sender may be broken or hostile.
"""

from __future__ import annotations

import math

MOST_INT = 2**31 - 1
"""For generations, ranks and sizes: the limit of the protocol's and the store's narrow integers."""
MOST_STEP = 10**9
"""More steps than any training takes; a higher one is a defect or forged."""
MOST_EXACT = 2**53
"""The largest count that JSON carries exactly: bytes, microseconds."""
MOST_SECONDS = 1e9
"""Thirty years."""
MOST_GPUS = 2**20
"""For a whole fleet."""
MOST_GPUS_OF_A_VM = 1024
MOST_LOGGED_NAMES = 64
"""That a job may log values under."""
LOGGED_NAME_CHARS = 100
MOST_LOSS = 1e100
"""The sum of any number of losses below it is finite."""

NAME_CHARS = 255
"""The length of the store's short columns."""
URL_CHARS = 4096
MOST_REPORT_BYTES = 1024 * 1024
"""For an agent's report, apart from a profile."""
ERROR_CHARS = 16_000
"""For a traceback or the last lines of a log."""


def text_flaw(text: str) -> str | None:
    """Why the text cannot be sent and stored; None: it can. PostgreSQL refuses NUL, and UTF-8 has no surrogates."""
    if "\0" in text:
        return "has a NUL character in it: take it out"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half a character in it ({text[error.start]!r} at {error.start}): it cannot be written as UTF-8"
    return None


def logged_name_flaw(name: str) -> str | None:
    """Why values cannot be logged under this name; None: they can."""
    if not name or name != name.strip():
        return "is empty, or begins or ends with a space"
    if len(name) > LOGGED_NAME_CHARS:
        return f"has more than {LOGGED_NAME_CHARS} characters"
    if not name.isprintable():
        return "has characters that cannot be printed"
    return text_flaw(name)


def clean_text(text: str, most_chars: int) -> str:
    """The last `most_chars` of the text, with NUL and surrogates replaced, so that it can be sent and stored."""
    kept = text[-most_chars:].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return kept if text_flaw(kept) is None else kept.encode(errors="replace").decode()


def bounded(number: float, most: float) -> float:
    """The number, clamped to 0 to `most`; NaN becomes 0."""
    return 0.0 if math.isnan(number) else min(max(number, 0.0), most)
