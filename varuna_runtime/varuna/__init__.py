"""Varuna: train PyTorch models too large for one GPU on spot VMs. What training scripts import.

Names are imported at their first use, because importing PyTorch takes seconds and `varuna.launcher` and
`varuna.run_varuna`, which are in this package, do not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from varuna.diagnostics import stacks

if TYPE_CHECKING:
    from varuna import checkpoint as checkpoint
    from varuna import data
    from varuna.calibration.profiler import Profiler
    from varuna.cut_point import CutPoint
    from varuna.distributed.departure import GenerationEnded, PeerLost
    from varuna.distributed.worker_environment import get_this_rank_config_varuna, get_varuna_config
    from varuna.inspection.text import describe_sections
    from varuna.partition.opaque_calls import opaque
    from varuna.training import Varuna
    from varuna.worker.script_values import log

__all__ = [
    "CutPoint",
    "GenerationEnded",
    "PeerLost",
    "Profiler",
    "Varuna",
    "data",
    "describe_sections",
    "get_this_rank_config_varuna",
    "get_varuna_config",
    "log",
    "opaque",
]

_HOMES = {
    "CutPoint": "cut_point",
    "GenerationEnded": "distributed.departure",
    "PeerLost": "distributed.departure",
    "Profiler": "calibration.profiler",
    "Varuna": "training",
    "describe_sections": "inspection.text",
    "get_this_rank_config_varuna": "distributed.worker_environment",
    "get_varuna_config": "distributed.worker_environment",
    "log": "worker.script_values",
    "opaque": "partition.opaque_calls",
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "data"):
        return importlib.import_module(f"varuna.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'varuna' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"varuna.{_HOMES[name]}"), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return __all__


stacks.register_stack_signal()
