"""What a pod's status means."""

from __future__ import annotations

from typing import Any

import pytest

from varuna_manager.providers.kubernetes.pod_states import PodState, find_condition, find_deadline, parse_time

AT = "2026-11-25T12:00:00Z"
RUNNING = {"name": "agent", "state": {"running": {"startedAt": AT}}}
SIDECAR = {"name": "proxy", "state": {"running": {"startedAt": AT}}}
PULLING = {"name": "agent", "state": {"waiting": {"reason": "ContainerCreating"}}}
FORBIDDEN = {"name": "fetch", "state": {"waiting": {"reason": "ErrImagePull", "message": "pull access\ndenied"}}}
FAILED = {"name": "fetch", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no such bucket"}}}
DONE = {"name": "fetch", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
KILLED = {"name": "agent", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}


def pod(*, node: str | None = "node-1", deleted: str | None = None, **status: Any) -> dict[str, Any]:
    metadata = {"name": "a", "uid": "1", "creationTimestamp": AT, **({"deletionTimestamp": deleted} if deleted else {})}
    spec = {"terminationGracePeriodSeconds": 60, "containers": [{"name": "agent"}]}
    return {"metadata": metadata, "spec": {**spec, **({"nodeName": node} if node else {})}, "status": status}


@pytest.mark.parametrize(
    ("seen", "state", "reason"),
    [
        (pod(node=None), PodState.UNSCHEDULED, "the scheduler has not looked at it yet"),
        (pod(phase="Pending"), PodState.THERE, "its agent is starting"),
        (pod(phase="Pending", containerStatuses=[PULLING]), PodState.THERE, "its agent is starting"),
        (pod(phase="Running", containerStatuses=[RUNNING]), PodState.THERE, "its agent is starting"),
        (pod(initContainerStatuses=[SIDECAR], containerStatuses=[RUNNING]), PodState.THERE, "its agent is starting"),
        (pod(initContainerStatuses=[DONE], containerStatuses=[PULLING]), PodState.THERE, "its agent is starting"),
        (pod(initContainerStatuses=[FORBIDDEN]), PodState.STUCK, "ErrImagePull: pull access denied"),
        (
            pod(phase="Failed", initContainerStatuses=[FAILED], containerStatuses=[PULLING]),
            PodState.ENDED,
            "its container fetch ended with exit code 3: no such bucket",
        ),
        (
            pod(phase="Failed", initContainerStatuses=[SIDECAR], containerStatuses=[KILLED]),
            PodState.ENDED,
            "its container ran out of memory (OOMKilled, no limit of its own: its node has none left)",
        ),
        (pod(phase="Failed"), PodState.ENDED, "its pod ended, and no container says why"),
        (pod(phase="Failed", reason="DeadlineExceeded"), PodState.ENDED, "Kubernetes ended it (DeadlineExceeded)"),
    ],
)
def test_a_pods_condition(seen: dict[str, Any], state: PodState, reason: str) -> None:
    condition = find_condition(seen)
    assert (condition.state, condition.reason) == (state, reason)


def test_a_deadline_is_the_deletions_else_the_disruptions_and_a_withdrawn_disruption_is_none() -> None:
    def disrupted(status: str) -> list[dict[str, str]]:
        return [{"type": "DisruptionTarget", "status": status, "reason": "x", "lastTransitionTime": AT}]

    deletion = "2026-11-25T12:00:20Z"
    assert find_deadline(pod(conditions=disrupted("True"))) == parse_time(AT) + 60
    assert find_deadline(pod(conditions=disrupted("True"), deleted=deletion)) == parse_time(AT) + 20
    assert find_deadline(pod(conditions=disrupted("False"))) is None
    assert find_deadline(pod()) is None
