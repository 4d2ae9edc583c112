"""The part of a plan that workers need, as `PlanSpec` of agent.proto. Its field names are those of `Plan`."""

from __future__ import annotations

from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb

_FIELDS = [field.name for field in pb.PlanSpec.DESCRIPTOR.fields]


def make_plan_spec(plan: Plan) -> pb.PlanSpec:
    """Raises what protobuf raises for values that no message holds."""
    return pb.PlanSpec(**{name: getattr(plan, name) for name in _FIELDS})


def parse_plan_spec(spec: pb.PlanSpec) -> Plan:
    """The plan without its predictions. Fields that the manager left empty have the defaults of `Plan`."""
    values = {name: getattr(spec, name) for name in _FIELDS}
    values |= {name: tuple(getattr(spec, name)) for name in ("stage_starts", "recompute", "shares")}
    values |= {name: values[name] or getattr(Plan, name) for name in ("policy", "link_connections")}
    return Plan(**values)
