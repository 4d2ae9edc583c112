"""Boundaries are copied while the device computes, and arrive whole all the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from varuna.devices.copy_stream import CopyStream

BYTES = 256 * 1024 * 1024
"""Takes some ms to copy over any bus."""


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def matmuls(count: int) -> Callable[[], None]:
    """Enqueues this many kernels of about a millisecond or less each."""
    factor = torch.randn(2048, 2048, device="cuda") / 2048**0.5
    held = factor.clone()

    def launch() -> None:
        for _ in range(count):
            torch.mm(factor, factor, out=held)

    launch()  # so that the setup of the first copy is not measured
    torch.cuda.synchronize()
    return launch


def test_computing_does_not_wait_for_copies_to_the_host() -> None:
    copies, one_kernel, more = CopyStream(), matmuls(1), matmuls(50)
    big = torch.ones(BYTES // 4, device="cuda")
    copies.to_host([big])[1].synchronize()  # type: ignore[union-attr]  # pinned memory is there from now on
    stream = copies._on(big.device)
    kernel_done, copied, all_done = event(), event(), event()

    host, _ = copies.to_host([big])
    copied.record(stream)
    one_kernel()
    kernel_done.record()
    more()
    all_done.record()
    torch.cuda.synchronize()

    assert kernel_done.elapsed_time(copied) > 0, "the kernel launched after the copy ran only when that was through"
    assert torch.equal(host[0], torch.ones(BYTES // 4))


def test_copies_to_the_device_do_not_wait_for_computing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies, compute = CopyStream(), matmuls(1000)
    host = torch.ones(BYTES // 4, pin_memory=True)
    copies.to_device([host], device)  # its memory on the device is there from now on
    torch.cuda.synchronize()
    computed, copied = event(), event()

    compute()
    computed.record()
    [there] = copies.to_device([host], device)
    copied.record(copies._on(device))
    total = there.sum(dtype=torch.float64)
    torch.cuda.synchronize()

    assert copied.elapsed_time(computed) > 0, "the copy waited for kernels that it does not need"
    assert float(total) == BYTES // 4


def test_what_is_computed_after_a_copy_spoils_nothing() -> None:
    """Memory of both kinds is handed out again and again while earlier copies may still be under way."""
    device = torch.device("cuda", torch.cuda.current_device())
    to_host, to_device, busy = CopyStream(), CopyStream(), matmuls(5)
    sent: list[tuple[float, list[Tensor], torch.cuda.Event]] = []
    for number in range(200):
        busy()
        computed = torch.full((1 << 20,), float(number), device=device)
        strided = torch.full((256, 512), float(number), device=device).t()
        host, copied = to_host.to_host([computed, strided])
        assert copied is not None
        del computed, strided  # the next tensors may take their memory as soon as the allocator considers it free
        torch.full((1 << 20,), -1.0, device=device)
        sent.append((float(number), host, copied))
    for value, host, copied in sent:
        copied.synchronize()
        assert all(bool((tensor == value).all()) for tensor in host), value
        there = to_device.to_device([tensor.pin_memory() for tensor in host], device)
        busy()
        sums = [tensor.double().sum() for tensor in there]
        del there
        torch.full((1 << 20,), -1.0, device=device)
        assert [float(each) for each in sums] == [value * tensor.numel() for tensor in host]
