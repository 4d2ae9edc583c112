"""What this provider asks of the API server, through lightkube.

Objects are plain dictionaries, so that a template may use fields that the client does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx2
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    create_api_info,
)
from lightkube.types import PatchType

from varuna_manager.providers.kubernetes.settings import KubernetesSettings

__all__ = ["ApiAwayError", "ApiRefusedError", "KubernetesApi", "load_config"]

Object = Mapping[str, Any]

_TIMEOUT_S = 15.0
_PAGE = 500
_WATCH_S = 300
"""The API server ends a watch after this time, and the client begins the next one where it left off."""
_SILENCE_S = 150.0
"""The API server sends a bookmark each minute: a watch that is silent for longer has lost its connection."""
_ATTEMPTS = 4
_LONGEST_WAIT_S = 2.0
"""A call does not wait for a longer Retry-After: the caller hears of it."""

ResultT = TypeVar("ResultT")


class ApiRefusedError(Exception):
    """The API server answered with an error. `str()` is its message, in one line."""

    def __init__(self, code: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(" ".join(message.split()) or f"{code} {reason}")
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s


class ApiAwayError(Exception):
    """The API server cannot be reached, or its answer is none of its own. `str()` is one line."""


class _Pod(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Pod", "pods")


class _Secret(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Secret", "secrets")


class _Deployment(GenericNamespacedResource):
    _api_info = create_api_info("apps", "v1", "Deployment", "deployments")


class _Node(GenericGlobalResource):
    _api_info = create_api_info("", "v1", "Node", "nodes")


def load_config(settings: KubernetesSettings) -> SingleConfig:
    """Where the API server is, and with whose rights it is asked. Raises ValueError."""
    try:
        if settings.kubeconfig is not None:
            configs = KubeConfig.from_file(settings.kubeconfig)
        else:
            configs = KubeConfig.from_env()
        config = configs.get(settings.context)
    except (ConfigError, KeyError, TypeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"no access to Kubernetes ({text}): run the manager in a pod with a service account, or give kubeconfig"
        ) from error
    if config is None or config.user is None:
        raise ValueError("no access to Kubernetes: the context of the kubeconfig names no user")
    return config


class KubernetesApi:
    """Each call raises ApiRefusedError and ApiAwayError. Calls that are throttled for a moment are repeated."""

    def __init__(self, config: SingleConfig, namespace: str | None) -> None:
        self._client = _Client(config=config, namespace=namespace, timeout=httpx2.Timeout(_TIMEOUT_S))
        self.namespace = str(self._client.namespace)

    async def list_pods(self, labels: Mapping[str, str]) -> tuple[list[Object], str]:
        """The pods, and the version of the list, from which a watch can go on."""

        async def list_all() -> tuple[list[Object], str]:
            found = self._client.list(_Pod, labels=dict(labels), chunk_size=_PAGE)
            return [pod async for pod in found], found.resourceVersion

        return await _call(list_all)

    async def watch_pods(self, labels: Mapping[str, str], version: str) -> AsyncIterator[tuple[str, Object]]:
        """Changes after the version: ADDED, MODIFIED or DELETED, and the pod."""
        events = self._client.watch_with_bookmarks(_Pod, labels, version)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    kind, pod = await anext(events)
                if kind != "BOOKMARK":
                    yield kind, pod
        except TimeoutError as error:
            raise ApiAwayError(f"the watch was silent for {_SILENCE_S:.0f} s") from error
        except Exception as error:
            raise _translate(error) from error
        finally:
            await events.aclose()

    async def get_pod(self, name: str) -> Object:
        return await _call(lambda: self._client.get(_Pod, name))

    async def create_pod(self, body: Object) -> Object:
        """A field that the API server does not know is refused: it would drop it otherwise, and say so to nobody."""
        return await _call(lambda: self._client.create_strictly(_Pod(**body)))

    async def delete_pod(self, name: str, grace_s: int) -> None:
        await _call(lambda: self._client.delete(_Pod, name, grace_period=grace_s))

    async def label_pod(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Set labels; None removes one."""
        change = {"metadata": {"labels": dict(labels)}}
        await _call(lambda: self._client.patch(_Pod, name, change, patch_type=PatchType.MERGE))

    async def create_secret(self, body: Object) -> None:
        await _call(lambda: self._client.create(_Secret(**body)))

    async def get_deployment(self, name: str) -> Object:
        return await _call(lambda: self._client.get(_Deployment, name))

    async def get_node(self, name: str) -> Object:
        return await _call(lambda: self._client.get(_Node, name))

    async def close(self) -> None:
        await self._client.close()


class _Client(AsyncClient):
    """With two parameters of requests that lightkube leaves out."""

    async def create_strictly(self, body: Any) -> Any:
        """As `create`, with the server's strict validation of fields."""
        return await self._client.request("post", obj=body, params={"fieldValidation": "Strict"})

    def watch_with_bookmarks(self, resource: Any, labels: Mapping[str, str], version: str) -> Any:
        """As `watch`, with bookmarks: they keep the version fresh where pods change seldom."""
        params = {
            "timeoutSeconds": _WATCH_S,
            "resourceVersion": version,
            "labelSelector": ",".join(f"{key}={value}" for key, value in labels.items()),
            "allowWatchBookmarks": "true",
        }
        return self._client.watch(self._client.prepare_request("list", res=resource, watch=True, params=params))


async def _call(make_call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    for attempt in range(_ATTEMPTS):
        try:
            return await make_call()
        except Exception as error:
            refused = _translate(error)
            wait_s = refused.retry_after_s if isinstance(refused, ApiRefusedError) else None
            if wait_s is None or wait_s > _LONGEST_WAIT_S or attempt == _ATTEMPTS - 1:
                raise refused from error
        await asyncio.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _translate(error: Exception) -> ApiRefusedError | ApiAwayError:
    """What the client raises, as one of our two errors. Raises other errors again."""
    if isinstance(error, ApiError):
        response = getattr(error, "response", None)  # none where the error came in a watch
        status = error.status
        return ApiRefusedError(
            status.code or 0, status.reason or "", status.message or "", _read_retry_after(response, status)
        )
    if isinstance(error, httpx2.HTTPStatusError):
        code = error.response.status_code
        return ApiRefusedError(code, error.response.reason_phrase, str(error), _read_retry_after(error.response, None))
    if isinstance(error, httpx2.HTTPError | OSError | KeyError | ValueError):
        text = " ".join(str(error).split()) or "no answer"
        return ApiAwayError(f"the API server does not answer ({type(error).__name__}: {text})")
    raise error


def _read_retry_after(response: Any, status: Any) -> float | None:
    """What the answer asks for; None: nothing, or the answer is no request to wait."""
    header = None if response is None else response.headers.get("Retry-After")
    if header is not None:
        try:
            return max(float(header), 0.0)
        except ValueError:
            return None
    details = getattr(status, "details", None)
    seconds = getattr(details, "retryAfterSeconds", None)
    return float(seconds) if seconds else None
