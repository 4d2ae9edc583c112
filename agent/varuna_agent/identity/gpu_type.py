"""The model of this VM's GPUs, as named by NVIDIA's driver."""

from __future__ import annotations

import re
from pathlib import Path

_GPUS = Path("/proc/driver/nvidia/gpus")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def read_gpu_type(folder: Path = _GPUS) -> str:
    """A name such as "NVIDIA A100 80GB PCIe", or all names if they differ; empty: no driver reports one."""
    models = set()
    for path in sorted(folder.glob("*/information")):
        try:
            found = _MODEL.search(path.read_text(errors="replace"))
        except OSError:  # for example, a GPU that has fallen off the bus
            continue
        if found is not None:
            models.add(found.group(1))
    return ", ".join(sorted(models))
