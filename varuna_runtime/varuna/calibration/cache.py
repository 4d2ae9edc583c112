"""Profiles that were measured before, by what they hold for: the structure of the model, and the hardware.

A calibration looks here first, and leaves here what it measures. What goes wrong with the cache is told in the log and
no more: then the model is measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from varuna.calibration.links import ring_sizes
from varuna.calibration.measuring import doubling
from varuna.calibration.optimizer import OptimizerMemory, numbers_of_holders
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.store import CheckpointStore
from varuna.partition import ModelMap
from varuna.partition.shapes import Boundary
from varuna.precision import Precision
from varuna_planner.profile import Profile

__all__ = ["ProfileCache", "fingerprint", "why_not_enough"]

_log = structlog.get_logger(__name__)


def fingerprint(
    model: nn.Module,
    model_map: ModelMap,
    inputs: Mapping[str, Any],
    *,
    optimizers: Sequence[Optimizer],
    memory: Sequence[OptimizerMemory],
    precision: Precision,
    hardware: Sequence[str],
) -> str:
    """64 hexadecimal digits, the same for models that cost the same on hardware of the same kind.

    Whatever might make a difference is in it: a model that is measured once too often costs seconds, one that gets
    another's profile trains slowly. Values of parameters make none.

    Args:
        inputs: one example.
        memory: what each of the optimizers keeps on the device.
        hardware: of every rank.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    described = {
        "modules": [[name, _type_name(module), _numbers(module)] for name, module in model.named_modules()],
        "sections": [[section.name, section.parameters] for section in model_map.sections],
        "parameters": [
            [name, parameters[name].shape, str(parameters[name].dtype), parameters[name].requires_grad]
            for name in model_map.parameter_bytes
        ],
        "shared": sorted(model_map.shared.items()),
        "boundaries": [
            [_boundary(boundary) for boundary in model_map.boundary(cut)] for cut in range(1, len(model_map.sections))
        ],
        "inputs": [[leaf.shape, str(leaf.dtype)] for leaf in tree_flatten(dict(inputs))[0] if isinstance(leaf, Tensor)],
        "random": model_map.random_by_micro_batch,
        "precision": str(precision.dtype),
        "optimizer": [
            fact
            for optimizer, kept in zip(optimizers, memory, strict=True)
            for fact in (_type_name(optimizer), kept.per_element, kept.fixed)
        ],
        "torch": torch.__version__.split(".")[:2],
        "hardware": sorted(set(hardware)),
    }
    if len(optimizers) > 1:
        holder = numbers_of_holders(optimizers)
        described["holders"] = [holder.get(id(parameters[name])) for name in model_map.parameter_bytes]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _type_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _numbers(module: nn.Module) -> dict[str, Any]:
    """What the module was made with, as far as it shows: widths, heads, dropout, names of activations."""
    own = vars(module).items()
    return {name: repr(value) for name, value in own if isinstance(value, bool | int | float | str)}


def _boundary(boundary: Boundary) -> list[Any]:
    return [boundary.shape, str(boundary.dtype), boundary.requires_grad, boundary.rows_per_example]


def why_not_enough(profile: Profile, names: Sequence[str], hosts: Sequence[str], global_batch: int) -> str | None:
    """Why a profile from the cache does not do for a model with sections of these names, on a fleet; None: it does.

    `hosts`: of each rank. A profile does for a smaller fleet than it was measured on, not for one that has links or
    rings that it could not measure; nor where a small global batch kept it from sizes that may pay.
    """
    if misfit := profile.misfit(names):
        return misfit
    try:
        ranks, limit = int(profile.environment["ranks"]), int(profile.environment["global_batch"])
        before = profile.environment["hosts"].split(",")
    except (KeyError, ValueError):
        return "it does not say what it was measured on"
    if ranks < max(ring_sizes(len(hosts)), default=1):
        return f"it was measured on {ranks} ranks, and there are {len(hosts)}"
    if len(before) == 1 and len(set(hosts)) > 1:
        return "it was measured on one machine, and there are several"
    if len(before) == ranks and len(set(hosts)) < len(hosts):
        return "it was measured with one rank on each machine, and there are several on one"
    if profile.micro_batches[-1] == doubling(limit)[-1] < doubling(global_batch)[-1]:
        return f"it was measured for a global batch of {limit}, and this one is {global_batch}"
    return None


class ProfileCache:
    """`url`: a folder or object store, as for checkpoints."""

    def __init__(self, url: str) -> None:
        self._url = url

    def find(self, key: str) -> Profile | None:
        """The profile of a fingerprint; None when there is none that can be read."""
        try:
            text = CheckpointStore(self._url).get(_path(key))
            return None if text is None else Profile.from_json(text.decode())
        except (CheckpointError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
            _log.warning("the profile cache cannot be used: measuring", url=self._url, error=str(error))
            return None

    def keep(self, key: str, profile: Profile) -> None:
        """In the place of what was there."""
        try:
            CheckpointStore(self._url).put(_path(key), profile.to_json().encode())
        except (CheckpointError, ValueError) as error:
            _log.warning("the profile is not kept for other jobs", url=self._url, error=str(error))


def _path(key: str) -> str:
    return f"{key}.json"
