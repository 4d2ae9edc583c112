"""Whether all ranks have traced the same model: the same code, libraries and example inputs.

Ranks that differ would send tensors that the next rank does not expect, or average gradients of different models. So
each rank describes its trace, and compares the digest of the description with rank 0's before it builds anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from varuna.distributed.rendezvous import Rendezvous
from varuna.optim.precision import TrainingPrecision
from varuna.partition.cutting.model_map import ModelMap

__all__ = ["describe_trace", "digest_trace", "first_difference", "require_same_trace"]


def require_same_trace(facts: Mapping[str, str], rendezvous: Rendezvous, rank: int) -> None:
    """To be called by all ranks. Raises ValueError with the first difference on a rank that differs from rank 0.

    `facts`: what `describe_trace` gives.
    """
    text = json.dumps(facts)
    if rank == 0:  # before the digest, because ranks that differ read it
        rendezvous.exchange_values("trace/facts", (0,), base64.b64encode(zlib.compress(text.encode())).decode())
    digest = digest_trace(facts)
    (of_first,) = rendezvous.exchange_values("trace/digest", (0,), digest)
    if of_first == digest:
        return
    (packed,) = rendezvous.exchange_values("trace/facts", (0,), "")
    what, here, there = first_difference(facts, json.loads(zlib.decompress(base64.b64decode(packed))))
    raise ValueError(
        f"rank {rank} has traced a different model than rank 0: {what} is {here} on rank {rank} and {there} on rank 0. "
        "All ranks must run the same script, with the same libraries, arguments and example inputs"
    )


def digest_trace(facts: Mapping[str, str]) -> str:
    """Differs where what `describe_trace` gives differs."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def describe_trace(
    model: nn.Module, model_map: ModelMap, inputs: Mapping[str, Any], precision: TrainingPrecision
) -> dict[str, str]:
    """What must be equal on all ranks, by names for people: likely causes of differences first, then consequences.

    `inputs`: the examples that the model was traced with.
    """
    facts = {f"the version of {name}": version for name, version in _library_versions(model).items()}
    facts["the precision"] = str(precision.dtype)
    facts["the type of boundaries"] = str(model_map.crosses_as)
    facts["what random numbers belong to"] = "examples" if model_map.random_by_example else "micro-batches"
    facts["the model's mode"] = "training" if model.training else "evaluation"
    for path, leaf in tree_flatten_with_path(dict(inputs))[0]:
        facts["the example input " + "".join(map(str, path))] = _input_text(leaf)
    for name, parameter in model.named_parameters():
        facts[f"parameter {name}"] = f"{_tensor_text(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = _tensor_text(buffer)
    for call, specs in zip(model_map.graph.calls, model_map.leaf_specs, strict=True):
        facts[f"the output of call {call.number} of module {call.path or 'model'}"] = "; ".join(map(str, specs))
    for section in model_map.sections:
        facts[f"section {section.index}"] = f"{section.name} with parameters {', '.join(section.parameters)}"
    facts["what sections share"] = str(sorted(model_map.shared.items()))
    facts["whether the loss has a weight"] = str(model_map.graph.weighted)
    return facts


def first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, str, str]:
    """(name, value here, value there); a value that does not exist is "missing"."""
    names = [*here, *(name for name in there if name not in here)]
    name = next(name for name in names if here.get(name) != there.get(name))
    return name, here.get(name, "missing"), there.get(name, "missing")


def _library_versions(model: nn.Module) -> dict[str, str]:
    """The versions of torch and of the packages with the model's modules; a script's own files have none."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in sorted(packages)}
    return {"torch": torch.__version__} | {name: str(version) for name, version in versions.items() if version}


def _input_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return _tensor_text(leaf)
    return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__


def _tensor_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
