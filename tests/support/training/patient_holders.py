"""How long a process waits for others when state goes from one to the next.

On a busy machine holders come late, and chunks take long: tests wait for them as long as they wait for anything.
"""

from __future__ import annotations

from types import ModuleType

from varuna.holdings import giving, held_state, taking

WAITS: tuple[tuple[ModuleType, str], ...] = (
    (held_state, "_INVENTORY_WAIT_S"),
    (held_state, "_WHOLE_WAIT_S"),
    (taking, "_CONNECT_S"),
    (taking, "SILENCE_S"),
    (taking, "_CHUNK_S"),
    (giving, "HANDSHAKE_S"),
    (giving, "SILENCE_S"),
    (giving, "_LAST_CHUNK_S"),
)
"""The modules, and their limits in seconds."""
