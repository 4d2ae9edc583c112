"""Options that describe a model by its shape, shared by `varuna profile synth` and `varuna estimate`."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_client.errors import UserError

if TYPE_CHECKING:
    from varuna_planner.profile.shapes import ModelShape

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="gpt2-355m, -1.5b, -2.5b, -8.3b, -20b, -200b, bert-base, -large; or gpt2, bert, llama, t5 with a shape.",
    ),
]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Transformer layers; t5: of the encoder, and as many of the decoder.")
]
Hidden = Annotated[int | None, typer.Option(min=1, help="Width of a token.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of an example; t5: of input and of output.")]
Vocab = Annotated[int | None, typer.Option(min=1, help="Size of the vocabulary; default: the model's own.")]
Heads = Annotated[int | None, typer.Option(min=1, help="Attention heads; default: heads of the usual width.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Heads of keys and values; default: as many as heads.")]
PrecisionName = Annotated[str, typer.Option("--precision", help="Matrix products in fp16, bf16 or fp32.")]
BoundariesName = Annotated[
    str | None,
    typer.Option(
        "--boundaries",
        help="Activations cross between stages in bf16 (as with Varuna(boundaries='bf16')), fp16 or fp32; default: "
        "fp32 under bf16, else as --precision.",
    ),
]
FusedAttention = Annotated[bool, typer.Option(help="Attention keeps its scores on the chip, as PyTorch 2 does.")]
OffloadOptimizer = Annotated[
    bool, typer.Option("--offload-optimizer", help="Keep the optimizer and its state in the VMs' memory.")
]
GpuName = Annotated[str, typer.Option("--gpu", help="A GPU, such as v100-16gb, a100-80gb, h100-80gb, t4.")]
NetworkName = Annotated[str, typer.Option("--network", help="Network between VMs: ethernet-10g, infiniband-hdr, ….")]
GpusPerVm = Annotated[int, typer.Option("--gpus-per-vm", min=1, help="GPUs of each VM.")]
HardwareFile = Annotated[
    Path | None,
    typer.Option("--hardware", metavar="HW.json", help="A table of GPUs and networks of your own."),
]
DeviceMemoryGb = Annotated[
    float | None, typer.Option("--device-memory-gb", min=0, help="Memory of each GPU in GiB; default: no limit.")
]
PinnedP = Annotated[int | None, typer.Option("--p", metavar="P", help="Pipeline stages; default: the best.")]
PinnedD = Annotated[int | None, typer.Option("--d", metavar="D", help="Replicas; default: the best.")]
PinnedMicroBatch = Annotated[
    int | None, typer.Option("--micro-batch", metavar="M", help="Examples in a micro-batch; default: the best.")
]
NO_LIMIT = "memory is not limited: --device-memory-gb sets a limit"


def device_memory_bytes(device_memory_gb: float | None) -> int | None:
    """Raises UserError when there is no such number of bytes."""
    if device_memory_gb is None:
        return None
    if not isfinite(device_memory_gb):
        raise UserError(f"--device-memory-gb {device_memory_gb:g}: give a number of GiB, or leave it out for no limit")
    return int(device_memory_gb * 2**30)


def model_shape(
    name: str,
    *,
    precision: str,
    boundaries: str | None,
    fused_attention: bool,
    **shape: int | None,
) -> ModelShape:
    """The model of `--model` and of what `shape` (fields of `ModelShape`) gives of the other options.

    Raises UserError when there is no such model.
    """
    from varuna_planner.profile.models import NAMED_MODELS
    from varuna_planner.profile.shapes import FAMILIES, ModelFamily, ModelShape, NumberFormat

    for what, which in (("precision", precision), ("type of boundaries", boundaries)):
        if which is not None and which not in list(NumberFormat):
            raise UserError(f"no {what} is called {which!r}: use one of {', '.join(NumberFormat)}")
    given: dict[str, Any] = {field: value for field, value in shape.items() if value is not None}
    given |= {
        "precision": NumberFormat(precision),
        "boundaries": None if boundaries is None else NumberFormat(boundaries),
        "fused_attention": fused_attention,
    }
    try:
        if name in NAMED_MODELS:
            fixed = next((field for field in ("layers", "hidden") if field in given), None)
            if fixed is not None:
                family = NAMED_MODELS[name].family
                raise UserError(f"{name} has its own --{fixed}: leave it out, or give --model {family} and a shape")
            return replace(NAMED_MODELS[name], **given)
        if name not in FAMILIES:
            raise UserError(
                f"no model is called {name!r}: use one of {', '.join(NAMED_MODELS)}, or "
                f"{', '.join(FAMILIES)} with --layers, --hidden and --seq"
            )
        missing = [f"--{field}" for field in ("layers", "hidden", "seq") if field not in given]
        if missing:
            named = [other for other, its in NAMED_MODELS.items() if its.family == name]
            raise UserError(
                f"--model {name} is a kind of model: give {', '.join(missing)}"
                + (f", or one by name: {', '.join(named)}" if named else "")
            )
        return ModelShape(family=ModelFamily(name), **given)
    except ValueError as error:
        raise UserError(str(error)) from None
