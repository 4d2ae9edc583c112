"""Varuna: train PyTorch models too large for one GPU on spot VMs. What training scripts import.

The names are looked up when they are first used: importing PyTorch takes seconds, which `varuna.launcher` and
`varuna.run_varuna`, who live in this package too, have no use for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from varuna import stacks

if TYPE_CHECKING:
    from varuna import checkpoint as checkpoint
    from varuna import data
    from varuna.cut_point import CutPoint
    from varuna.departure import GenerationEnded, PeerLost
    from varuna.describe import describe_sections
    from varuna.launch import get_this_rank_config_varuna, get_varuna_config
    from varuna.opaque_calls import opaque
    from varuna.profiler import Profiler
    from varuna.training import Varuna

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
    "opaque",
]

_HOMES = {
    "CutPoint": "cut_point",
    "GenerationEnded": "departure",
    "PeerLost": "departure",
    "Profiler": "profiler",
    "Varuna": "training",
    "describe_sections": "describe",
    "get_this_rank_config_varuna": "launch",
    "get_varuna_config": "launch",
    "opaque": "opaque_calls",
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "data"):
        return importlib.import_module(f"varuna.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'varuna' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"varuna.{_HOMES[name]}"), name)
    globals()[name] = value  # from now on without this function
    return value


def __dir__() -> list[str]:
    return __all__


stacks.answer_the_agent()
