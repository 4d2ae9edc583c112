"""`varuna profile`: make a profile without a GPU, look at one, check one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna_client.commands.options import AsJson, print_document
from varuna_client.errors import UserError
from varuna_client.planning.files import read_hardware, read_profile, write_text
from varuna_client.planning.models import (
    BoundariesName,
    FusedAttention,
    GpuName,
    GpusPerVm,
    HardwareFile,
    Heads,
    Hidden,
    KvHeads,
    Layers,
    ModelName,
    NetworkName,
    OffloadOptimizer,
    PrecisionName,
    Seq,
    Vocab,
    model_shape,
)
from varuna_client.text.render import size

if TYPE_CHECKING:
    from varuna_planner.profile.document import Measurement, Profile, SectionProfile

profile_app = typer.Typer(help="Profiles: what a model costs on its hardware.", no_args_is_help=True)

ProfileFile = Annotated[Path, typer.Argument(metavar="P.json", help="A profile.")]


@profile_app.command()
def synth(
    model: ModelName,
    gpu: GpuName,
    network: NetworkName,
    out: Annotated[Path, typer.Option(metavar="P.json", help="File for the profile.")],
    layers: Layers = None,
    hidden: Hidden = None,
    seq: Seq = None,
    vocab: Vocab = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    precision: PrecisionName = "fp16",
    boundaries: BoundariesName = None,
    fused_attention: FusedAttention = True,
    offload_optimizer: OffloadOptimizer = False,
    gpus_per_vm: GpusPerVm = 1,
    hardware: HardwareFile = None,
    as_json: AsJson = False,
) -> None:
    """Make the profile of a model from its shape and a hardware table, without owning a GPU."""
    from varuna_planner.profile.synthesis import synthesise

    shape = model_shape(
        model,
        precision=precision,
        boundaries=boundaries,
        fused_attention=fused_attention,
        layers=layers,
        hidden=hidden,
        seq=seq,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
    )
    try:
        table = read_hardware(hardware)
        made = synthesise(shape, table, gpu, network, gpus_per_vm=gpus_per_vm, offload_optimizer=offload_optimizer)
    except ValueError as error:
        raise UserError(str(error)) from None
    write_text(out, made.to_json(), "profile")
    document = {
        "out": str(out),
        "sections": len(made.sections),
        "parameters": shape.parameters,
        "flop_per_example": shape.flops,
        "micro_batches": list(made.micro_batches),
        "environment": made.environment,
    }
    text = Text(
        f"{out}: {made.environment['model']}, {len(made.sections)} sections, on {gpu} and {network}: "
        f"varuna plan --profile {out} --gpus G --global-batch M"
    )
    print_document(document, text, as_json)


@profile_app.command()
def show(
    profile: ProfileFile,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Micro-batch size; default: the largest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a profile: its sections with times and bytes, links, all-reduces and origin."""
    found = read_profile(profile)
    document = profile_document(found, micro_batch or found.micro_batches[-1])
    print_document(document, profile_page(document), as_json)


