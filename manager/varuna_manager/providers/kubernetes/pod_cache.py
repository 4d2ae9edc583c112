"""The fleet's pods as the API server has them: a list, and a watch that keeps it up to date.

While the watch is under way, the pods are read from here. When it has broken (410 Gone, a lost connection, anything
else), the next reader lists them again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from varuna_manager.providers.kubernetes.api import ApiAwayError, ApiRefusedError, KubernetesApi, Object

__all__ = ["PodCache"]

_REMEMBERED = 10_000
"""Pods that are remembered as deleted."""


class PodCache:
    """`on_gone`: called with the last state of each pod that is no longer there."""

    def __init__(self, api: KubernetesApi, labels: Mapping[str, str], on_gone: Callable[[Object], None]) -> None:
        self._api = api
        self._labels = labels
        self._on_gone = on_gone
        self._pods: dict[str, Object] = {}
        self._watch: asyncio.Task[None] | None = None
        self._gone_uids: deque[str] = deque(maxlen=_REMEMBERED)
        self.lock = asyncio.Lock()
        """Held while pods are listed, and by who creates pods: so no list misses a pod that `add_pod` has added."""
        self._log = structlog.get_logger("varuna.kubernetes")

    @property
    def pods(self) -> Mapping[str, Object]:
        """By name. Call `refresh` before."""
        return self._pods

    @property
    def is_watching(self) -> bool:
        return self._watch is not None and not self._watch.done()

    async def refresh(self) -> None:
        """List the pods, unless a watch keeps them up to date. Raises ApiRefusedError, ApiAwayError."""
        if self.is_watching:
            return
        async with self.lock:
            if not self.is_watching:
                await self.list_again()

    async def list_again(self) -> None:
        """As `refresh`, for a caller that has the lock."""
        if self.is_watching:
            return
        pods, version = await self._api.list_pods(self._labels)
        before, self._pods = self._pods, {pod["metadata"]["name"]: pod for pod in pods}
        uids = {pod["metadata"]["uid"] for pod in pods}
        for pod in before.values():
            if pod["metadata"]["uid"] not in uids:
                self._note_gone(pod)
        self._watch = asyncio.create_task(self._keep_watching(version))

    def add_pod(self, pod: Object) -> None:
        """Add a pod that was just made, unless the watch has already told more of it."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if name not in self._pods and uid not in self._gone_uids:
            self._pods[name] = pod

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _keep_watching(self, version: str) -> None:
        try:
            async for kind, pod in self._api.watch_pods(self._labels, version):
                self._take_event(kind, pod)
        except ApiRefusedError as error:
            if error.code != 410:  # the version is too old, which is ordinary
                self._log.warning("the watch of the pods ended: they are listed again", error=str(error))
        except ApiAwayError as error:
            self._log.warning("the watch of the pods ended: they are listed again", error=str(error))
        except Exception:
            self._log.exception("the watch of the pods failed: they are listed again")

    def _take_event(self, kind: str, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            self._pods.pop(name, None)
            self._note_gone(pod)
        elif kind in ("ADDED", "MODIFIED"):
            self._pods[name] = pod

    def _note_gone(self, pod: Object) -> None:
        self._gone_uids.append(pod["metadata"]["uid"])
        self._on_gone(pod)
