"""The state of a small Kubernetes cluster: what its API server stores, and what its scheduler and kubelets would do.

Objects are kept as the API server keeps them: each change has a resource version, changes can be watched from any
version that is not compacted away, deletion is graceful for pods with a node, and what is owned by an object that is
gone goes too. `fake_kubernetes` serves it over HTTP.
"""

from __future__ import annotations

import copy
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fake_cluster_validation import find_warnings, validate_object

Object = dict[str, Any]


class Kind(NamedTuple):
    """A kind of object that the API server knows."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_RBAC = "rbac.authorization.k8s.io"
KINDS = (
    Kind("", "v1", "pods", "Pod"),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "services", "Service"),
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("", "v1", "events", "Event"),
    Kind("", "v1", "nodes", "Node", False),
    Kind("", "v1", "namespaces", "Namespace", False),
    Kind("apps", "v1", "deployments", "Deployment"),
    Kind("apps", "v1", "daemonsets", "DaemonSet"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind(_RBAC, "v1", "roles", "Role"),
    Kind(_RBAC, "v1", "rolebindings", "RoleBinding"),
    Kind(_RBAC, "v1", "clusterroles", "ClusterRole", False),
    Kind(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", False),
)
PODS, SECRETS, NODES, DEPLOYMENTS = KINDS[0], KINDS[1], KINDS[6], KINDS[8]


class ApiError(Exception):
    """An answer that is an error, as a Status."""

    def __init__(self, code: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after_s = code, reason, message, retry_after_s


class Change(NamedTuple):
    version: int
    kind: Kind
    before: Object | None
    after: Object | None
    """None: the object is gone."""


@dataclass
class FakeCluster:
    """The state, and the knobs: change them while it runs."""

    pod_quota: int | None = None
    """Pods that the ResourceQuota of each namespace allows; None: there is none."""
    throttle: list[float] = field(default_factory=list)
    """Retry-After of the answers 429 to the next requests."""
    failures: list[int] = field(default_factory=list)
    """Status codes of the next requests of any kind."""
    creations_fail_with: ApiError | None = None
    """The answer to all creations of pods."""
    secrets_fail_with: ApiError | None = None
    """The answer to all creations of Secrets."""
    protected: set[str] = field(default_factory=set)
    """Names of pods whose deletion an admission webhook denies."""
    lost_answers: int = 0
    """How many of the next creations of pods take effect and then end without an answer."""
    schedules: bool = True
    """Whether pods get a node at once; else they wait. They run when the Secrets that they mount are there."""
    is_away: bool = False
    """Every connection is cut."""
    clock: Callable[[], float] = time.time
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and user of each."""
    forbidden: list[str] = field(default_factory=list)
    """What was refused because no role allows it."""
    objects: dict[tuple[Kind, str, str], Object] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    version: int = 1000
    oldest_version: int = 0
    """Watches and continued lists from before it get 410 Gone."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    listeners: set[Callable[[], None]] = field(default_factory=set)
    """Called after each change and knob that ends watches."""
    hang_up_count: int = 0
    bookmark_count: int = 0
    sent_bookmarks: int = 0

    # ------------------------------------------------------------ objects

    def create(self, kind: Kind, namespace: str, body: Object, *, strict: bool = False) -> tuple[Object, list[str]]:
        """The object, and warnings about unknown fields."""
        with self.lock:
            made = {**copy.deepcopy(body), "apiVersion": kind.api_version, "kind": kind.kind}
            metadata = made.setdefault("metadata", {})
            if kind is PODS and self.creations_fail_with is not None:
                raise self.creations_fail_with
            if kind is SECRETS and self.secrets_fail_with is not None:
                raise self.secrets_fail_with
            warnings = self._check_new(kind, namespace, made, strict=strict)
            name = metadata.get("name") or f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
            if (kind, namespace, name) in self.objects:
                raise ApiError(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
            if kind is PODS and self.pod_quota is not None:
                self._check_quota(namespace, name)
            metadata.update(name=name, uid=str(uuid.uuid4()), creationTimestamp=self.timestamp())
            if kind.is_namespaced:
                metadata["namespace"] = namespace
            self._default(kind, made)
            self._store(kind, namespace, name, made)
            if kind is PODS and self.schedules and not made["spec"].get("schedulingGates"):
                self.bind_pod(name, namespace)
            if kind in (PODS, SECRETS):
                self.start_pods()
            self._collect_orphan(kind, namespace, name)
            return copy.deepcopy(made), warnings

    def _check_new(self, kind: Kind, namespace: str, made: Object, *, strict: bool) -> list[str]:
        metadata = made["metadata"]
        if metadata.get("resourceVersion"):
            raise ApiError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if metadata.get("namespace", namespace) != namespace:
            text = f"the namespace of the provided object does not match the namespace sent on the request: {namespace}"
            raise ApiError(400, "BadRequest", text)
        warnings = find_warnings(made)
        if warnings and strict:
            raise ApiError(400, "BadRequest", f"strict decoding error: {', '.join(warnings)}")
        error = validate_object(made)
        if error is not None:
            name = metadata.get("name", "")
            raise ApiError(422, "Invalid", f'{kind.kind} "{name}" is invalid: {error}')
        return warnings

    def _check_quota(self, namespace: str, name: str) -> None:
        used = sum(1 for each, there, _ in self.objects if each is PODS and there == namespace)
        if used >= (self.pod_quota or 0):
            text = f'pods "{name}" is forbidden: exceeded quota: training, requested: pods=1, used: pods={used}'
            raise ApiError(403, "Forbidden", f"{text}, limited: pods={self.pod_quota}")

    def _default(self, kind: Kind, made: Object) -> None:
        if kind is PODS:
            spec = made["spec"]
            spec.setdefault("restartPolicy", "Always")
            spec.setdefault("terminationGracePeriodSeconds", 30)
            spec.setdefault("schedulerName", "default-scheduler")
            made["status"] = {"phase": "Pending", "conditions": []}
            if "kueue.x-k8s.io/queue-name" in made["metadata"].get("labels", {}):  # as Kueue's webhook does
                spec["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        if kind is SECRETS and "stringData" in made:
            import base64

            data = {key: base64.b64encode(text.encode()).decode() for key, text in made.pop("stringData").items()}
            made["data"] = {**made.get("data", {}), **data}

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        with self.lock:
            try:
                return copy.deepcopy(self.objects[kind, namespace, name])
            except KeyError:
                raise ApiError(404, "NotFound", f'{kind.plural} "{name}" not found') from None

    def list_objects(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """All objects of the kind; None: of all namespaces."""
        with self.lock:
            found = [(key, each) for key, each in self.objects.items() if key[0] is kind]
            return [copy.deepcopy(each) for key, each in sorted(found, key=lambda item: item[0][1:]) if
                    namespace in (None, key[1])]  # fmt: skip

    def change(self, kind: Kind, namespace: str, name: str, edit: Callable[[Object], None]) -> Object:
        """Edit an object in place."""
        with self.lock:
            edited = self.get(kind, namespace, name)
            edit(edited)
            if edited != self.objects[kind, namespace, name]:
                self._store(kind, namespace, name, edited)
            return self.get(kind, namespace, name)

    def delete(self, kind: Kind, namespace: str, name: str, grace_s: int | None = None) -> Object:
        """A pod with a node goes when its kubelet says so; anything else goes at once, but for its finalizers."""
        with self.lock:
            found = self.get(kind, namespace, name)
            if kind is PODS and name in self.protected:
                raise ApiError(403, "Forbidden", 'admission webhook "keep.test" denied the request')
            if kind is PODS:
                default = found["spec"]["terminationGracePeriodSeconds"]
                seconds = default if grace_s is None else grace_s
                is_alive = found["status"]["phase"] not in ("Succeeded", "Failed")
                if found["spec"].get("nodeName") and seconds > 0 and is_alive:
                    return self.change(kind, namespace, name, lambda pod: self._mark_deleted(pod, seconds))
            if found["metadata"].get("finalizers"):
                return self.change(kind, namespace, name, lambda each: self._mark_deleted(each, 0))
            self._remove(kind, namespace, name)
            return found

    def _mark_deleted(self, found: Object, grace_s: int) -> None:
        """A later deletion can only bring the time forward."""
        metadata = found["metadata"]
        if metadata.get("deletionGracePeriodSeconds", math.inf) > grace_s:
            metadata["deletionTimestamp"] = self.timestamp(grace_s)
            metadata["deletionGracePeriodSeconds"] = grace_s

    def _remove(self, kind: Kind, namespace: str, name: str) -> None:
        gone = self.objects.pop((kind, namespace, name), None)
        if gone is None:
            return
        self.version += 1
        last = copy.deepcopy(gone)
        last["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append(Change(self.version, kind, last, None))
        self._collect_garbage(gone["metadata"]["uid"])
        self._notify()

    def _collect_orphan(self, kind: Kind, namespace: str, name: str) -> None:
        """What was made for an owner that is gone goes too."""
        uids = {each["metadata"]["uid"] for each in self.objects.values()}
        owners = self.objects[kind, namespace, name]["metadata"].get("ownerReferences", [])
        if owners and not any(owner["uid"] in uids for owner in owners):
            self.delete(kind, namespace, name)

    def _collect_garbage(self, uid: str) -> None:
        """What has only this owner goes with it."""
        for key, each in [*self.objects.items()]:
            owners = each["metadata"].get("ownerReferences", [])
            if owners and all(owner["uid"] == uid for owner in owners):
                self.delete(*key)

    def _store(self, kind: Kind, namespace: str, name: str, stored: Object) -> None:
        self.version += 1
        stored["metadata"]["resourceVersion"] = str(self.version)
        before = self.objects.get((kind, namespace, name))
        stored.update(apiVersion=kind.api_version, kind=kind.kind)
        self.objects[kind, namespace, name] = stored
        self.changes.append(Change(self.version, kind, before, copy.deepcopy(stored)))
        self._notify()

    def _notify(self) -> None:
        for listener in [*self.listeners]:
            listener()

    def timestamp(self, later_s: float = 0.0) -> str:
        return datetime.fromtimestamp(math.floor(self.clock() + later_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # ------------------------------------------------------------ what happens in a cluster

    def compact(self) -> None:
        """Forget all changes: who asks from an old version gets 410 Gone."""
        with self.lock:
            self.oldest_version = self.version
            self.changes.clear()

    def hang_up(self) -> None:
        """End every watch, as a restart of the API server does."""
        with self.lock:
            self.hang_up_count += 1
            self._notify()

    def send_bookmarks(self) -> None:
        with self.lock:
            self.bookmark_count += 1
            self._notify()

    def cut_off(self, *, is_away: bool) -> None:
        with self.lock:
            self.is_away = is_away
            self.hang_up()

    def add_node(self, name: str) -> None:
        with self.lock:
            if (NODES, "", name) not in self.objects:
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": self.timestamp()}
                self.create(NODES, "", {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [ready]}})

    def taint_node(self, name: str, key: str, effect: str = "NoSchedule", *, added: bool = False) -> None:
        taint = {"key": key, "effect": effect, **({"timeAdded": self.timestamp()} if added else {})}
        self.change(NODES, "", name, lambda node: node["spec"].setdefault("taints", []).append(taint))

    def set_node_condition(self, name: str, condition: str) -> None:
        set_condition = _condition_setter(condition, "True", "", "", self.timestamp())
        self.change(NODES, "", name, set_condition)

    def start_pods(self) -> None:
        """The kubelets start what has a node and all its Secrets, unless something holds its container."""
        with self.lock:
            for pod in self.list_objects(PODS):
                name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
                secrets = [each["secret"]["secretName"] for each in pod["spec"].get("volumes", []) if "secret" in each]
                waits = pod["status"]["phase"] == "Pending" and "containerStatuses" not in pod["status"]
                if (
                    waits
                    and pod["spec"].get("nodeName")
                    and all((SECRETS, namespace, secret) in self.objects for secret in secrets)
                ):
                    self._start_pod(name, namespace)

    def _start_pod(self, name: str, namespace: str) -> None:

        def start(pod: Object) -> None:
            names = [each["name"] for each in pod["spec"]["containers"]]
            running = {"running": {"startedAt": self.timestamp()}}
            pod["status"].update(phase="Running", podIP="10.1.0.7")
            pod["status"]["containerStatuses"] = [{"name": each, "ready": True, "state": running} for each in names]

        self.change(PODS, namespace, name, start)

    def bind_pod(self, name: str, namespace: str = "training", node: str | None = None) -> None:
        with self.lock:
            node = node or f"node-of-{name}"
            self.add_node(node)

            def bind(pod: Object) -> None:
                pod["spec"]["nodeName"] = node
                pod["spec"].pop("schedulingGates", None)
                _condition_setter("PodScheduled", "True", "", "", self.timestamp())(pod)

            self.change(PODS, namespace, name, bind)

    def refuse_to_schedule(self, name: str, message: str, namespace: str = "training") -> None:
        setter = _condition_setter("PodScheduled", "False", "Unschedulable", message, self.timestamp())
        self.change(PODS, namespace, name, setter)

    def hold_container(self, name: str, reason: str, message: str, namespace: str = "training") -> None:
        """The kubelet cannot start the container of the agent."""
        state = {"waiting": {"reason": reason, "message": message}}
        statuses = [{"name": "agent", "ready": False, "state": state}]
        self.change(PODS, namespace, name, lambda pod: pod["status"].update(containerStatuses=statuses))

    def end_pod(
        self, name: str, namespace: str = "training", *, code: int = 1, why: str = "Error", **status: str
    ) -> None:
        """Its container has ended. `status`: reason and message of the pod's status, as kubelet sets them."""

        def end(pod: Object) -> None:
            terminated = {"exitCode": code, "reason": why, "finishedAt": self.timestamp()}
            pod["status"].update(phase="Succeeded" if code == 0 else "Failed", **status)
            pod["status"]["containerStatuses"] = [{"name": "agent", "state": {"terminated": terminated}}]

        self.change(PODS, namespace, name, end)

    def disrupt_pod(
        self, name: str, reason: str, message: str, namespace: str = "training", *, kind: str = "DisruptionTarget"
    ) -> None:
        self.change(PODS, namespace, name, _condition_setter(kind, "True", reason, message, self.timestamp()))

    def evict_pod(self, name: str, namespace: str = "training", grace_s: int | None = None) -> None:
        """Through the API, as kubectl drain does."""
        self.disrupt_pod(name, "EvictionByEvictionAPI", "Eviction API: evicting", namespace)
        self.delete(PODS, namespace, name, grace_s)

    def lose_node(self, name: str) -> None:
        """The cloud has taken the machine, and the cloud's controller removes the node's object."""
        self.delete(NODES, "", name)

    def remove_pod(self, name: str, namespace: str = "training") -> None:
        """Its kubelet has confirmed the end, or the garbage collector of pods has found its node gone."""
        with self.lock:
            self._remove(PODS, namespace, name)

    def confirm_deletions(self) -> None:
        """The kubelets end all pods that are being deleted."""
        with self.lock:
            for pod in self.list_objects(PODS):
                if pod["metadata"].get("deletionTimestamp"):
                    self._remove(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def pod(self, name: str, namespace: str = "training") -> Object:
        return self.get(PODS, namespace, name)

    def pod_names(self, labels: Mapping[str, str] | None = None) -> list[str]:
        wanted = (labels or {}).items()
        pods = [pod["metadata"] for pod in self.list_objects(PODS)]
        return [metadata["name"] for metadata in pods if wanted <= metadata.get("labels", {}).items()]

    def count_requests(self, method: str, part: str) -> int:
        return sum(each == method and part in path for each, path, _ in self.requests)


def _condition_setter(kind: str, status: str, reason: str, message: str, at: str) -> Callable[[Object], None]:
    def set_condition(found: Object) -> None:
        conditions = found.setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [each for each in conditions if each["type"] != kind]
        new = {"type": kind, "status": status, "lastTransitionTime": at}
        conditions.append(
            {**new, **({"reason": reason} if reason else {}), **({"message": message} if message else {})}
        )

    return set_condition


def find_kind(group: str, version: str, plural: str) -> Kind:
    for kind in KINDS:
        if (kind.group, kind.version, kind.plural) == (group, version, plural):
            return kind
    raise ApiError(404, "NotFound", "the server could not find the requested resource")


def iterate_changes(changes: list[Change], after: int) -> Iterator[Change]:
    """Those after a version."""
    first = len(changes)
    while first > 0 and changes[first - 1].version > after:
        first -= 1
    return iter(changes[first:])
