"""LAMB (You et al., Large Batch Optimization for Deep Learning, 2020) as NVIDIA's recipe has it, called NVLAMB there.

What it adds to LAMB's first version: gradients are divided by the norm of the *whole model's* gradient, where that is
above a bound, before anything else is done with them. A stage of the model has only a part of them, so the norm comes
from `varuna.optim.global_gradient_norm`, which is right in a pipeline as in a plain process. Everything else is done
parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from varuna.optim import global_gradient_norm


class Lamb(Optimizer):
    """For each parameter w with gradient g, moments m and v, in step t:

        g ← g / max(1, ‖all g‖ / max_grad_norm)
        m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²
        u = (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + eps) + weight_decay · w
        w ← w - lr · (‖w‖ / ‖u‖) · u

    Where a norm is 0, and in groups without weight decay (biases and layer norms), ‖w‖ / ‖u‖ is taken as 1, as apex's
    FusedLAMB does; `adapt_undecayed` takes the ratio there, too (apex's `use_nvlamb`).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        adapt_undecayed: bool = False,
    ) -> None:
        """Raises ValueError for a number that makes no sense."""
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and max_grad_norm > 0):
            raise ValueError(
                f"lr {lr}, eps {eps}, weight_decay {weight_decay} must not be negative, and max_grad_norm "
                f"{max_grad_norm} must be above 0"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas}: each must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.max_grad_norm = max_grad_norm
        self.adapt_undecayed = adapt_undecayed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norm = global_gradient_norm(parameter for group in self.param_groups for parameter in group["params"])
        divisor = max(1.0, norm / self.max_grad_norm)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad / divisor, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        torch.div(mean / (1 - beta1**step), update, out=update)
        decay = group["weight_decay"]
        if decay:
            update.add_(parameter, alpha=decay)
        if decay or self.adapt_undecayed:
            update.mul_(trust_ratio(parameter, update))
        parameter.sub_(update, alpha=group["lr"])


def trust_ratio(parameter: Tensor, update: Tensor) -> Tensor:
    """‖w‖ / ‖u‖ as a tensor without dimensions, on their device: 1 where one of them is 0."""
    of_parameter, of_update = parameter.norm(), update.norm()
    both = (of_parameter > 0) & (of_update > 0)
    return torch.where(both, of_parameter / of_update, 1.0)


def restart_bias_correction(optimizer: Optimizer) -> None:
    """Keeps the moments and counts their steps from 0 again, as NVIDIA's recipe does when phase 2 begins."""
    for state in optimizer.state.values():
        state["step"].zero_()
