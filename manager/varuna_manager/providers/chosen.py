"""Which provider the settings ask for: `local`, `replay:TRACE` or `static:HOSTS`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_manager.providers.base import EmulatedProvider
from varuna_manager.providers.local import LocalProvider
from varuna_manager.providers.replay import ReplayProvider, ReplaySettings
from varuna_manager.providers.static import StaticProvider, read_hosts

if TYPE_CHECKING:
    from varuna_planner.spot_trace import SpotTrace

CHOICES = "local, replay:TRACE.csv or static:HOSTS.yaml"


def check_choice(chosen: str) -> str:
    """Raises ValueError, naming what is wrong with it or with its file."""
    kind, separator, path = chosen.partition(":")
    if kind == "local" and not separator:
        return chosen
    if kind == "replay" and path:
        _read_trace(Path(path))
    elif kind == "static" and path:
        read_hosts(Path(path))
    else:
        raise ValueError(f"expected {CHOICES}")
    return chosen


def chosen_provider(chosen: str, local: LocalProvider, replay: ReplaySettings, memory_dir: Path) -> EmulatedProvider:
    """The provider. `local`: has the VMs where there are no others. Raises ValueError."""
    kind, _, path = chosen.partition(":")
    if kind == "replay":
        return ReplayProvider(local, _read_trace(Path(path)), replay, memory_dir / "replay.json")
    if kind == "static":
        return StaticProvider(read_hosts(Path(path)), time.time())
    return local


def _read_trace(path: Path) -> SpotTrace:
    from varuna_planner.spot_trace import parse_trace  # brings numpy: only where it is wanted

    try:
        return parse_trace(path.read_text(), name=str(path))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read ({error.strerror})") from error
