"""A calibration generation: instead of training, the script's first step ends with the profile in the agent's hands."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from varuna.calibration.cache import ProfileCache, fingerprint, why_not_enough
from varuna.calibration.measuring import calibrate, device_name
from varuna.calibration.optimizer import OptimizerMemory, measure_optimizer
from varuna.calibration.peers import Peers
from varuna.departure import PeerLost
from varuna.error_text import first_line
from varuna.partition import Values
from varuna.partition.model_map import ModelMap
from varuna.precision import Precision
from varuna.worker import Worker
from varuna_planner.profile import Profile

__all__ = ["Calibrating"]

_log = structlog.get_logger(__name__)


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
    from_cache: bool
    """Whether what was measured before will do."""
    averaged: bool = False
    """Whether a moving average of the parameters is kept."""
    values: Values | None = None
    """Of parameters and buffers, where they are not the model's own."""

    def run(self, optimizers: Sequence[Optimizer]) -> NoReturn:
        """Measures with the other ranks, tells the agent (rank 0) and ends the script (SystemExit with code 0)."""
        departure = self.worker.departure
        try:
            profile, from_cache = self._profile(optimizers)
        except torch.distributed.DistError as error:  # a peer went away: that is no fault of the script's
            departure.leave(PeerLost(f"while calibrating: {first_line(error)}"))
            departure.check()
            raise
        if profile is not None:
            self.worker.link.profile_done(profile.to_json(), from_cache=from_cache)
        raise SystemExit(0)

    def _profile(self, optimizers: Sequence[Optimizer]) -> tuple[Profile | None, bool]:
        """(the profile on rank 0 and None elsewhere, whether it was measured before)."""
        environment, rendezvous = self.worker.environment, self.worker.rendezvous
        peers = Peers(environment.rank, environment.world_size, rendezvous.store)
        cache = ProfileCache(environment.profile_cache_url) if environment.profile_cache_url else None
        fleet = peers.gather("fleet", [socket.gethostname(), _hardware(self.device)])
        key, earlier, enough = "", None, False
        if cache is not None and fleet is not None:
            key = self._fingerprint(optimizers, [hardware for _, hardware in fleet])
            earlier = cache.find(key) if self.from_cache else None
            enough = earlier is not None and self._is_enough(earlier, [host for host, _ in fleet])
        if peers.tell("cached", enough):
            peers.part()
            return earlier, True
        profile = calibrate(
            self.model,
            self.model_map,
            self.get_batch,
            optimizer=optimizers,
            device=self.device,
            precision=self.precision,
            optimizer_on_device=self.optimizer_on_device,
            averaged=self.averaged,
            global_batch=environment.global_batch,
            rank=environment.rank,
            world_size=environment.world_size,
            store=rendezvous.store,
            connect=rendezvous.gloo,
            earlier=earlier,
            values=self.values,
        )
        if cache is not None and profile is not None:
            cache.keep(key, profile)
        return profile, False

    def _fingerprint(self, optimizers: Sequence[Optimizer], hardware: list[str]) -> str:
        return fingerprint(
            self.model,
            self.model_map,
            self.get_batch(1),
            optimizers=optimizers,
            memory=[self._memory(optimizer) for optimizer in optimizers],
            precision=self.precision,
            hardware=hardware,
        )

    def _memory(self, optimizer: Optimizer) -> OptimizerMemory:
        if not self.optimizer_on_device:
            return OptimizerMemory(0.0, 0)
        return measure_optimizer(optimizer, averaged=self.averaged)

    def _is_enough(self, earlier: Profile, hosts: list[str]) -> bool:
        environment = earlier.environment
        names = [section.name for section in self.model_map.sections]
        reason = why_not_enough(earlier, names, hosts, self.worker.environment.global_batch)
        measured = (
            f"measured {environment.get('measured_at')} on {environment.get('ranks')} × {environment.get('device')}"
        )
        if reason is None:
            _log.info(f"profile taken from the cache ({measured})")
        else:
            _log.info(f"the profile in the cache ({measured}) is not enough: measuring anew", reason=reason)
        return reason is None


def _hardware(device: torch.device) -> str:
    """What a rank's times depend on besides the model."""
    return f"{device_name(device)}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"
