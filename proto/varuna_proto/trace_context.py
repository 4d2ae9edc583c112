"""W3C trace contexts of a morph and of its parts.

All ids follow from the job and the number of the generation that a morph begins: a manager that was restarted half-way
goes on with the same trace, and nothing has to be stored.
"""

from __future__ import annotations

import hashlib


def traceparent(job_id: str, generation: int) -> str:
    """The W3C trace context of the morph that begins the generation; its span is the trace's first."""
    digest = hashlib.sha256(f"varuna/{job_id}/{generation}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def child(parent: str, name: str) -> str:
    """The context of the span of this name under the one of `parent`; empty when that is."""
    if not parent:
        return ""
    version, trace_id, _, flags = parent.split("-")
    span_id = hashlib.sha256(f"{parent}/{name}".encode()).hexdigest()[:16]
    return "-".join((version, trace_id, span_id, flags))
