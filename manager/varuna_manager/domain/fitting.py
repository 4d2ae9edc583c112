"""Which GPUs a job takes, by their name and memory."""

from __future__ import annotations

from varuna_manager.domain.gpu_types import OnlyType
from varuna_manager.domain.spec import Resources

_GIB = 1 << 30


class OneTypeResources(Resources):
    """What a job asks that may not mix types, in a fleet with several."""

    only_type: OnlyType


def pin_type(wanted: Resources, only_type: OnlyType | None) -> Resources:
    """The same request for GPUs of this type only; None: of any."""
    return wanted if only_type is None else OneTypeResources(**wanted.model_dump(), only_type=only_type)


def fits_job(wanted: Resources, *, gpu_type: str, device_memory_bytes: int | None) -> bool:
    """Whether a VM's GPUs match the job's resources. An unknown name or memory does not match."""
    if isinstance(wanted, OneTypeResources) and wanted.only_type.gpu_type != gpu_type:
        return False
    if wanted.gpu_type is not None and wanted.gpu_type.casefold() not in gpu_type.casefold():
        return False
    least = wanted.min_gpu_memory_gib
    return least is None or (device_memory_bytes or 0) >= least * _GIB


def may_fit_job(wanted: Resources, *, gpu_type: str, device_memory_bytes: int | None) -> bool:
    """Whether GPUs that are not there yet may match, as far as the provider describes them."""
    asked = wanted
    if not gpu_type:
        asked = asked.model_copy(update={"gpu_type": None})
    if device_memory_bytes is None:
        asked = asked.model_copy(update={"min_gpu_memory_gib": None})
    return fits_job(asked, gpu_type=gpu_type, device_memory_bytes=device_memory_bytes)


def is_choosy(wanted: Resources) -> bool:
    """Whether the job does not take every GPU."""
    is_pinned = isinstance(wanted, OneTypeResources)
    return is_pinned or wanted.gpu_type is not None or wanted.min_gpu_memory_gib is not None


def render_request(wanted: Resources) -> str:
    """The job's requirements for GPUs, for a reason; empty: none."""
    asked = {"gpu_type": wanted.gpu_type, "min_gpu_memory_gib": wanted.min_gpu_memory_gib}
    texts = [f"{name} {value}" for name, value in asked.items() if value is not None]
    if isinstance(wanted, OneTypeResources):
        texts.append(f"only {wanted.only_type.gpu_type}, as {wanted.only_type.why}")
    return ", ".join(texts)
