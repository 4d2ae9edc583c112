"""Checks for dependencies that only an extra of the package installs."""

from __future__ import annotations

import importlib.util


def check_extra(extra: str, what: str, *modules: str) -> None:
    """Raises ValueError, with the way out, if one of the modules of `what` is not installed."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package
            found = None
        if found is None:
            raise ValueError(f"{what} is not installed: pip install 'varuna-spot[{extra}]'")
