"""A calibration generation: instead of training, the script ends at `set_optimizer` with the model's profile."""

from __future__ import annotations

import os
from collections.abc import Sequence

import structlog
import torch
from torch.optim import Optimizer

from varuna.calibration.fleet_network import device_name
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.profile import calibrate
from varuna.calibration.profile_cache import ProfileCache, find_misfit, make_fingerprint
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import PeerLost
from varuna.optim.optimizers import log_left_out
from varuna.optim.split_check import check_splittable
from varuna.roles.role import ReportRole
from varuna.roles.wrapped_model import WrappedModel
from varuna_planner.profile.document import Profile

__all__ = ["CalibrationRole"]

_log = structlog.get_logger(__name__)


class CalibrationRole(ReportRole):
    """Measures the model with the other ranks; rank 0 reports the profile to its agent."""

    activity = "calibrates"

    def __init__(
        self, wrapped: WrappedModel, seed: int, *, optimizer_on_device: bool, averaged: bool, from_cache: bool
    ) -> None:
        """
        Args:
            optimizer_on_device: whether the optimizer's state is on the device; else it is on the host.
            averaged: whether a moving average of the parameters is kept.
            from_cache: whether an earlier profile may be used in place of a measurement.
        """
        super().__init__(wrapped, seed)
        self._optimizer_on_device = optimizer_on_device
        self._averaged = averaged
        self._from_cache = from_cache

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        worker = self.wrapped.worker
        for optimizer in optimizers:
            check_splittable(optimizer, worker.environment, len(self.wrapped.model_map.sections))
        if worker.topology.replica == 0:
            log_left_out(optimizers, self.parameters)

    def make_report(self, optimizers: Sequence[Optimizer]) -> None:
        """Finds the profile in the cache or measures it. Called by all ranks."""
        departure = self.wrapped.worker.departure
        try:
            profile, from_cache = self._find_profile(optimizers)
        except torch.distributed.DistError as error:  # a peer has gone, which is no fault of the script
            departure.leave_generation(PeerLost(f"while calibrating: {first_line(error)}"))
            departure.raise_if_leaving()
            raise
        if profile is not None:
            self.wrapped.worker.link.report_profile(profile.to_json(), from_cache=from_cache)

    def _find_profile(self, optimizers: Sequence[Optimizer]) -> tuple[Profile | None, bool]:
        """(the profile on rank 0 and None elsewhere, whether it is an earlier one)."""
        wrapped = self.wrapped
        environment, rendezvous = wrapped.worker.environment, wrapped.worker.rendezvous
        subject = wrapped.calibration_subject()
        setup = OptimizerSetup(optimizers, on_device=self._optimizer_on_device, averaged=self._averaged)
        peers = CalibrationPeers(
            environment.rank, environment.world_size, rendezvous.store, connect=rendezvous.connect_gloo
        )
        cache = ProfileCache(environment.profile_cache_url) if environment.profile_cache_url else None
        fleet = peers.gather_values("fleet", [peers.host, _describe_hardware(wrapped.device)])
        key, earlier, enough = "", None, False
        if cache is not None and fleet is not None:
            key = make_fingerprint(subject, setup, [hardware for _, hardware in fleet])
            earlier = cache.find_profile(key) if self._from_cache else None
            enough = earlier is not None and self._is_enough(earlier, [host for host, _ in fleet])
        if peers.broadcast_value("cached", enough):
            peers.wait_for_all()
            return earlier, True
        profile = calibrate(
            subject,
            setup,
            global_batch=environment.plan.global_batch,
            peers=peers,
            earlier=earlier,
        )
        if cache is not None and profile is not None:
            cache.put_profile(key, profile)
        return profile, False

    def _is_enough(self, earlier: Profile, hosts: list[str]) -> bool:
        environment = earlier.environment
        names = [section.name for section in self.wrapped.model_map.sections]
        reason = find_misfit(earlier, names, hosts, self.wrapped.worker.environment.plan.global_batch)
        measured = (
            f"measured {environment.get('measured_at')} on {environment.get('ranks')} × {environment.get('device')}"
        )
        if reason is None:
            _log.info(f"profile taken from the cache ({measured})")
        else:
            _log.info(f"the profile in the cache ({measured}) is not enough: measuring", reason=reason)
        return reason is None


def _describe_hardware(device: torch.device) -> str:
    """What a rank's times depend on besides the model."""
    return f"{device_name(device)}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"
