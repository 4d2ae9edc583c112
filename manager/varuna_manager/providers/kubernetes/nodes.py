"""The nodes of the fleet's pods: taints and conditions that announce their end, and nodes that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import structlog

from varuna_manager.providers.kubernetes.api import ApiAwayError, ApiRefusedError, KubernetesApi, Object
from varuna_manager.providers.kubernetes.pod_states import parse_time

__all__ = ["NodeNotice", "NodeNotices"]

_POLL_S = 2.0
_PER_POLL = 20
"""Nodes for each `_POLL_S`, so that large fleets ask more slowly."""
_AT_ONCE = 10
_FORBIDDEN_S = 600.0


@dataclass(frozen=True)
class NodeNotice:
    deadline_unix_s: float
    reason: str


class NodeNotices:
    """`announcements`: keys of taints and types of conditions, with the seconds that a node then has.
    `unix_now`: seconds since the epoch."""

    def __init__(self, api: KubernetesApi, announcements: Mapping[str, float], unix_now: Callable[[], float]) -> None:
        self._api = api
        self._announcements = announcements
        self._unix_now = unix_now
        self._again_at = -float("inf")
        self._notices: dict[str, NodeNotice] = {}
        self._gone: set[str] = set()
        self._log = structlog.get_logger("varuna.kubernetes")

    def find_notice(self, node: str) -> NodeNotice | None:
        return self._notices.get(node)

    def is_gone(self, node: str) -> bool:
        """Whether the cluster had no such node when it was last asked."""
        return node in self._gone

    async def refresh(self, nodes: Collection[str]) -> None:
        """Ask for the nodes, unless that was done a moment ago. Errors are logged: the next call tries again."""
        now = self._unix_now()
        if now < self._again_at or not self._announcements:
            return
        self._again_at = now + _POLL_S * (1 + len(nodes) // _PER_POLL)
        self._notices = {node: notice for node, notice in self._notices.items() if node in nodes}
        self._gone &= {*nodes}
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(node: str) -> None:
            async with gate:
                await self._refresh_node(node)

        try:
            async with asyncio.TaskGroup() as group:
                for node in nodes:
                    group.create_task(ask(node))
        except* ApiRefusedError as errors:
            self._again_at = now + _FORBIDDEN_S
            text = str(errors.exceptions[0])
            self._log.warning(
                "nodes cannot be read, so their taints are no notices: give the manager the verb get on nodes",
                error=text,
                again_in_s=_FORBIDDEN_S,
            )
        except* ApiAwayError as errors:
            self._log.info("nodes cannot be read", error=str(errors.exceptions[0]))

    async def _refresh_node(self, name: str) -> None:
        try:
            node = await self._api.get_node(name)
        except ApiRefusedError as error:
            if error.code == 404:
                self._gone.add(name)
            elif error.code in (401, 403):
                raise
            return
        self._gone.discard(name)
        notice = self._read_notice(node, self._notices.get(name))
        if notice is None:
            self._notices.pop(name, None)
        else:
            self._notices[name] = notice

    def _read_notice(self, node: Object, before: NodeNotice | None) -> NodeNotice | None:
        """The notice with the earliest deadline. One whose time is not written down begins when it is first seen."""
        found = []
        for taint in (node.get("spec") or {}).get("taints") or ():
            found.append((taint["key"], f"taint {taint['key']}", taint.get("timeAdded")))
        for condition in (node.get("status") or {}).get("conditions") or ():
            if condition.get("status") == "True":
                text = f"condition {condition['type']}"
                found.append((condition["type"], text, condition.get("lastTransitionTime")))
        name, notices = node["metadata"]["name"], []
        for key, text, at in found:
            if key not in self._announcements:
                continue
            reason = f"node {name} has the {text}"
            if before is not None and before.reason == reason:
                return before
            began_at = parse_time(at, self._unix_now())
            notices.append(NodeNotice(began_at + self._announcements[key], reason))
        return min(notices, key=lambda notice: notice.deadline_unix_s, default=None)
