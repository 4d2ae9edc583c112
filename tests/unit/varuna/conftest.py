"""Settings of the tests of the runtime."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # two for so small tensors, on cores that other tests use too, only wait for each other
