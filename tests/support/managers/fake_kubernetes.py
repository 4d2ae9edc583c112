"""The API server of a small Kubernetes cluster, over HTTP: for the real client, and for kubectl.

It serves the calls of the cluster's users: get, list with selectors and pages, watch with bookmarks, create, update,
patch, delete, evictions, and discovery; and refuses as a real one does (`fake_cluster`). Who calls it is told by the
bearer token: the admin may do anything, others what their roles allow, as in RBAC.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import h11

from fake_cluster import KINDS, NODES, PODS, ApiError, Change, FakeCluster, Kind, Object, find_kind, iterate_changes

ADMIN_TOKEN = "the-token-of-the-admin"
_SHORT_NAMES = {
    "pods": ["po"], "nodes": ["no"], "services": ["svc"], "deployments": ["deploy"], "namespaces": ["ns"],
    "poddisruptionbudgets": ["pdb"], "networkpolicies": ["netpol"], "configmaps": ["cm"],
}  # fmt: skip
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class Call(NamedTuple):
    """A request, as the API server understands it."""

    method: str
    kind: Kind
    namespace: str
    name: str
    subresource: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def verb(self) -> str:
        if self.method == "GET":
            return "get" if self.name else ("watch" if self.query.get("watch") in ("true", "1") else "list")
        if self.method == "DELETE":
            return "delete" if self.name else "deletecollection"
        return _VERBS[self.method]


class Answer(NamedTuple):
    status: int
    document: Object
    headers: Sequence[tuple[str, str]] = ()


class HangUpError(Exception):
    """The connection ends without an answer."""


@dataclass
class FakeKubernetes:
    """The server. `cluster` is its state."""

    cluster: FakeCluster = field(default_factory=FakeCluster)
    roles: dict[str, Sequence[Object]] = field(default_factory=dict)
    """Rules of RBAC, by bearer token. A rule with a `namespace` counts only inside that."""
    url: str = ""
    ca_pem: bytes | None = None
    connections: set[asyncio.Task[Any]] = field(default_factory=set)
    faults: list[Exception] = field(default_factory=list)
    """What went wrong in the server itself."""

    def write_kubeconfig(self, path: Any, token: str = ADMIN_TOKEN, namespace: str = "training") -> None:
        """The kubeconfig of a user of the cluster."""
        ca = {} if self.ca_pem is None else {"certificate-authority-data": base64.b64encode(self.ca_pem).decode()}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, **ca}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        }
        path.write_text(json.dumps(document))

    # ------------------------------------------------------------ connections

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, task = h11.Connection(h11.SERVER), asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            while not self.cluster.is_away:
                request, body = await _read_request(connection, reader)
                if request is None:
                    return
                await self._answer(connection, writer, request, body)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
        except (HangUpError, ConnectionError, h11.ProtocolError, asyncio.CancelledError):
            return  # cancelled: at the server's end; asyncio.streams logs a cancellation as an error
        except Exception as error:
            self.faults.append(error)
            raise
        finally:
            self.connections.discard(task)
            writer.close()

    async def _answer(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
    ) -> None:
        target = urlsplit(request.target.decode())
        headers = {key.decode().lower(): value.decode() for key, value in request.headers}
        query = {key: values[-1] for key, values in parse_qs(target.query, keep_blank_values=True).items()}
        token = headers.get("authorization", "").removeprefix("Bearer ")
        method = request.method.decode()
        self.cluster.requests.append((method, target.path, token))
        try:
            self._refuse_some()
            document = _describe_api(target.path)
            if document is not None:
                answer = Answer(200, document)
            else:
                call = _parse_call(method, target.path, query, headers, body)
                self._authorise(call, token)
                if call.verb == "watch":
                    await self._send_watch(connection, writer, call)
                    return
                answer = self._carry_out(call)
        except ApiError as error:
            answer = _make_error(error)
        if self.cluster.is_away:
            raise HangUpError
        await _send(connection, writer, answer)

    def _refuse_some(self) -> None:
        cluster = self.cluster
        if cluster.is_away:
            raise HangUpError
        if cluster.failures:
            raise ApiError(cluster.failures.pop(0), "InternalError", "an error on the server has prevented the request")
        if cluster.throttle:
            text = "too many requests, please try again later"
            raise ApiError(429, "TooManyRequests", text, cluster.throttle.pop(0))

    def _authorise(self, call: Call, token: str) -> None:
        if token == ADMIN_TOKEN:
            return
        if token not in self.roles:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        resource = f"{call.kind.plural}/{call.subresource}" if call.subresource else call.kind.plural
        for rule in self.roles[token]:
            if _allows(rule, call, resource):
                return
        place = f' in the namespace "{call.namespace}"' if call.kind.is_namespaced else " at the cluster scope"
        group = call.kind.group
        text = f'User "manager" cannot {call.verb} resource "{resource}" in API group "{group}"{place}'
        self.cluster.forbidden.append(text)
        raise ApiError(403, "Forbidden", f'{call.kind.plural} "{call.name}" is forbidden: {text}')

    # ------------------------------------------------------------ calls

    def _carry_out(self, call: Call) -> Answer:
        verbs: Mapping[str, Callable[[Call], Answer]] = {
            "get": self._get,
            "list": self._list,
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
        }
        if call.verb not in verbs or call.subresource not in ("", "eviction", "status"):
            raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        return verbs[call.verb](call)

    def _get(self, call: Call) -> Answer:
        return _render(call, [self.cluster.get(call.kind, call.namespace, call.name)], None)

    def _list(self, call: Call) -> Answer:
        """Pages go on with what there was at the first one, unless that is compacted away."""
        cluster = self.cluster
        with cluster.lock:
            start, version = 0, cluster.version
            if call.query.get("continue"):
                start, version = json.loads(base64.urlsafe_b64decode(call.query["continue"]))
                if version < cluster.oldest_version:
                    text = "The provided continue parameter is too old to display a consistent list result"
                    raise ApiError(410, "Expired", text)
            found = cluster.list_objects(call.kind, call.namespace or None)
        found = [each for each in found if _matches(each, call.query)]
        limit = int(call.query.get("limit") or len(found) + 1)
        metadata: Object = {"resourceVersion": str(version)}
        if start + limit < len(found):
            metadata["continue"] = base64.urlsafe_b64encode(json.dumps([start + limit, version]).encode()).decode()
        return _render(call, found[start : start + limit], metadata)

    def _create(self, call: Call) -> Answer:
        if call.subresource == "eviction":
            self.cluster.evict_pod(call.name, call.namespace)
            return Answer(201, {"apiVersion": "v1", "kind": "Status", "status": "Success"})
        body = _read_body(call)
        if body.get("apiVersion") != call.kind.api_version or body.get("kind") != call.kind.kind:
            text = f"the object provided is unrecognized: no kind {body.get('kind')!r} in {body.get('apiVersion')!r}"
            raise ApiError(400, "BadRequest", text)
        strict = call.query.get("fieldValidation") == "Strict"
        made, warnings = self.cluster.create(call.kind, call.namespace, body, strict=strict)
        if call.kind is PODS and self.cluster.lost_answers:
            self.cluster.lost_answers -= 1
            raise HangUpError
        return Answer(201, made, [("Warning", f'299 - "{text}"') for text in warnings])

    def _update(self, call: Call) -> Answer:
        body = _read_body(call)

        def replace(stored: Object) -> None:
            given = body.get("metadata", {}).get("resourceVersion")
            if given and given != stored["metadata"]["resourceVersion"]:
                text = "the object has been modified; please apply your changes to the latest version and try again"
                raise ApiError(409, "Conflict", f"Operation cannot be fulfilled on {call.kind.plural}: {text}")
            stored.clear()
            stored.update(body)

        return Answer(200, self.cluster.change(call.kind, call.namespace, call.name, replace))

    def _patch(self, call: Call) -> Answer:
        """Strategic merges are done as plain ones, which is the same for what is not a list with a merge key."""
        known = ("application/merge-patch+json", "application/strategic-merge-patch+json")
        if call.headers.get("content-type") not in known:
            raise ApiError(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        change = _read_body(call)
        return Answer(200, self.cluster.change(call.kind, call.namespace, call.name, lambda each: _merge(each, change)))

    def _delete(self, call: Call) -> Answer:
        options = _read_body(call) if call.body else {}
        seconds = call.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        gone = self.cluster.delete(call.kind, call.namespace, call.name, None if seconds is None else int(seconds))
        return Answer(200, gone)

    # ------------------------------------------------------------ watches

    async def _send_watch(self, connection: h11.Connection, writer: asyncio.StreamWriter, call: Call) -> None:
        headers = [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        writer.write(connection.send(h11.Response(status_code=200, headers=headers)))
        async for event in self._watch(call):
            line = json.dumps(event).encode() + b"\n"
            writer.write(connection.send(h11.Data(data=line)))
            await writer.drain()
        if self.cluster.is_away:
            raise HangUpError
        writer.write(connection.send(h11.EndOfMessage()))
        await writer.drain()

    async def _watch(self, call: Call) -> AsyncIterator[Object]:
        """Events until the client's time is up, or the server hangs up."""
        cluster, loop, woken = self.cluster, asyncio.get_running_loop(), asyncio.Event()
        version = int(call.query.get("resourceVersion") or cluster.version)
        hang_ups, bookmarks = cluster.hang_up_count, cluster.bookmark_count
        end_at = loop.time() + float(call.query.get("timeoutSeconds") or 1800)

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        cluster.listeners.add(wake)
        try:
            while cluster.hang_up_count == hang_ups:
                woken.clear()
                if version < cluster.oldest_version:
                    yield {
                        "type": "ERROR",
                        "object": _make_status(410, "Expired", f"too old resource version: {version}"),
                    }
                    return
                with cluster.lock:
                    changes = [*iterate_changes(cluster.changes, version)]
                for change in changes:
                    version = change.version
                    event = _make_event(change, call)
                    if event is not None:
                        yield event
                if cluster.bookmark_count > bookmarks and call.query.get("allowWatchBookmarks") == "true":
                    bookmarks = cluster.bookmark_count
                    metadata = {"resourceVersion": str(cluster.version), "creationTimestamp": None}
                    kind = call.kind
                    mark = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
                    yield {"type": "BOOKMARK", "object": mark}
                    cluster.sent_bookmarks += 1  # the event has been written when the generator goes on
                try:
                    async with asyncio.timeout_at(end_at):
                        await woken.wait()
                except TimeoutError:
                    return
        finally:
            cluster.listeners.discard(wake)


