"""Modules that are known not to work, refused by name before they cause errors elsewhere."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from varuna.partition.errors import PartitionError

__all__ = ["refuse_unsupported"]


def refuse_unsupported(model: nn.Module) -> None:
    """Raises PartitionError naming a module with sparse gradients, or with the old `torch.nn.utils.weight_norm`."""
    for path, module in model.named_modules():
        name = path or type(module).__name__
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise PartitionError(
                f"{name} is an nn.{type(module).__name__} with sparse=True{_defined(model)}: sparse gradients cannot "
                "be summed over replicas, clipped or scaled. Leave sparse=True out, and use AdamW instead of SparseAdam"
            )
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                raise PartitionError(
                    f"{name} has the old torch.nn.utils.weight_norm on its {hook.name}{_defined(model)}, which turns "
                    "it from a parameter into an activation. Use torch.nn.utils.parametrizations.weight_norm, which "
                    "also loads old weights"
                )


def _defined(model: nn.Module) -> str:
    """Where the model's class is defined, if that can be found."""
    try:
        lines, first = inspect.getsourcelines(type(model))
        file = inspect.getsourcefile(type(model))
    except (OSError, TypeError):
        return ""
    return f" (in {type(model).__name__}, {file}:{first})" if lines and file else ""
