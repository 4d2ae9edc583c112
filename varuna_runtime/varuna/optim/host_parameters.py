"""The optimizer on the host, for models whose optimizer state does not fit beside them on the devices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from varuna.devices.accelerator import is_accelerator, wait_for_event
from varuna.devices.copy_stream import CopyStream
from varuna.devices.pinned_arena import PinnedArena
from varuna.partition.modules.special_parameters import parameter_like

__all__ = ["ArrivingGradients", "ArrivingParameters", "HostParameters", "is_own_hook"]

_PART_BYTES = 32 * 2**20
"""Of gradients: some milliseconds on the way to the host, and in the optimizer's step."""
_LAST = math.inf
"""Behind every section."""


class ArrivingGradients(NamedTuple):
    """Gradients on their way to the host."""

    parameters: tuple[nn.Parameter, ...]
    """Those on the host whose `.grad` they become."""
    arrived: torch.Event | None
    """None: they are there."""

    def wait(self) -> None:
        """Waits until the optimizer may read them."""
        if self.arrived is not None:
            wait_for_event(self.arrived)


class ArrivingParameters:
    """Parameters on their way to the device, in the order in which the sections of a stage use them."""

    def __init__(self, arrivals: Sequence[tuple[int, torch.Event]], device: torch.device) -> None:
        """`arrivals`: a section, and when the parameters have arrived that it is the first to use; in their order."""
        self._arrivals = deque(arrivals)
        self._device = device
        self._last = arrivals[-1][1] if arrivals else None

    def wait_for_section(self, section: float) -> None:
        """Ops launched next may use the parameters of all sections up to this one."""
        while self._arrivals and self._arrivals[0][0] <= section:
            _, arrived = self._arrivals.popleft()
            torch.accelerator.current_stream(self._device).wait_event(arrived)

    def end(self) -> None:
        """Waits until all have arrived, after which those on the host may change, and all ops may use them."""
        self.wait_for_section(_LAST)
        if self._last is not None:
            wait_for_event(self._last)


class HostParameters:
    """Copies of a stage's trained parameters in host memory. The user's optimizer steps them, so its state is there.

    Each pass begins with the values on the host; after the passes of a step the gradients move to the host. Gradient
    hooks on the host's parameters run on the host, in the backward of each micro-batch. Frozen parameters stay on the
    device only.
    """

    def __init__(self, on_device: dict[str, nn.Parameter]) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """By name, as `on_device`."""
        self.part_bytes = _PART_BYTES
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._gradients: dict[int, Tensor] = {}
        self._out, self._in, self._arena = CopyStream(), CopyStream(), PinnedArena()
        # Of each parameter that is trained, and of its gradient.
        self._arena.expect_bytes(2 * sum(each.nbytes for each in on_device.values() if each.requires_grad))
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
            memory = before[name].detach() if name in before else self._make_host_memory(original)
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
            given_out.data = self._make_host_memory(original).copy_(original.detach())
            self._pairs.append((original, given_out))

    def _make_host_memory(self, like: Tensor) -> Tensor:
        """Memory with the strides of `like`, pinned if that makes copies faster."""
        if not is_accelerator(like.device):
            return torch.empty_like(like, device="cpu", requires_grad=False)
        dense = torch.empty_like(like, device="meta", requires_grad=False)
        return self._arena.make_tensor(dense.shape, dense.stride(), dense.dtype)

    def move_gradients_to_host(self) -> None:
        """Moves the gradients from the device into `.grad` of the host's parameters; None stays None."""
        for part in self.start_moving_gradients():
            part.wait()

    def copy_gradients_to_host(self) -> None:
        """As `move_gradients_to_host`, but they stay on the device, too: the script accumulates them."""
        for part in self.start_moving_gradients(keeps=True):
            part.wait()

    def drop_gradients(self, kept: Collection[int]) -> None:
        """Drops those on the device that the script has dropped on the host. `kept`: the ids of the parameters on the
        host whose gradients it has not."""
        for original, master in self._pairs:
            if original.grad is None or id(master) in kept:
                continue
            original.grad = None if master.grad is None else original.grad.zero_()

    def start_moving_gradients(self, *, keeps: bool = False) -> list[ArrivingGradients]:
        """As `move_gradients_to_host`, but the gradients arrive in parts of about `part_bytes`, in their order.

        While the optimizer steps the parameters of one part, the next part is copied. No gradient may be read before
        its part has arrived. `keeps`: they stay on the device, too.
        """
        parts: list[ArrivingGradients] = []
        leaving: list[tuple[nn.Parameter, Tensor]] = []
        count = 0
        for original, master in self._pairs:
            gradient, master.grad = original.grad, None
            if not keeps:
                original.grad = None
            if gradient is None:
                continue
            if id(master) not in self._gradients:
                self._gradients[id(master)] = self._make_host_memory(original)
            leaving.append((master, gradient))
            count += gradient.nbytes
            if count >= self.part_bytes:
                parts.append(self._start_moving(leaving))
                leaving, count = [], 0
        return [*parts, self._start_moving(leaving)] if leaving else parts

    def _start_moving(self, leaving: list[tuple[nn.Parameter, Tensor]]) -> ArrivingGradients:
        masters, on_device = zip(*leaving, strict=True)
        on_host = [self._gradients[id(master)] for master in masters]
        for master, gradient in zip(masters, on_host, strict=True):
            master.grad = gradient
        if is_accelerator(on_device[0].device):
            return ArrivingGradients(masters, self._out.update_on_host(on_host, on_device))
        torch._foreach_copy_(on_host, list(on_device))
        return ArrivingGradients(masters, None)

    @torch.no_grad()
    def copy_to_device(self) -> None:
        """Copies the parameters from the host to the device. Afterwards those on the host may change."""
        self.start_copying_to_device({}).end()

    @torch.no_grad()
    def start_copying_to_device(self, first_section: Mapping[str, int]) -> ArrivingParameters:
        """Starts to copy the parameters from the host to the device, those of the first sections first.

        `first_section`: by name, the first section whose code uses the parameter; without one it comes first of all.
        """
        by_section: dict[int, list[tuple[nn.Parameter, nn.Parameter]]] = {}
        names = {id(master): name for name, master in self.parameters.items()}
        for original, master in self._pairs:
            by_section.setdefault(first_section.get(names[id(master)], -1), []).append((original, master))
        arrivals: list[tuple[int, torch.Event]] = []
        for section in sorted(by_section):
            on_device, on_host = zip(*by_section[section], strict=True)
            if is_accelerator(on_device[0].device):
                arrivals.append((section, self._in.start_update_on_device(on_device, on_host)))
            else:
                torch._foreach_copy_(on_device, on_host)
        return ArrivingParameters(arrivals, self._pairs[0][0].device if self._pairs else torch.device("cpu"))


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
