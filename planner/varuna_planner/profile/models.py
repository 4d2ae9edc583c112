"""Published models by name: one table for `varuna estimate`, `varuna profile synth` and `examples/gpt`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from varuna_planner.profile.shapes import ModelFamily, ModelShape

__all__ = ["NAMED_MODELS", "named_model"]


def _gpt2(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(family=ModelFamily.GPT2, layers=layers, hidden=hidden, heads=heads, seq=1024)


def _bert(layers: int, hidden: int) -> ModelShape:
    return ModelShape(family=ModelFamily.BERT, layers=layers, hidden=hidden, seq=512)


NAMED_MODELS: Final = MappingProxyType(
    {
        # Radford et al. 2019 (medium and XL). 2.5 and 8.3 billion: Shoeybi et al. 2019, table 1.
        "gpt2-355m": _gpt2(24, 1024, 16),
        "gpt2-1.5b": _gpt2(48, 1600, 25),
        "gpt2-2.5b": _gpt2(54, 1920, 20),
        "gpt2-8.3b": _gpt2(72, 3072, 32),
        # Varuna, section 7.1.1. It gives only the layers of the first; this width has the 125 TFLOP per example of its
        # table 4 (32.1 TFLOP/s at 0.257 examples/s). It does not give the heads of the second.
        "gpt2-20b": _gpt2(96, 4096, 32),
        "gpt2-200b": _gpt2(100, 12960, 135),
        # Devlin et al. 2018.
        "bert-base": _bert(12, 768),
        "bert-large": _bert(24, 1024),
    }
)
"""Example lengths are those of the Varuna paper; `dataclasses.replace` sets another."""


def named_model(name: str) -> ModelShape:
    """Raises ValueError that lists the known names."""
    try:
        return NAMED_MODELS[name]
    except KeyError:
        raise ValueError(f"no model is called {name!r}: there are {', '.join(NAMED_MODELS)}") from None
