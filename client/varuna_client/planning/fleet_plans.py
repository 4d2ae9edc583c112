"""`varuna plan --fleet`: what each pool of a fleet gives for a dollar, and which VMs the manager would ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna_client.errors import UserError
from varuna_client.planning.plans import shape_document, stages_table
from varuna_client.text.render import number, shape

if TYPE_CHECKING:
    from varuna_manager.domain.pool_choice import PoolChoice, PoolView
    from varuna_manager.domain.pools import PoolTerms
    from varuna_planner.profile.document import Profile
    from varuna_proto.plan import Plan

__all__ = ["FleetQuestion", "fleet_page", "plan_fleet", "read_fleet"]

_JOIN_S = 300.0
_STOP_S = 10.0
"""What the manager assumes before it has seen VMs come and go."""
_MILLION = 1e6


@dataclass(frozen=True, kw_only=True)
class FleetQuestion:
    """What `varuna plan --fleet` was asked."""

    profile: Profile
    """Of GPUs with the relative speed 1."""
    gpus: int
    gpus_per_vm: int
    hazard_per_hour: float
    """Of a VM in any pool."""
    options: Mapping[str, Any]
    """Further arguments of `choose_plan`."""

    @property
    def vms(self) -> int:
        return -(-self.gpus // self.gpus_per_vm)

    def choose_mixed(self, gpus: Mapping[str, int], speeds: Mapping[str, float]) -> Plan | str:
        """The best plan for GPUs of several types, given their numbers and relative speeds, or why there is none."""
        from varuna_planner.profile.speed import scale_speed
        from varuna_planner.search.mixed import TypedGpus, choose_mixed_plan

        options = dict(self.options)
        memory = options.pop("device_memory_bytes")
        groups = [
            TypedGpus(
                gpu_type=gpu_type,
                gpus=count,
                profile=scale_speed(self.profile, speeds[gpu_type]),
                device_memory_bytes=memory,
            )
            for gpu_type, count in gpus.items()
        ]
        found = choose_mixed_plan(groups, gpus_per_vm=self.gpus_per_vm, **options)
        return found.reason if found.best is None else found.best

    def choose(self, gpus: int, relative_speed: float) -> Plan | str:
        """The best plan for so many GPUs of this speed, or why there is none."""
        from varuna_planner.profile.speed import scale_speed
        from varuna_planner.search.auto_config import choose_plan

        found = choose_plan(
            scale_speed(self.profile, relative_speed), gpus=gpus, gpus_per_vm=self.gpus_per_vm, **self.options
        )
        return found.reason if found.best is None else found.best


def read_fleet(path: Path) -> Sequence[PoolTerms]:
    """The pools of FLEET.yaml. Their providers' files are not read. Raises UserError."""
    from varuna_manager.providers.pools.settings import FleetSettingsFile
    from varuna_manager.providers.settings_file import read_settings_file

    try:
        return [pool.make_terms() for pool in read_settings_file(path, FleetSettingsFile).pools]
    except ValueError as error:
        raise UserError(str(error)) from None


def plan_fleet(pools: Sequence[PoolTerms], question: FleetQuestion) -> dict[str, Any]:
    """What --json prints. Raises UserError if no pool may have VMs, or the chosen ones fit no plan."""
    from varuna_planner.search.layouts import describe_gpu_types

    views = [_make_view(terms, question) for terms in pools]
    choice = _choose_mix(views, question)
    mix = [view for view in views if view.name in choice.counts]
    if not mix:
        raise UserError(f"no VM can be asked for ({choice.reason}): raise max_vms of a pool")
    vms = sum(choice.counts.values())
    best = _plan_mix(mix, choice.counts, question)
    if isinstance(best, str):
        raise UserError(f"the {vms} VMs that would be asked for fit no plan: {best}")
    cost = sum(view.price_per_hour * choice.counts[view.name] for view in mix)
    return {
        "pools": [_describe_pool(view, choice, question) for view in views],
        "mix": {
            "vms": dict(choice.counts),
            "price_per_hour": cost,
            "dollars_per_million_examples": _price_million(cost, best.examples_per_s),
            "reason": choice.reason,
        },
        "best": {
            **shape_document(best, len(question.profile.sections)),
            "predicted_minibatch_s": best.predicted_minibatch_s,
            "examples_per_s": best.examples_per_s,
            "shares": list(best.shares),
            "gpu_types": list(best.gpu_types),
            "types": describe_gpu_types(best),
        },
        "replicas_by_zone": _share_out(best, mix, choice.counts, question.gpus_per_vm),
    }


def _plan_mix(mix: Sequence[PoolView], counts: Mapping[str, int], question: FleetQuestion) -> Plan | str:
    """The plan of the VMs that would be asked for."""
    gpus: dict[str, int] = {}
    speeds: dict[str, float] = {}
    left = question.gpus
    for view in mix:
        count = min(counts[view.name] * question.gpus_per_vm, left)
        left -= count
        gpus[view.gpu_type] = gpus.get(view.gpu_type, 0) + count
        speeds[view.gpu_type] = min(speeds.get(view.gpu_type, inf), view.terms.relative_speed)
    if len(gpus) > 1:
        return question.choose_mixed(gpus, speeds)
    return question.choose(sum(gpus.values()), min(speeds.values()))