@profile_app.command()
def validate(
    profile: ProfileFile,
    against: Annotated[
        Path | None, typer.Option(metavar="Q.json", help="Check that both profiles are of the same model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a profile; exit 0 when it can be used. Oddities are printed as warnings."""
    found = read_profile(profile)
    if against is not None:
        misfit = found.describe_misfit([section.name for section in read_profile(against).sections])
        if misfit is not None:
            raise UserError(f"{profile} is of another model than {against}: {misfit}")
    odd = oddities(found)
    document = {"valid": True, "sections": len(found.sections), "warnings": odd}
    lines = [Text(f"{profile}: valid, {len(found.sections)} sections", style="green")]
    print_document(document, Group(*lines, *(Text(f"but {warning}", style="yellow") for warning in odd)), as_json)


def oddities(profile: Profile) -> list[str]:
    """Values that a sound machine does not give, and missing ones that the planner replaces by defaults."""
    found = []
    for section in profile.sections:
        for one in section.measurements:
            where = f"section {section.index} ({section.name}) at micro-batch {one.micro_batch}"
            if one.forward_us == 0 or one.backward_us == 0:
                found.append(f"{where} takes no time: forward {one.forward_us} µs, backward {one.backward_us} µs")
        first, last = section.measurements[0], section.measurements[-1]
        if last.forward_us < first.forward_us:
            found.append(
                f"section {section.index} ({section.name}) is faster at micro-batch {last.micro_batch} than at "
                f"{first.micro_batch}: {last.forward_us:g} and {first.forward_us:g} µs: measure again when it is quiet"
            )
    if not profile.all_reduce:
        found.append("no all-reduce was measured: its time is estimated from the links")
    if len(profile.micro_batches) == 1:
        found.append(f"only micro-batch {profile.micro_batches[0]} was measured: other sizes are scaled in proportion")
    return found


def profile_document(profile: Profile, micro_batch: int) -> dict[str, Any]:
    """What `show --json` prints; times and bytes at one size, interpolated where it was not measured."""
    rows = [
        _section(section, one)
        for section, one in zip(profile.sections, profile.measurements_at(micro_batch), strict=True)
    ]
    return {
        "environment": profile.environment,
        "gpu_type": profile.gpu_type,
        "other_gpu_types": [other.model_dump() for other in profile.other_gpu_types],
        "micro_batch": micro_batch,
        "micro_batches": list(profile.micro_batches),
        "parameter_bytes": sum(section.parameter_bytes for section in profile.sections),
        "forward_us": sum(row["forward_us"] for row in rows),
        "backward_us": sum(row["backward_us"] for row in rows),
        "sections": rows,
        "stage_overhead_us": profile.stage_overhead_us,
        "shared_parameters": [shared.model_dump() for shared in profile.shared_parameters],
        "links": {name: link.model_dump() for name, link in profile.links if link is not None},
        "all_reduce": [measured.model_dump() for measured in profile.all_reduce],
    }


def _section(section: SectionProfile, measured: Measurement) -> dict[str, Any]:
    return {
        "index": section.index,
        "name": section.name,
        "state_bytes": section.parameter_bytes + section.gradient_bytes + section.optimizer_bytes,
        "optimizer_us": section.optimizer_us,
        **measured.model_dump(),
    }


def profile_page(document: dict[str, Any]) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    for name, value in document["environment"].items():
        head.add_row(name, value)
    head.add_row("micro-batches", ", ".join(map(str, document["micro_batches"])))
    if document["gpu_type"]:
        head.add_row("GPU type", document["gpu_type"])
    for other in document["other_gpu_types"]:
        slowest, fastest = (f"{extreme(other['section_speeds']):.3g}" for extreme in (min, max))
        speeds = slowest if slowest == fastest else f"{slowest} to {fastest}"
        head.add_row("other type", f"{other['gpu_type']}, {speeds} times as fast")
    for name, link in document["links"].items():
        head.add_row(
            name.replace("_", " "),
            f"{link['latency_us']:.4g} µs + {link['jitter_us']:.3g} µs of jitter, "
            f"{link['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
            + (f" over {link['connections']} connections" if link["connections"] > 1 else ""),
        )
    if document["stage_overhead_us"] > 0:
        head.add_row("engine", f"{document['stage_overhead_us']:.4g} µs on top of each forward, recompute and backward")
    for shared in document["shared_parameters"]:
        sections = ", ".join(map(str, shared["sections"]))
        head.add_row("tied weights", f"{shared['name']} in sections {sections}: {size(shared['bytes'])}")
    heads = ("SECTIONS", "NAME", "FORWARD", "BACKWARD", "RECOMPUTE", "OPTIMIZER", "OUTPUT", "KEPT", "STATE")
    table = Table(*heads, box=None, pad_edge=False)
    for rows in _alike(document["sections"]):
        first, last = rows[0], rows[-1]
        several = len(rows) > 1
        table.add_row(
            f"{first['index']}-{last['index']}" if several else str(first["index"]),
            f"{first['name']} … {last['name']}" if several else first["name"],
            *(f"{first[name] / 1e3:.3f} ms" for name in ("forward_us", "backward_us", "recompute_us", "optimizer_us")),
            *(size(first[name]) for name in ("output_bytes", "activation_bytes", "state_bytes")),
        )
    parts: list[RenderableType] = [
        head,
        "",
        Text(f"a micro-batch of {_examples(document['micro_batch'])}", style="bold"),
        table,
    ]
    if document["all_reduce"]:
        parts += ["", _all_reduce_table(document["all_reduce"])]
    return Group(*parts)


def _examples(count: int) -> str:
    return "1 example" if count == 1 else f"{count} examples"


def _all_reduce_table(measured: list[dict[str, Any]]) -> Table:
    table = Table("ALL-REDUCE", "WORKERS", "RINGS", "TIME", box=None, pad_edge=False)
    for one in sorted(measured, key=lambda one: (one["ranks"], one["rings"], one["bytes"])):
        table.add_row(size(one["bytes"]), str(one["ranks"]), str(one["rings"]), f"{one['us'] / 1e3:.3f} ms")
    return table


def _alike(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbours with the same numbers together: the layers of a synthesised profile are one line."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if groups and all(row[name] == groups[-1][0][name] for name in row if name not in ("index", "name")):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
