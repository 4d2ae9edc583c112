"""The provider that the settings choose: `local`, `replay:TRACE`, or the KIND:FILE of an entry point.

`local` and `replay` are no entry points, because their VMs are processes of the manager's own machine.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_manager.extras import check_extra
from varuna_manager.providers.base import EmulatedProvider, Provider
from varuna_manager.providers.kind import PROVIDER_GROUP, AgentStart, ProviderContext, ProviderKind
from varuna_manager.providers.local import LocalProvider
from varuna_manager.providers.replay import ReplayProvider, ReplaySettings

if TYPE_CHECKING:
    from varuna_planner.liveput.spot_trace import SpotTrace


@dataclass(frozen=True)
class ProviderChoice:
    provider: Provider
    emulated: EmulatedProvider | None = None
    """The same provider, if it emulates a market."""


def has_local_vms(chosen: str) -> bool:
    """Whether its VMs are processes of this machine."""
    return chosen.partition(":")[0] in ("local", "replay")


_FROM_LEAST_TO_MOST = (AgentStart.BY_OPERATOR, AgentStart.INSTALLED, AgentStart.FROM_MANAGER)


def get_agent_start(chosen: str) -> AgentStart:
    """How the agents of an entry point's provider are started: of one with parts, in the way that needs most of the
    manager. Raises ValueError."""
    return max((kind.agents for kind in _list_kinds(chosen)), key=_FROM_LEAST_TO_MOST.index)


def get_request_timeout_s(chosen: str) -> float | None:
    """The provider's own default; None: it has none. Raises ValueError."""
    if has_local_vms(chosen):
        return None
    own = [kind.request_timeout_s for kind in _list_kinds(chosen) if kind.request_timeout_s is not None]
    return max(own, default=None)


def check_choice(chosen: str) -> str:
    """Raises ValueError that names what is wrong with the choice or with its file."""
    name, separator, path = chosen.partition(":")
    if name == "local" and not separator:
        return chosen
    if name == "replay" and path:
        _read_trace(Path(path))
    elif has_local_vms(chosen) or not path:
        raise ValueError(f"expected {_list_choices()}")
    else:
        kind = find_kind(name)
        if kind.extra is not None:
            check_extra(kind.extra.name, kind.extra.what, *kind.extra.modules)
        kind.read_settings(Path(path))
    return chosen


def find_kind(name: str) -> ProviderKind[Any]:
    """The kind of that name, from the entry points of all installed packages. Raises ValueError."""
    found = importlib.metadata.entry_points(group=PROVIDER_GROUP, name=name)
    if not found:
        raise ValueError(f"expected {_list_choices()}")
    if len(found) > 1:
        packages = sorted(_package(point) for point in found)
        raise ValueError(f"{' and '.join(packages)} both have a provider {name!r}: uninstall one of them")
    return _load_kind(next(iter(found)))


def _list_kinds(chosen: str) -> list[ProviderKind[Any]]:
    """The kind of an entry point's provider, and those of its parts. Raises ValueError."""
    name, _, path = chosen.partition(":")
    kind = find_kind(name)
    parts = () if kind.list_parts is None else kind.list_parts(kind.read_settings(Path(path)))
    return [kind, *(found for part in parts for found in _list_kinds(part))]


def make_local_provider(
    chosen: str, local: LocalProvider, replay: ReplaySettings, memory_dir: Path
) -> EmulatedProvider:
    """`local` itself, or a trace that drives it. Raises ValueError."""
    kind, _, path = chosen.partition(":")
    if kind == "replay":
        return ReplayProvider(local, _read_trace(Path(path)), replay, memory_dir / "replay.json")
    return local


def make_provider(chosen: str, context: ProviderContext) -> Provider:
    """The provider of an entry point. Raises ValueError."""
    name, _, path = chosen.partition(":")
    kind = find_kind(name)
    return kind.make_provider(kind.read_settings(Path(path)), context)


def _list_choices() -> str:
    """`local`, `replay`, and the kinds of the entry points that can be loaded."""
    choices = ["local", "replay:TRACE.csv"]
    for point in sorted(importlib.metadata.entry_points(group=PROVIDER_GROUP), key=lambda point: point.name):
        try:
            choices.append(f"{point.name}:{_load_kind(point).argument}")
        except ValueError:
            continue  # whoever chooses it gets its error
    unique = list(dict.fromkeys(choices))
    return f"{', '.join(unique[:-1])} or {unique[-1]}"


def _load_kind(point: importlib.metadata.EntryPoint) -> ProviderKind[Any]:
    """Raises ValueError that names the package."""
    try:
        kind = point.load()
    except Exception as error:  # whatever a module of another package raises when it is imported
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        way_out = f"repair or uninstall {_package(point)}"
        raise ValueError(
            f"the provider {point.name!r} of {_package(point)} cannot be loaded ({text}): {way_out}"
        ) from error
    if not isinstance(kind, ProviderKind):
        text = f"{point.value} is a {type(kind).__name__} and not a ProviderKind"
        raise ValueError(f"the provider {point.name!r} of {_package(point)} cannot be used: {text}")
    return kind


def _package(point: importlib.metadata.EntryPoint) -> str:
    return "an unknown package" if point.dist is None else point.dist.name


def _read_trace(path: Path) -> SpotTrace:
    from varuna_planner.liveput.spot_trace import parse_trace  # loads numpy only when it is needed

    try:
        return parse_trace(path.read_text(), name=str(path))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read ({error.strerror})") from error
