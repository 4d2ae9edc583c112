"""A calibration generation: instead of training, the script's first step ends with the profile in the agent's hands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from varuna._gloo import first_line
from varuna.departure import PeerLost
from varuna.partition.model_map import ModelMap
from varuna.precision import Precision
from varuna.profiler import calibrate
from varuna.worker import Worker

__all__ = ["Calibrating"]


@dataclass(frozen=True)
class Calibrating:
    """What is measured, once the optimizer is known."""

    worker: Worker
    model: nn.Module
    model_map: ModelMap
    get_batch: Callable[[int], dict[str, Any]]
    device: torch.device
    precision: Precision
    optimizer_on_device: bool

    def run(self, optimizer: Optimizer) -> NoReturn:
        """Measures with the other ranks, tells the agent (rank 0) and ends the script (SystemExit with code 0)."""
        environment, rendezvous, departure = self.worker.environment, self.worker.rendezvous, self.worker.departure
        try:
            profile = calibrate(
                self.model,
                self.model_map,
                self.get_batch,
                optimizer=optimizer,
                device=self.device,
                precision=self.precision,
                optimizer_on_device=self.optimizer_on_device,
                global_batch=environment.global_batch,
                rank=environment.rank,
                world_size=environment.world_size,
                store=rendezvous.store,
                connect=rendezvous.gloo,
            )
        except torch.distributed.DistError as error:  # a peer went away: that is no fault of the script's
            departure.leave(PeerLost(f"while calibrating: {first_line(error)}"))
            departure.check()
            raise
        if profile is not None:
            self.worker.link.profile_done(profile.to_json())
        raise SystemExit(0)
