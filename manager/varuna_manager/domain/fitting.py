"""Which GPUs a job takes: by what they are called, and by their memory."""

from __future__ import annotations

from varuna_manager.domain.spec import Resources

_GIB = 1 << 30


def fits(wanted: Resources, *, gpu_type: str, device_memory_bytes: int | None) -> bool:
    """Whether a VM's GPUs are as the job asks. What is not known of them is not: its agent says nothing of it."""
    if wanted.gpu_type is not None and wanted.gpu_type.casefold() not in gpu_type.casefold():
        return False
    least = wanted.min_gpu_memory_gib
    return least is None or (device_memory_bytes or 0) >= least * _GIB


def may_fit(wanted: Resources, *, gpu_type: str, device_memory_bytes: int | None) -> bool:
    """Whether GPUs that are not there yet may be so, as far as the provider says what they would be."""
    asked = wanted
    if not gpu_type:
        asked = asked.model_copy(update={"gpu_type": None})
    if device_memory_bytes is None:
        asked = asked.model_copy(update={"min_gpu_memory_gib": None})
    return fits(asked, gpu_type=gpu_type, device_memory_bytes=device_memory_bytes)


def is_choosy(wanted: Resources) -> bool:
    """Whether not any GPU will do."""
    return wanted.gpu_type is not None or wanted.min_gpu_memory_gib is not None


def asked_text(wanted: Resources) -> str:
    """What the job asks of its GPUs, for a reason; empty: nothing."""
    asked = {"gpu_type": wanted.gpu_type, "min_gpu_memory_gib": wanted.min_gpu_memory_gib}
    return ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
