"""Varuna's one process on every VM: it starts workers, watches them, and reports to the manager."""
