"""The optimizer on the host, for models whose optimizer state does not fit beside them on the devices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from varuna.devices.accelerator import is_accelerator, wait_for_stream
from varuna.partition.modules.special_parameters import parameter_like

__all__ = ["HostParameters", "is_own_hook"]


class HostParameters:
    """Copies of a stage's trained parameters in host memory. The user's optimizer steps them, so its state is there.

    Each pass begins with the values on the host; after the passes of a step the gradients move to the host. Gradient
    hooks on the host's parameters run on the host, in the backward of each micro-batch. Frozen parameters stay on the
    device only.
    """

    def __init__(self, on_device: dict[str, nn.Parameter]) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """By name, as `on_device`."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._gradients: dict[int, Tensor] = {}
        self.follow_stage(on_device)
        if self._pairs:  # a stage may have nothing to train
            with torch.no_grad():
                torch._foreach_copy_([m for _, m in self._pairs], [p for p, _ in self._pairs])

    def follow_stage(self, on_device: dict[str, nn.Parameter]) -> None:
        """From now on these are the stage's parameters. Copies of those that it had keep their memory; new ones have no
        values."""
        paired = {id(master) for _, master in self._pairs}
        before = {name: master for name, master in self.parameters.items() if id(master) in paired}
        self.parameters, self._pairs, self._gradients = {}, [], {}
        for name, original in on_device.items():
            self.parameters[name] = original
            if name not in before and not original.requires_grad:
                continue
            # With the user's own attributes (no weight decay, say).
            memory = before[name].detach() if name in before else _host_memory(original)
            master = parameter_like(before.get(name, original), memory, requires_grad=original.requires_grad)
            self.parameters[name] = master
            self._pairs.append((original, master))
            if original.requires_grad:
                original.register_hook(partial(_run_hooks, master))  # type: ignore[no-untyped-call]

    def add_trained_parameters(self, module: nn.Module, on_device: dict[str, nn.Parameter]) -> None:
        """Between passes: gives newly trained parameters a copy on the host.

        The object that the script has becomes that copy, and a new one takes its place in `module` and `on_device`.
        `module` holds the tensors that the stage computes with (`TensorSwap.change_pass_tensors`).
        """
        for name, given_out in on_device.items():
            if not given_out.requires_grad or self.parameters[name] is not given_out:
                continue
            original = parameter_like(given_out, given_out.data, requires_grad=True)
            original.register_hook(partial(_run_hooks, given_out))  # type: ignore[no-untyped-call]
            for part in module.modules():
                for key, parameter in part._parameters.items():
                    if parameter is given_out:
                        part._parameters[key] = original
            on_device[name] = original
            given_out.data = _host_memory(original).copy_(original.detach())
            self._pairs.append((original, given_out))

    def move_gradients_to_host(self) -> None:
        """Moves the gradients from the device into `.grad` of the host's parameters; None stays None."""
        for original, master in self._pairs:
            if original.grad is None:
                master.grad = None
                continue
            if id(master) not in self._gradients:
                self._gradients[id(master)] = _host_memory(original)
            master.grad = self._gradients[id(master)].copy_(original.grad, non_blocking=True)
            original.grad = None
        self._wait_for_copies()

    @torch.no_grad()
    def copy_to_device(self) -> None:
        """Copies the parameters from the host to the device. Afterwards those on the host may change."""
        for original, master in self._pairs:
            original.copy_(master, non_blocking=True)
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        for device in {original.device for original, _ in self._pairs if is_accelerator(original.device)}:
            wait_for_stream(device)


def is_own_hook(hook: object) -> bool:
    """Whether a gradient hook is of `HostParameters`, not of the script."""
    return isinstance(hook, partial) and hook.func is _run_hooks


def _run_hooks(master: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """The gradient on the device after the hooks of the host's parameter; None without hooks."""
    hooks = master._backward_hooks
    if not hooks:
        return None
    on_host = gradient.to("cpu")
    for hook in tuple(hooks.values()):
        changed = hook(on_host)
        on_host = on_host if changed is None else changed
    return on_host.to(gradient.device)


def _host_memory(like: Tensor) -> Tensor:
    """Memory with the strides of `like`, pinned if that makes copies faster."""
    return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=is_accelerator(like.device))
