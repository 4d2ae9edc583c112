"""Options that describe a model by its shape, shared by `varuna profile synth` and `varuna estimate`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_client.errors import UserError

if TYPE_CHECKING:
    from varuna_planner.shapes import ModelShape

ModelFamily = Annotated[str, typer.Option("--model", help="Kind of transformer: gpt2, bert, llama, t5.")]
Layers = Annotated[int, typer.Option(min=1, help="Transformer layers; t5: of the encoder, and as many of the decoder.")]
Hidden = Annotated[int, typer.Option(min=1, help="Width of a token.")]
Seq = Annotated[int, typer.Option(min=1, help="Tokens of an example; t5: of input and of output.")]
Vocab = Annotated[int | None, typer.Option(min=1, help="Size of the vocabulary; if not given, the family's own.")]
Heads = Annotated[int | None, typer.Option(min=1, help="Attention heads; if not given, of the usual width.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Heads of keys and values; if not given, as many.")]
PrecisionName = Annotated[str, typer.Option("--precision", help="Matrix products in fp16, bf16 or fp32.")]
FusedAttention = Annotated[bool, typer.Option(help="Attention keeps its scores on the chip, as PyTorch 2 does.")]
GpuName = Annotated[str, typer.Option("--gpu", help="Such as v100-16gb, a100-80gb, h100-80gb, t4.")]
NetworkName = Annotated[str, typer.Option("--network", help="Between VMs: ethernet-10g, infiniband-hdr, ….")]
GpusPerVm = Annotated[int, typer.Option("--gpus-per-vm", min=1, help="GPUs of each VM.")]
HardwareFile = Annotated[
    Path | None, typer.Option("--hardware", metavar="HW.json", help="GPUs and networks of yours, or calibrated ones.")
]
DeviceMemoryGb = Annotated[
    float | None, typer.Option("--device-memory-gb", min=0, help="Memory of each GPU, GiB; not given: no limit.")
]
NO_LIMIT = "memory is not limited: --device-memory-gb says how much a GPU has"


def device_memory_bytes(device_memory_gb: float | None) -> int | None:
    """Raises UserError when there is no such number of bytes."""
    if device_memory_gb is None:
        return None
    if not isfinite(device_memory_gb):
        raise UserError(f"--device-memory-gb {device_memory_gb:g}: give a number of GiB, or leave it out for no limit")
    return int(device_memory_gb * 2**30)


def model_shape(
    family: str,
    layers: int,
    hidden: int,
    seq: int,
    vocab: int | None,
    heads: int | None,
    kv_heads: int | None,
    precision: str,
    fused_attention: bool,
) -> ModelShape:
    """Raises UserError when there is no such model."""
    from varuna_planner.shapes import FAMILIES, Family, ModelShape, Precision

    if family not in FAMILIES:
        raise UserError(f"no model family is called {family!r}: use one of {', '.join(FAMILIES)}")
    if precision not in list(Precision):
        raise UserError(f"no precision is called {precision!r}: use one of {', '.join(Precision)}")
    try:
        return ModelShape(
            family=Family(family),
            layers=layers,
            hidden=hidden,
            seq=seq,
            vocab=vocab or 0,
            heads=heads or 0,
            kv_heads=kv_heads or 0,
            precision=Precision(precision),
            fused_attention=fused_attention,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
