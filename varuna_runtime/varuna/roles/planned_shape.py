"""The shape of a training whose script leaves it open, under a launcher that knows no shape (`stages="auto"`).

When such a launcher starts the processes, with others or more or fewer of them than before, all ranks meet and trace
the model. Rank 0 then takes the profile from beside the checkpoints, or all ranks measure it. Rank 0 asks the planner
for the best shape for the ranks that are there, and all take their places in it. A rank without a place waits until the
others have ended.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch

from varuna.calibration.finding import find_or_measure_profile
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.profile_cache import KeptProfile
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.devices.accelerator import is_accelerator, release_cached_memory, total_memory_bytes
from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import PeerLost
from varuna.distributed.rendezvous import RENDEZVOUS_TIMEOUT
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.termination import save_before_termination
from varuna_planner.profile.document import Profile
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan

if TYPE_CHECKING:
    from varuna_planner.search.auto_config import PlanChoice

__all__ = ["RankDevice", "choose_shape", "take_planned_place"]

_log = structlog.get_logger("varuna")

_PLANNING_LIMIT = timedelta(minutes=30)
"""How long ranks wait for each other: the planner is compiled on its first use, and slow ranks measure for long."""
_PLAN_FILE = "plan.json"
"""Beside the checkpoints: the plan of the newest start."""


class RankDevice(NamedTuple):
    """What the planner has to know of the device of one rank."""

    host: str
    memory_bytes: int | None
    """None: not known."""


def take_planned_place(wrapped: WrappedModel, setup: OptimizerSetup, *, from_cache: bool) -> None:
    """Makes this process a rank of the shape that all ranks plan now. Called by all ranks.

    On a rank without a place this waits until the others have ended, and ends the script (SystemExit).

    Raises ValueError on all ranks when no plan fits the model on these devices, and PeerLost when a rank is lost.
    """
    worker = wrapped.worker
    store, departure = worker.rendezvous.store, worker.departure
    store.set_timeout(_PLANNING_LIMIT)
    try:
        with keep_global_generators(wrapped.device):
            plan = _plan_together(wrapped, setup, from_cache=from_cache)
    except torch.distributed.DistError as error:  # a peer has gone, which is no fault of the script
        departure.leave_generation(PeerLost(f"while planning the shape: {first_line(error)}"))
        departure.raise_if_leaving()
        raise
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    release_cached_memory([wrapped.device])
    worker.phases.end_phase("plan")
    save_before_termination(departure)
    if not worker.take_place(plan):
        _log.info(
            "the plan has no place for this rank: it waits until the others have ended",
            rank=worker.environment.rank,
            shape=f"{plan.p}×{plan.d}",
        )
        raise SystemExit(worker.wait_without_place())


def _plan_together(wrapped: WrappedModel, setup: OptimizerSetup, *, from_cache: bool) -> Plan:
    """The plan, on every rank. Raises ValueError on every rank when there is none."""
    environment, rendezvous = wrapped.worker.environment, wrapped.worker.rendezvous
    peers = CalibrationPeers(
        environment.rank,
        environment.world_size,
        rendezvous.store,
        connect=rendezvous.connect_gloo,
        gpu_type=environment.gpu_type,
        zone=environment.zone,
    )
    kept = KeptProfile(environment.checkpoint_url) if environment.checkpoint_url else None
    if kept is None and environment.rank == 0:
        _log.info("each start measures the model, because there is no store for its profile: set VARUNA_CHECKPOINT_URL")
    found = find_or_measure_profile(
        wrapped.calibration_subject(),
        setup,
        peers=peers,
        earlier_profiles=kept,
        from_cache=from_cache,
        global_batch=environment.plan.global_batch,
    )
    memory_bytes = total_memory_bytes(wrapped.device) if is_accelerator(wrapped.device) else None
    devices = peers.gather_values("devices", RankDevice(peers.host, memory_bytes))
    choice = None
    if found.profile is not None and devices is not None:
        choice = choose_shape(found.profile, [RankDevice(*device) for device in devices], environment)
        _log.info("the planner has been asked for the shape", answer=choice.reason)
    best = None if choice is None or choice.best is None else choice.best.to_document()
    plan, reason = peers.broadcast_value("plan", None if choice is None else (best, choice.reason))
    peers.wait_for_all()
    if plan is None:
        raise ValueError(f"stages='auto' finds no shape for these processes: {reason}")
    return Plan.from_document(plan)


def choose_shape(profile: Profile, devices: Sequence[RankDevice], environment: WorkerEnvironment) -> PlanChoice:
    """The best shape for these devices, by rank, with the script's micro-batch if it gives one.

    A training whose random numbers depend on the size of the micro-batches keeps the size with which it has begun.
    """
    auto_config = _load_planner()
    micro_batch, kept_for = environment.plan.micro_batch or None, ""
    if micro_batch is None and profile.micro_batch_kept_for:
        micro_batch = _find_trained_micro_batch(environment.checkpoint_url)
        kept_for = profile.micro_batch_kept_for if micro_batch else ""
    known_bytes = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    choice: PlanChoice = auto_config.choose_plan(
        profile,
        gpus=len(devices),
        global_batch=environment.plan.global_batch,
        device_memory_bytes=min(known_bytes, default=None),
        gpus_per_vm=min(Counter(device.host for device in devices).values()),
        pins=auto_config.Pins(micro_batch=micro_batch),
    )
    if kept_for:
        why = f"; the micro-batch stays {micro_batch}, because random numbers depend on it: {kept_for}"
        choice = replace(choice, reason=choice.reason + why)
    if choice.best is not None and environment.checkpoint_url:
        _keep_plan(environment.checkpoint_url, choice.best)
    return choice


def _find_trained_micro_batch(url: str) -> int | None:
    """The micro-batch by which the checkpoints in the store were trained; None: there are no checkpoints."""
    if not url:
        return None
    store = CheckpointStore(url)
    text = store.get(_PLAN_FILE) if store.list_steps() else None
    try:
        return None if text is None else Plan.from_document(json.loads(text)).micro_batch
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{store.url}/{_PLAN_FILE} is no plan ({first_line(error)}): give the micro-batch of the checkpoints as "
            "Varuna(..., chunk_size=m)"
        ) from error


def _keep_plan(url: str, plan: Plan) -> None:
    try:
        CheckpointStore(url).put(_PLAN_FILE, json.dumps(plan.to_document()).encode())
    except CheckpointError as error:
        _log.warning("the plan is not kept beside the checkpoints", url=url, error=str(error))


def _load_planner() -> ModuleType:
    """The planner's module, which imports numba; so only rank 0 of an open shape imports it."""
    name = "varuna_planner.search.auto_config"
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        # numba looks for a folder for compiled code, the package's own or the user's, and can write to none.
        if "locator" not in str(error):
            raise
        numba_config = importlib.import_module("numba").config
        numba_config.CACHE_DIR = tempfile.mkdtemp(prefix="varuna-planner-")
        return importlib.import_module(name)
