"""What this VM's GPUs are called, as NVIDIA's driver says."""

from __future__ import annotations

import re
from pathlib import Path

_GPUS = Path("/proc/driver/nvidia/gpus")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def read_gpu_type(folder: Path = _GPUS) -> str:
    """Such as "NVIDIA A100 80GB PCIe"; of several kinds, all of them; empty: there is no driver that says it."""
    models = set()
    for path in sorted(folder.glob("*/information")):
        try:
            found = _MODEL.search(path.read_text(errors="replace"))
        except OSError:  # a GPU that has fallen off the bus, say
            continue
        if found is not None:
            models.add(found.group(1))
    return ", ".join(sorted(models))
