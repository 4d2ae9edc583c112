"""A calibration generation: instead of training, the script ends at `set_optimizer` with the model's profile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from varuna.calibration.finding import FoundProfile, find_or_measure_profile
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.profile_cache import ProfileCache
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import PeerLost
from varuna.optim.optimizers import log_left_out
from varuna.optim.split_check import check_splittable
from varuna.roles.role import ReportRole
from varuna.roles.wrapped_model import WrappedModel

__all__ = ["CalibrationRole"]


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
            found = self._find_profile(optimizers)
        except torch.distributed.DistError as error:  # a peer has gone, which is no fault of the script
            departure.leave_generation(PeerLost(f"while calibrating: {first_line(error)}"))
            departure.raise_if_leaving()
            raise
        if found.profile is not None:
            self.wrapped.worker.link.report_profile(found.profile.to_json(), from_cache=found.is_earlier)

    def _find_profile(self, optimizers: Sequence[Optimizer]) -> FoundProfile:
        wrapped = self.wrapped
        environment, rendezvous = wrapped.worker.environment, wrapped.worker.rendezvous
        rendezvous.be_patient()  # the manager limits a calibration
        peers = CalibrationPeers(
            environment.rank,
            environment.world_size,
            rendezvous.store,
            connect=rendezvous.connect_gloo,
            gpu_type=environment.gpu_type,
            zone=environment.zone,
        )
        found = find_or_measure_profile(
            wrapped.calibration_subject(),
            OptimizerSetup(optimizers, on_device=self._optimizer_on_device, averaged=self._averaged),
            peers=peers,
            earlier_profiles=ProfileCache(environment.profile_cache_url) if environment.profile_cache_url else None,
            from_cache=self._from_cache,
            global_batch=environment.plan.global_batch,
        )
        if found.is_earlier:
            peers.wait_for_all()
        return found