def _make_view(terms: PoolTerms, question: FleetQuestion) -> PoolView:
    from varuna_manager.domain.pool_choice import PoolView

    return PoolView(
        terms=terms,
        gpus=question.gpus_per_vm,
        gpu_type=terms.gpu_type,
        price_per_hour=terms.price_per_hour,
        hazard_per_hour=question.hazard_per_hour,
    )


def _choose_mix(views: Sequence[PoolView], question: FleetQuestion) -> PoolChoice:
    """As the manager would, with no VM there, for a job that may mix types of GPU."""
    from varuna_manager.domain.pool_choice import PoolConditions, choose_pools

    conditions = PoolConditions(join_s=_JOIN_S, stop_s=_STOP_S, mixes_types=True)
    return choose_pools(0.0, question.vms, views, conditions)


def _describe_pool(view: PoolView, choice: PoolChoice, question: FleetQuestion) -> dict[str, Any]:
    """The pool as if all GPUs came from it."""
    terms = view.terms
    vms = question.vms if terms.max_vms is None else min(terms.max_vms, question.vms)
    gpus = min(vms * question.gpus_per_vm, question.gpus)
    plan = question.choose(gpus, terms.relative_speed) if gpus else "it may have no VM"
    cost = vms * view.price_per_hour
    found: dict[str, Any] = {
        "p": None,
        "d": None,
        "examples_per_s": None,
        "dollars_per_million_examples": None,
        "why_none": plan,
    }
    if not isinstance(plan, str):
        found = {
            "p": plan.p,
            "d": plan.d,
            "examples_per_s": plan.examples_per_s,
            "dollars_per_million_examples": _price_million(cost, plan.examples_per_s),
            "why_none": None,
        }
    return {
        "name": terms.name,
        "zone": terms.zone,
        "gpu_type": terms.gpu_type,
        "relative_speed": terms.relative_speed,
        "vm_price_per_hour": view.price_per_hour,
        "vms": vms,
        "price_per_hour": cost,
        **found,
        "chosen_vms": choice.counts.get(terms.name, 0),
    }


def _share_out(plan: Plan, mix: Sequence[PoolView], counts: Mapping[str, int], gpus_per_vm: int) -> dict[str, int]:
    """How many whole replicas each zone has. A pool without a zone is one of its own."""
    from varuna_planner.placement import share_replicas

    devices: dict[str, int] = {}
    for view in mix:
        zone = view.terms.zone or view.name
        devices[zone] = devices.get(zone, 0) + counts[view.name] * gpus_per_vm
    return share_replicas(plan.p, plan.d, devices)


def _price_million(price_per_hour: float, examples_per_s: float) -> float:
    return price_per_hour / 3600.0 / examples_per_s * _MILLION


def fleet_page(document: dict[str, Any]) -> RenderableType:
    """The same for people."""
    best, mix = document["best"], document["mix"]
    head = (
        f"{shape(best['p'], best['d'])}, micro-batch {best['micro_batch']}, {best['policy']}: "
        f"{best['predicted_minibatch_s']:.4g} s per mini-batch, {best['examples_per_s']:.4g} examples/s, "
        f"${mix['price_per_hour']:.4g} an hour, ${mix['dollars_per_million_examples']:.4g} per million examples"
    )
    types = [Text(f"over {best['types']}")] if best["types"] else []
    zones = ", ".join(f"{count} in {zone}" for zone, count in document["replicas_by_zone"].items())
    heads = ("POOL", "ZONE", "GPU", "SPEED", "$/H", "VMS", "P×D", "EX/S", "$/M EX", "CHOSEN")
    table = Table(*heads, box=None, pad_edge=False)
    for pool in document["pools"]:
        has_plan = pool["why_none"] is None
        table.add_row(
            pool["name"],
            pool["zone"] or "-",
            pool["gpu_type"] or "-",
            f"{pool['relative_speed']:.3g}",
            f"{pool['vm_price_per_hour']:.4g}",
            str(pool["vms"]),
            shape(pool["p"], pool["d"]) if has_plan else "-",
            number(pool["examples_per_s"], 2) if has_plan else "-",
            f"{pool['dollars_per_million_examples']:.4g}" if has_plan else "-",
            str(pool["chosen_vms"]),
        )
    none = [Text(f"{pool['name']}: {pool['why_none']}") for pool in document["pools"] if pool["why_none"] is not None]
    lines = [*types, Text(f"asking for {mix['reason']}"), Text(f"replicas that lie whole in a zone: {zones}")]
    return Group(Text(head, style="bold"), *lines, "", table, *none, "", stages_table(best["stages"]))
