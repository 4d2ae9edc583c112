"""What the pods of a fleet need between the calls of the manager: join tokens, patience with limits, and removal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.kubernetes.api import ApiAwayError, ApiRefusedError, KubernetesApi, Object
from varuna_manager.providers.kubernetes.pod_body import POOL_LABEL, make_secret_body
from varuna_manager.providers.kubernetes.pod_states import PodCondition, PodState, find_condition
from varuna_manager.providers.kubernetes.pools import NodePools
from varuna_manager.providers.kubernetes.settings import KubernetesSettings

__all__ = ["Housekeeping", "try_all"]

_AT_ONCE = 16
_TOKEN_KEPT_S = 1800.0
"""How long a token may wait for its Secret. It is valid for an hour, and then the agent has to start."""
_PAUSE_S = 5.0
"""Between two tries to make a pod's Secret."""

Item = TypeVar("Item")


class _RefusedSecret(NamedTuple):
    """Why the API server did not make a pod's Secret, and when it is asked again."""

    error: ApiRefusedError | ApiAwayError
    again_at: float


class Housekeeping:
    """`unix_now`: seconds since the epoch. All methods raise ApiRefusedError and ApiAwayError, and can be repeated."""

    def __init__(
        self,
        settings: KubernetesSettings,
        api: KubernetesApi,
        join_token: Callable[[str], Awaitable[str]],
        pools: NodePools,
        unix_now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._api = api
        self._join_token = join_token
        self._pools = pools
        self._unix_now = unix_now
        self._with_token: set[str] = set()
        self._unsent: dict[str, tuple[str, float]] = {}
        """By pod: the token that is in no Secret yet, and when it was made. Each token is a row in the store."""
        self._refused: dict[str, _RefusedSecret] = {}
        self._stuck_since: dict[str, float] = {}
        self._ended_since: dict[str, float] = {}

    def forget_pod(self, name: str) -> None:
        self._with_token.discard(name)
        self._unsent.pop(name, None)
        self._refused.pop(name, None)
        self._stuck_since.pop(name, None)
        self._ended_since.pop(name, None)

    async def give_tokens(self, pods: Sequence[Object]) -> None:
        """Make the Secrets of pods that have a node and do not run yet.

        Not before, because a token is valid for an hour, and a pod may wait longer for its node. The kubelet waits for
        the Secret.
        """
        await try_all(self._give_token, [pod for pod in pods if self._needs_token(pod)])

    def find_overdue(self, pods: Sequence[Object]) -> Sequence[tuple[Object, Refusal]]:
        """Pods that have waited for too long, and what that says of their pools."""
        overdue = []
        for pod in pods:
            refusal = self._judge_patience(pod["metadata"]["name"], find_condition(pod))
            if refusal is not None:
                self._pools.note_refused(_pool_name(pod), refusal)
                overdue.append((pod, refusal))
        return overdue

    def find_removable(self, ended: Sequence[Object]) -> Sequence[Object]:
        """Pods that ended long enough ago."""
        now = self._unix_now()
        for pod in ended:
            self._ended_since.setdefault(pod["metadata"]["name"], now)
        kept_s = self._settings.ended_pods_kept_s
        return [pod for pod in ended if now >= self._ended_since[pod["metadata"]["name"]] + kept_s]

    def _needs_token(self, pod: Object) -> bool:
        has_node = bool((pod.get("spec") or {}).get("nodeName"))
        is_pending = (pod.get("status") or {}).get("phase", "Pending") == "Pending"
        return has_node and is_pending and pod["metadata"]["name"] not in self._with_token

    async def _give_token(self, pod: Object) -> None:
        name, now = pod["metadata"]["name"], self._unix_now()
        refused = self._refused.get(name)
        if refused is not None and now < refused.again_at:
            raise refused.error.with_traceback(None)  # still the trouble of this round
        try:
            await self._api.create_secret(make_secret_body(pod, await self._find_token(name)))
        except (ApiRefusedError, ApiAwayError) as error:
            if not isinstance(error, ApiRefusedError) or error.reason != "AlreadyExists":
                self._refused[name] = _RefusedSecret(error, now + _PAUSE_S)
                raise
        self._with_token.add(name)
        self._unsent.pop(name, None)
        self._refused.pop(name, None)
        self._pools.note_granted(_pool_name(pod))

    async def _find_token(self, name: str) -> str:
        """The token of the pod's earlier tries, or a new one."""
        text, made_at = self._unsent.get(name, ("", -float("inf")))
        if self._unix_now() >= made_at + _TOKEN_KEPT_S:
            text = await self._join_token(name)
            self._unsent[name] = text, self._unix_now()
        return text

    def _judge_patience(self, name: str, condition: PodCondition) -> Refusal | None:
        now, settings = self._unix_now(), self._settings
        if condition.state is not PodState.STUCK:
            self._stuck_since.pop(name, None)
        if condition.state is PodState.UNSCHEDULED and now >= condition.since + settings.pending_timeout_s:
            text = f"pod {name} had no node within {settings.pending_timeout_s:.0f} s: {condition.reason}"
            return Refusal(kind=RefusalKind.CAPACITY, reason=text)
        if condition.state is PodState.QUEUED and now >= condition.since + settings.pending_timeout_s:
            queue = "" if settings.queue_name is None else f" to queue {settings.queue_name}"
            text = f"pod {name} was not admitted{queue} within {settings.pending_timeout_s:.0f} s: {condition.reason}"
            return Refusal(kind=RefusalKind.QUOTA, reason=text)
        if condition.state is PodState.STUCK:
            since = self._stuck_since.setdefault(name, now)
            if now >= since + settings.stuck_timeout_s:
                text = f"the agent's container of pod {name} does not start: {condition.reason}"
                return Refusal(kind=RefusalKind.FAILED, reason=text)
        return None


async def try_all(act: Callable[[Item], Awaitable[None]], items: Iterable[Item]) -> None:
    """Does it for all items, some at once, also when it fails for one. Raises the first one's error then."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def try_one(item: Item) -> None:
        async with gate:
            await act(item)

    results = await asyncio.gather(*map(try_one, items), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0]


def _pool_name(pod: Object) -> str:
    labels: Any = pod["metadata"].get("labels") or {}
    return str(labels.get(POOL_LABEL, ""))
