"""What is in `inside/` is collected only where the simulated accelerator is loaded."""

from __future__ import annotations

import torch

collect_ignore = [] if hasattr(torch, "sim") else ["inside"]
