"""What CUDA has and other accelerators need not have, with what stands in for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["device_model", "nccl_device_name", "takes_device_tensors"]


def device_model(device: torch.device) -> str:
    """The model of an accelerator, such as `NVIDIA H200`; "unknown model" where its kind has no such name."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return "unknown model" if name is None else str(name(device))


def nccl_device_name(device: torch.device) -> str:
    """A name that no other device anywhere has; "" for a device that NCCL cannot use."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    # An older ROCm has no such property. Its ranks then use gloo.
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def takes_device_tensors(device: torch.device) -> bool:
    """Whether gloo's collectives take tensors on `device`. They copy those of CUDA to the host by themselves."""
    return device.type in ("cpu", "cuda")
