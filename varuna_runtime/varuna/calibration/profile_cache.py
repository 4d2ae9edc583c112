"""Earlier profiles, by what they hold for: the structure of the model, and the hardware.

A calibration first looks into this cache, and puts its profile there. When the cache cannot be used, a log line says so
and the model is measured.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from varuna.calibration.links import is_across_zones, ring_sizes
from varuna.calibration.optimizer_costs import OptimizerSetup, number_holders
from varuna.calibration.sections import list_doubled_sizes
from varuna.calibration.subject import CalibrationSubject
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.partition.cutting.shapes import Boundary
from varuna_planner.profile.document import Profile

__all__ = ["CalibratedRank", "KeptProfile", "ProfileCache", "find_misfit", "make_fingerprint"]

_log = structlog.get_logger(__name__)

_KEPT_FILE = "profile.json"
_FINGERPRINT = "fingerprint"
"""The fingerprint's name in the environment of a kept profile."""


class CalibratedRank(NamedTuple):
    """What a profile has to fit of one rank."""

    host: str
    """Its VM."""
    zone: str = ""
    """Of the VM; empty: not known."""
    gpu_type: str = ""
    """Of the VM; empty: not known."""
    hardware: str = ""
    """What its times depend on besides the model."""


def make_fingerprint(
    subject: CalibrationSubject, optimizer: OptimizerSetup, hardware: Sequence[str], gpu_type: str = ""
) -> str:
    """64 hexadecimal digits, the same for models that cost the same on hardware of the same kind.

    Everything that may make a difference is in it, because one measurement too many costs seconds, and a model with
    the profile of another one trains slowly. Values of parameters make no difference. Nor do GPUs of other types beside
    those of the profile's own: one profile has them all, as far as they were there (`find_misfit`).

    Args:
        hardware: of every rank on the profile's own type of GPU.
        gpu_type: the profile's own type; empty: not known.
    """
    model, model_map, inputs = subject.model, subject.model_map, subject.get_batch(1)
    optimizers, memory = optimizer.list_known(), optimizer.measure_memory()
    kinds = [_type_name(each) for each in optimizers] or ["not known"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    described = {
        "modules": [[name, _type_name(module), _list_settings(module)] for name, module in model.named_modules()],
        "sections": [[section.name, section.parameters] for section in model_map.sections],
        "parameters": [
            [name, parameters[name].shape, str(parameters[name].dtype), parameters[name].requires_grad]
            for name in model_map.parameter_bytes
        ],
        "shared": sorted(model_map.shared.items()),
        "boundaries": [
            [_boundary(boundary) for boundary in model_map.find_boundary(cut)]
            for cut in range(1, len(model_map.sections))
        ],
        "inputs": [[leaf.shape, str(leaf.dtype)] for leaf in tree_flatten(dict(inputs))[0] if isinstance(leaf, Tensor)],
        "random": model_map.random_by_micro_batch,
        "precision": str(subject.precision.dtype),
        "optimizer": [
            fact for kind, kept in zip(kinds, memory, strict=True) for fact in (kind, kept.per_element, kept.fixed)
        ],
        "torch": torch.__version__.split(".")[:2],
        "hardware": sorted({*hardware, *filter(None, [gpu_type])}),
    }
    if len(optimizers) > 1:
        holder = number_holders(optimizers)
        described["holders"] = [holder.get(id(parameters[name])) for name in model_map.parameter_bytes]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _type_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _list_settings(module: nn.Module) -> dict[str, Any]:
    """The settings of the module that its attributes show: widths, heads, dropout, names of activations."""
    own = vars(module).items()
    return {name: repr(value) for name, value in own if isinstance(value, bool | int | float | str)}


def _boundary(boundary: Boundary) -> list[Any]:
    described = [boundary.shape, str(boundary.dtype), boundary.requires_grad, boundary.rows_per_example]
    return described if boundary.made_as is None else [*described, str(boundary.made_as)]


def find_misfit(
    profile: Profile, names: Sequence[str], fleet: Sequence[CalibratedRank], global_batch: int
) -> str | None:
    """Why a profile from the cache is not enough for a model with these sections on a fleet; None if it is.

    A profile is enough for a smaller fleet than it was measured on. It is not enough for links, rings or types of GPU
    that it could not measure, nor if a small global batch has kept it from sizes that may pay.
    """
    hosts = [rank.host for rank in fleet]
    if misfit := profile.describe_misfit(names):
        return misfit
    try:
        ranks, limit = int(profile.environment["ranks"]), int(profile.environment["global_batch"])
        before = profile.environment["hosts"].split(",")
    except (KeyError, ValueError):
        return "it does not name the fleet that it was measured on"
    if ranks < max(ring_sizes(len(hosts)), default=1):
        return f"it was measured on {ranks} ranks, and there are {len(hosts)}"
    if len(before) == 1 and len(set(hosts)) > 1:
        return "it was measured on one machine, and there are several"
    if len(before) == ranks and len(set(hosts)) < len(hosts):
        return "it was measured with one rank on each machine, and there are several on one"
    if missing := {rank.gpu_type for rank in fleet if rank.gpu_type} - profile.known_gpu_types:
        return f"it was measured without GPUs of type {', '.join(sorted(missing))}"
    if profile.links.other_zone is None and any(
        first.host != second.host and is_across_zones(first.zone, second.zone)
        for first, second in itertools.pairwise(fleet)
    ):
        return "it was measured in one zone, and there are several"
    if profile.micro_batches[-1] == list_doubled_sizes(limit)[-1] < list_doubled_sizes(global_batch)[-1]:
        return f"it was measured for a global batch of {limit}, and this one is {global_batch}"
    return None


class ProfileCache:
    """`url`: a folder or object store, as for checkpoints."""

    def __init__(self, url: str) -> None:
        self._url = url

    def find_profile(self, key: str) -> Profile | None:
        """The profile of a fingerprint; None if there is none that can be read."""
        try:
            text = CheckpointStore(self._url).get(_file_name(key))
            return None if text is None else Profile.from_json(text.decode())
        except (CheckpointError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
            _log.warning("the profile cache cannot be used: measuring", url=self._url, error=str(error))
            return None

    def put_profile(self, key: str, profile: Profile) -> None:
        """Replaces the profile of a fingerprint."""
        try:
            CheckpointStore(self._url).put(_file_name(key), profile.to_json().encode())
        except (CheckpointError, ValueError) as error:
            _log.warning("the profile is not kept for other jobs", url=self._url, error=str(error))


class KeptProfile:
    """The profile that one training keeps beside its checkpoints, in `profile.json`.

    It is a profile document as any other. Its environment names the fingerprint, so that a profile of another model, or
    of other hardware, is not taken for this one's.
    """

    def __init__(self, url: str) -> None:
        """`url`: of the checkpoint store."""
        self._url = url

    def find_profile(self, key: str) -> Profile | None:
        """The profile, if it is there and has this fingerprint."""
        try:
            text = CheckpointStore(self._url).get(_KEPT_FILE)
            profile = None if text is None else Profile.from_json(text.decode())
        except (CheckpointError, ValueError) as error:
            _log.warning("the profile beside the checkpoints cannot be used", url=self._url, error=str(error))
            return None
        if profile is not None and profile.environment.get(_FINGERPRINT) != key:
            _log.info("the profile beside the checkpoints is of another model or other hardware", url=self._url)
            return None
        return profile

    def put_profile(self, key: str, profile: Profile) -> None:
        """Replaces the profile."""
        marked = profile.model_copy(update={"environment": {**profile.environment, _FINGERPRINT: key}})
        try:
            CheckpointStore(self._url).put(_KEPT_FILE, marked.to_json().encode())
        except (CheckpointError, ValueError) as error:
            _log.warning("the profile is not kept: the next start measures again", url=self._url, error=str(error))


def _file_name(key: str) -> str:
    return f"{key}.json"
