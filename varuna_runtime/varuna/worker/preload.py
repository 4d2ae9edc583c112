"""Imports all that a worker will: what a process does ahead of the moment when a worker is wanted.

Imports only: no thread, no device, no random number, so that workers can be forked from the process.
"""

import importlib

__all__ = ["begin_worker"]

for _name in (
    "torch._dynamo",  # torch's optimizers import it when the first is made
    "varuna.training",
):
    importlib.import_module(_name)


def begin_worker() -> None:
    """In a forked worker, when its environment is complete and before its script begins."""
    importlib.import_module("varuna.worker.newcomer").watch_reads()