# ---------------------------------------------------------------- requests and answers


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request | None, bytes]:
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return request, body
        else:
            return None, b""


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, answer: Answer) -> None:
    body = json.dumps(answer.document).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *answer.headers]
    writer.write(connection.send(h11.Response(status_code=answer.status, headers=headers)))
    writer.write(connection.send(h11.Data(data=body)))
    writer.write(connection.send(h11.EndOfMessage()))
    await writer.drain()


def _parse_call(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Call:
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "api":
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    name, subresource = [*rest[1:], "", ""][:2]
    return Call(method, find_kind(group, version, rest[0]), namespace, name, subresource, query, headers, body)


def _read_body(call: Call) -> Object:
    if "protobuf" in call.headers.get("content-type", ""):
        raise ApiError(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
    try:
        body: Object = json.loads(call.body)
    except ValueError as error:
        raise ApiError(400, "BadRequest", f"the body of the request is no JSON: {error}") from error
    return body


def _make_status(code: int, reason: str, message: str) -> Object:
    return {
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": message,
    }  # fmt: skip


def _make_error(error: ApiError) -> Answer:
    headers = [] if error.retry_after_s is None else [("Retry-After", f"{error.retry_after_s:.0f}")]
    return Answer(error.code, _make_status(error.code, error.reason, error.message), headers)


def _allows(rule: Object, call: Call, resource: str) -> bool:
    names = rule.get("resourceNames")
    return (
        call.kind.group in rule["apiGroups"]
        and resource in rule["resources"]
        and call.verb in rule["verbs"]
        and (not names or call.name in names)
        and (rule.get("namespace") is None or (call.kind.is_namespaced and rule["namespace"] == call.namespace))
    )


def _matches(found: Object, query: Mapping[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, separator, value = term.partition("=")
        value = value.removeprefix("=")
        if (separator and labels.get(key) != value) or (not separator and key not in labels):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        place: Any = found
        for part in key.split("."):
            place = place.get(part, "") if isinstance(place, dict) else ""
        if place != value.removeprefix("="):
            return False
    return True


def _make_event(change: Change, call: Call) -> Object | None:
    """As this watch sees the change: an object that comes into its selector is added, one that leaves it is deleted."""
    if change.kind is not call.kind:
        return None
    given = change.after or change.before
    assert given is not None
    if call.namespace and given["metadata"].get("namespace") != call.namespace:
        return None
    was = change.before is not None and _matches(change.before, call.query)
    matches = change.after is not None and _matches(change.after, call.query)
    if not was and not matches:
        return None
    kind = "MODIFIED" if was and matches else ("ADDED" if matches else "DELETED")
    return {"type": kind, "object": given}


def _merge(stored: Object, change: Object) -> None:
    """RFC 7396."""
    for key, value in change.items():
        if value is None:
            stored.pop(key, None)
        elif isinstance(value, dict):
            part = stored.setdefault(key, {})
            _merge(part, value)
        else:
            stored[key] = value


def _render(call: Call, found: list[Object], metadata: Object | None) -> Answer:
    """One object, a list, or the table that kubectl asks for."""
    if "as=Table" in call.headers.get("accept", ""):
        return Answer(200, _make_table(call.kind, found, metadata or {}))
    if metadata is None:
        return Answer(200, found[0])
    kind = f"{call.kind.kind}List"
    return Answer(200, {"apiVersion": call.kind.api_version, "kind": kind, "metadata": metadata, "items": found})


def _make_table(kind: Kind, found: list[Object], metadata: Object) -> Object:
    columns = ["Name", "Status"]
    rows = [{"cells": [each["metadata"]["name"], _describe_status(kind, each)], "object": each} for each in found]
    definitions = [{"name": name, "type": "string", "format": "", "description": "", "priority": 0} for name in columns]
    return {
        "apiVersion": "meta.k8s.io/v1", "kind": "Table", "metadata": metadata, "columnDefinitions": definitions,
        "rows": rows,
    }  # fmt: skip


def _describe_status(kind: Kind, found: Object) -> str:
    if found["metadata"].get("deletionTimestamp"):
        return "Terminating"
    if kind is NODES:
        return "Ready,SchedulingDisabled" if found["spec"].get("unschedulable") else "Ready"
    return str(found.get("status", {}).get("phase", ""))


def _describe_api(path: str) -> Object | None:
    """Discovery: what kubectl asks before it asks for anything else."""
    parts = path.strip("/").split("/")
    if parts == ["version"]:
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0", "platform": "linux/amd64"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        names = dict.fromkeys((kind.group, kind.version) for kind in KINDS if kind.group)
        groups = []
        for group, version in names:
            served = {"groupVersion": f"{group}/{version}", "version": version}
            groups.append({"name": group, "versions": [served], "preferredVersion": served})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if (parts[0] == "api" and len(parts) == 2) or (parts[0] == "apis" and len(parts) == 3):
        return _list_resources("/".join(parts[1:]))
    return None


def _list_resources(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources: list[Object] = [
        {
            "name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.is_namespaced,
            "kind": kind.kind, "verbs": verbs, "shortNames": _SHORT_NAMES.get(kind.plural, []),
        }
        for kind in KINDS
        if kind.api_version == version
    ]  # fmt: skip
    if version == "v1":
        resources.append(
            {
                "name": "pods/eviction", "singularName": "", "namespaced": True, "kind": "Eviction",
                "group": "policy", "version": "v1", "verbs": ["create"],
            }
        )  # fmt: skip
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


# ---------------------------------------------------------------- servers


@asynccontextmanager
async def serve_kubernetes(server: FakeKubernetes, *, tls: bool = False) -> AsyncIterator[FakeKubernetes]:
    """The server on a free port, in this event loop."""
    context = _make_tls(server) if tls else None
    listening = await asyncio.start_server(server.serve_connection, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listening.close()
        server.cluster.cut_off(is_away=True)
        left = [*server.connections]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if server.faults:
            raise server.faults[0]


@contextmanager
def fake_kubernetes(server: FakeKubernetes, *, tls: bool = True) -> Iterator[FakeKubernetes]:
    """The same, in a thread of its own."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with serve_kubernetes(server, tls=tls):
            started.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def _make_tls(server: FakeKubernetes) -> ssl.SSLContext:
    import trustme

    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    server.ca_pem = authority.cert_pem.bytes()
    return context
