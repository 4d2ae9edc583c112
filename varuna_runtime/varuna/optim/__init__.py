"""The gradients between the last backward and the update, and the script's optimizers."""

from varuna.optim.reduction import global_gradient_norm

__all__ = ["global_gradient_norm"]
