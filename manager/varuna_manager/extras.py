"""What is installed only with one of the package's extras."""

from __future__ import annotations

import importlib.util


def check_extra(extra: str, what: str, *modules: str) -> None:
    """Raises ValueError, with the way out, where one of the modules of `what` is not installed."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of the package around it
            found = None
        if found is None:
            raise ValueError(f"{what} is not installed: pip install 'varuna-spot[{extra}]'")
