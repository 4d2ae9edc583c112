"""The profile of a model: an earlier one where that is enough, and otherwise measured now, by all ranks together."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import structlog
import torch

from varuna.calibration.fleet_network import device_name
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.profile import calibrate
from varuna.calibration.profile_cache import CalibratedRank, find_misfit, make_fingerprint
from varuna.calibration.rank_types import RankTypes
from varuna.calibration.subject import CalibrationSubject
from varuna_planner.profile.document import Profile

__all__ = ["EarlierProfiles", "FoundProfile", "find_or_measure_profile"]

_log = structlog.get_logger(__name__)


class EarlierProfiles(Protocol):
    """Keeps profiles by the fingerprint of what they hold for (`make_fingerprint`)."""

    def find_profile(self, key: str) -> Profile | None:
        """The profile of a fingerprint; None if there is none that can be read."""

    def put_profile(self, key: str, profile: Profile) -> None:
        """Replaces the profile of a fingerprint."""


class FoundProfile(NamedTuple):
    profile: Profile | None
    """On rank 0; None elsewhere."""
    is_earlier: bool
    """Whether it was not measured now."""


def find_or_measure_profile(
    subject: CalibrationSubject,
    setup: OptimizerSetup,
    *,
    peers: CalibrationPeers,
    earlier_profiles: EarlierProfiles | None,
    from_cache: bool,
    global_batch: int,
) -> FoundProfile:
    """Finds or measures the profile. Called by all ranks.

    Args:
        earlier_profiles: where to look first, and where a new profile goes; None: it is measured, and not kept.
        from_cache: whether an earlier profile may be used in place of a measurement.
        global_batch: the largest micro-batch that is measured.
    """
    place = CalibratedRank(peers.host, peers.zone, peers.gpu_type, _describe_hardware(subject.device))
    gathered = peers.gather_values("fleet", place)
    key, earlier, is_enough = "", None, False
    if earlier_profiles is not None and gathered is not None:
        fleet = [CalibratedRank(*each) for each in gathered]
        own_type = RankTypes(tuple(rank.gpu_type for rank in fleet)).own
        key = make_fingerprint(subject, setup, [rank.hardware for rank in fleet if rank.gpu_type == own_type], own_type)
        earlier = earlier_profiles.find_profile(key) if from_cache else None
        is_enough = earlier is not None and _is_enough(earlier, subject, fleet, global_batch)
    if peers.broadcast_value("cached", is_enough):
        return FoundProfile(earlier, is_earlier=True)
    profile = calibrate(subject, setup, global_batch=global_batch, peers=peers, earlier=earlier)
    if earlier_profiles is not None and profile is not None:
        earlier_profiles.put_profile(key, profile)
    return FoundProfile(profile, is_earlier=False)


def _is_enough(earlier: Profile, subject: CalibrationSubject, fleet: list[CalibratedRank], global_batch: int) -> bool:
    environment = earlier.environment
    names = [section.name for section in subject.model_map.sections]
    reason = find_misfit(earlier, names, fleet, global_batch)
    measured = f"measured {environment.get('measured_at')} on {environment.get('ranks')} × {environment.get('device')}"
    if reason is None:
        _log.info(f"profile taken from the cache ({measured})")
    else:
        _log.info(f"the profile in the cache ({measured}) is not enough: measuring", reason=reason)
    return reason is None


def _describe_hardware(device: torch.device) -> str:
    """What a rank's times depend on besides the model."""
    return f"{device_name(device)}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"
