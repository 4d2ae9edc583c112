"""What a pod's status means: it exists, waits for a node, is stuck, is being deleted, or has ended and why.

Sources: the Kubernetes pages "Pod Lifecycle", "Disruptions" (pod disruption conditions), "Node Shutdowns" and
"Images", and the reasons of the kubelet's container states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from varuna_manager.providers.kubernetes.settings import AGENT_CONTAINER

__all__ = ["PodCondition", "PodState", "describe_disappearance", "find_condition", "find_deadline", "parse_time"]

Pod = Mapping[str, Any]

_STUCK_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Reasons for which the agent's container waits, and that seldom pass by themselves."""
_DISRUPTIONS: Mapping[str, str] = {
    "PreemptionByScheduler": "the scheduler gave its place to a pod of a higher priority",
    "DeletionByTaintManager": "its node got a taint that it does not tolerate",
    "EvictionByEvictionAPI": "it was evicted through the API, as by kubectl drain",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node shut down or evicted it",
}
_LONGEST_MESSAGE = 300


class PodState(StrEnum):
    THERE = "there"
    """It runs, or may run soon."""
    UNSCHEDULED = "unscheduled"
    """It has no node."""
    QUEUED = "queued"
    """It may not have a node yet: Kueue, or another owner of a scheduling gate, holds it."""
    STUCK = "stuck"
    """It has a node, and the container of its agent cannot start."""
    ENDED = "ended"
    """It runs no more, by itself or by what Kubernetes did."""


@dataclass(frozen=True, kw_only=True)
class PodCondition:
    state: PodState
    reason: str
    """For people; of THERE, what it is waiting for."""
    since: float
    """When the state began, in seconds since the epoch."""


def find_condition(pod: Pod) -> PodCondition:
    status = pod.get("status") or {}
    created_at = parse_time(pod["metadata"].get("creationTimestamp"))
    if status.get("phase") in ("Failed", "Succeeded"):
        return PodCondition(state=PodState.ENDED, reason=_describe_end(pod), since=created_at)
    scheduled = _find_named(status, "PodScheduled")
    if not (pod.get("spec") or {}).get("nodeName"):
        since = parse_time(scheduled.get("lastTransitionTime"), created_at)
        message = _shorten(scheduled.get("message", ""))
        if scheduled.get("reason") == "SchedulingGated" or (pod.get("spec") or {}).get("schedulingGates"):
            gates = ", ".join(gate["name"] for gate in (pod.get("spec") or {}).get("schedulingGates") or ())
            reason = f"it is not admitted yet (scheduling gate {gates})" if gates else "it is not admitted yet"
            return PodCondition(state=PodState.QUEUED, reason=reason, since=since)
        reason = message or "the scheduler has not looked at it yet"
        return PodCondition(state=PodState.UNSCHEDULED, reason=reason, since=since)
    waiting = (_find_agent(status).get("state") or {}).get("waiting") or {}
    since = parse_time(scheduled.get("lastTransitionTime"), created_at)
    if waiting.get("reason") in _STUCK_REASONS:
        reason = f"{waiting['reason']}: {_shorten(waiting.get('message', ''))}".removesuffix(": ")
        return PodCondition(state=PodState.STUCK, reason=reason, since=since)
    return PodCondition(state=PodState.THERE, reason="its agent is starting", since=since)


def find_deadline(pod: Pod) -> float | None:
    """When the pod will be killed, if Kubernetes has announced that, in seconds since the epoch."""
    deletion = pod["metadata"].get("deletionTimestamp")
    if deletion is not None:
        return parse_time(deletion)
    disruption = _find_disruption(pod)
    if disruption:
        grace_s = float((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 0.0)
        return parse_time(disruption.get("lastTransitionTime")) + grace_s
    return None


def describe_disappearance(pod: Pod) -> str:
    """Why a pod is no longer there, by what was last seen of it."""
    if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
        return _describe_end(pod)
    text = _describe_disruption(_find_disruption(pod))
    if text:
        return text
    if pod["metadata"].get("deletionTimestamp") is not None:
        return "its pod was deleted, and not by this manager"
    return "its pod was deleted at once, as when its node is gone or by kubectl delete --force"


def parse_time(text: str | None, default: float = 0.0) -> float:
    """Seconds since the epoch."""
    return default if not text else datetime.fromisoformat(text).timestamp()


def _describe_end(pod: Pod) -> str:
    """Eviction and node loss come first: a container that they kill has an exit code as well."""
    status = pod.get("status") or {}
    name, terminated = _find_terminated(status)
    if terminated.get("reason") == "OOMKilled":
        return f"its container ran out of memory (OOMKilled, {_describe_memory_limit(pod)})"
    text = _describe_disruption(_find_disruption(pod))
    reason, message = status.get("reason", ""), _shorten(status.get("message", ""))
    if reason == "Evicted":
        return _join("its node evicted it (Evicted)", message)
    if reason in ("NodeLost", "NodeShutdown", "Shutdown", "Terminated"):
        return _join(f"its node shut down ({reason})", message)
    if text:
        return text
    if reason:
        return _join(f"Kubernetes ended it ({reason})", message)
    if not terminated:
        return "its pod ended, and no container says why"
    who = "its agent" if name == AGENT_CONTAINER else f"its container {name}"
    code = terminated.get("exitCode", 0)
    if code == 0:
        return f"{who} ended"
    return _join(f"{who} ended with exit code {code}", _shorten(terminated.get("message", "")))


def _describe_memory_limit(pod: Pod) -> str:
    for container in (pod.get("spec") or {}).get("containers") or ():
        if container.get("name") == AGENT_CONTAINER:
            limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
            return f"limit {limit}" if limit else "no limit of its own: its node has none left"
    return "limit unknown"


def _find_disruption(pod: Pod) -> Mapping[str, Any]:
    status = pod.get("status") or {}
    for kind in ("TerminationTarget", "DisruptionTarget"):  # the first is Kueue's
        condition = _find_named(status, kind)
        if condition.get("status") == "True":
            return condition
    return {}


def _describe_disruption(condition: Mapping[str, Any]) -> str:
    if not condition:
        return ""
    reason = condition.get("reason", "")
    return _join(_DISRUPTIONS.get(reason, reason or "it is to be disrupted"), _shorten(condition.get("message", "")))


def _find_named(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = (condition for condition in status.get("conditions") or () if condition.get("type") == kind)
    return next(found, {})


def _find_agent(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the agent's container, or of an init container that keeps it from starting. An init container that
    runs may be a sidecar, which runs as long as the pod does."""
    for each in status.get("initContainerStatuses") or ():
        state = each.get("state") or {}
        is_stuck = (state.get("waiting") or {}).get("reason") in _STUCK_REASONS
        if is_stuck or (state.get("terminated") or {}).get("exitCode", 0) != 0:
            return _as_mapping(each)
    found = (each for each in status.get("containerStatuses") or () if each.get("name") == AGENT_CONTAINER)
    return next(found, {})


def _find_terminated(status: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The container of the agent, or else the first one that ended, and how."""
    statuses: Sequence[Mapping[str, Any]] = [_find_agent(status), *(status.get("containerStatuses") or ())]
    for each in statuses:
        terminated = (each.get("state") or {}).get("terminated")
        if terminated:
            return each["name"], _as_mapping(terminated)
    return "", {}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    assert isinstance(value, Mapping)
    return value


def _join(text: str, message: str) -> str:
    return f"{text}: {message}" if message else text


def _shorten(message: str) -> str:
    """One line."""
    line = " ".join(str(message).split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[: _LONGEST_MESSAGE - 3]}..."
