"""The Kubernetes provider through the real client, against the tests' own API server."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fake_cluster import DEPLOYMENTS, NODES, PODS, SECRETS, ApiError, FakeCluster
from fake_kubernetes import FakeKubernetes, serve_kubernetes
from kubernetes_bench import NAMESPACE, SETTINGS, KubernetesBench, make_api
from manager_rights import read_rights
from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers.base import ProviderRefusedError, ProviderVm, UnknownVmError
from varuna_manager.providers.kubernetes import api as api_module
from varuna_manager.providers.kubernetes.provider import KubernetesProvider
from varuna_manager.providers.kubernetes.settings import KubernetesPool, KubernetesSettings
from waiting import until

REQUEST = "0123456789abcdef0123456789abcdef"
FIRST = f"varuna-{REQUEST}-000"


class World:
    """A cluster, whose clock the tests move, and a provider with the rights of our manifests."""

    def __init__(self, server: FakeKubernetes) -> None:
        self.server, self.cluster = server, server.cluster
        self.now = 1_800_000_000.0
        self.cluster.clock = self.read_clock
        server.roles["the manager's"] = read_rights(NAMESPACE)
        self.bench: KubernetesBench

    def read_clock(self) -> float:
        return self.now

    def use(self, settings: KubernetesSettings = SETTINGS, **options: Any) -> KubernetesProvider:
        self.bench = KubernetesBench(
            self.server, settings, token="the manager's", unix_now=self.read_clock, now=self.read_clock, **options
        )
        return self.bench.provider

    async def list_one(self) -> ProviderVm:
        await self.bench.keep_house()
        (vm,) = await self.bench.provider.list()
        return vm


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_kubernetes(FakeKubernetes(FakeCluster())))
        made = World(server)
        made.use()
        yield made
        for provider in made.bench.providers:
            await provider.close(end_vms=False)
        assert server.cluster.forbidden == [], "the rights of deploy/kubernetes/rbac.yaml are enough"


def pools(**options: Any) -> KubernetesSettings:
    return SETTINGS.model_copy(update=options)


# ---------------------------------------------------------------- pods and tokens


async def test_a_pod_gets_its_token_when_it_has_a_node_from_a_secret_that_goes_with_it(world: World) -> None:
    world.cluster.schedules = False
    await world.bench.provider.create(1, REQUEST)
    await world.bench.keep_house()
    assert world.cluster.list_objects(SECRETS) == [], (
        "a token is valid for an hour, and a pod may wait longer for a node"
    )
    world.cluster.bind_pod(FIRST)
    await world.bench.keep_house()
    (secret,) = world.cluster.list_objects(SECRETS)
    assert base64.b64decode(secret["data"]["token"]) == f"token-of-{FIRST}\n".encode()
    assert world.cluster.pod(FIRST)["status"]["phase"] == "Running", "the kubelet waited for the Secret"
    assert f"token-of-{FIRST}" not in str(world.cluster.pod(FIRST))
    world.cluster.remove_pod(FIRST)
    assert world.cluster.list_objects(SECRETS) == []


async def test_a_manager_that_dies_between_pod_and_token_is_followed_by_one_that_makes_the_token(world: World) -> None:
    await world.bench.provider.create(1, REQUEST)  # its pod has a node, and housekeeping did not come to it
    assert world.cluster.list_objects(SECRETS) == []
    await world.bench.restart_provider()
    await world.bench.keep_house()
    assert len(world.cluster.list_objects(SECRETS)) == 1
    await world.bench.restart_provider()
    await world.bench.keep_house()
    assert world.cluster.count_requests("POST", "/secrets") == 1, "a pod that runs has had its token"


async def test_a_pod_that_exists_already_is_there(world: World) -> None:
    """Its creation took effect before the answer was lost, and the watch has not told of it yet: 409 AlreadyExists."""
    provider = world.bench.provider
    await provider.list()
    provider._cache._take_event = lambda kind, pod: None  # type: ignore[method-assign]
    await make_api(world.server.url, NAMESPACE).create_pod(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": FIRST, "labels": {"varuna/request": REQUEST}},
         "spec": {"containers": [{"name": "agent", "image": "x"}]}}
    )  # fmt: skip
    created = await provider.create(1, REQUEST)
    assert [vm.id for vm in created.vms] == [FIRST]
    assert created.refusal is None
    assert world.cluster.count_requests("POST", "/pods") == 2


async def test_a_request_that_goes_on_after_a_loss_does_not_use_a_name_twice(world: World) -> None:
    """The store remembers the VM of the first name as gone."""
    await world.bench.provider.create(2, REQUEST)
    world.cluster.remove_pod(FIRST)
    await world.bench.catch_up()
    created = await world.bench.provider.create(2, REQUEST)
    assert {vm.id for vm in created.vms} == {f"varuna-{REQUEST}-001", f"varuna-{REQUEST}-002"}


async def test_pods_belong_to_the_managers_deployment_and_go_with_it(world: World) -> None:
    template = {
        "metadata": {"labels": {"app.kubernetes.io/name": "varuna-manager"}},
        "spec": {"containers": [{"name": "manager", "image": "varuna-manager"}]},
    }
    selector = {"matchLabels": {"app.kubernetes.io/name": "varuna-manager"}}
    deployment = {"metadata": {"name": "varuna-manager"}, "spec": {"selector": selector, "template": template}}
    provider = world.use(pools(owner_deployment="varuna-manager"))
    missing = (await provider.create(1, REQUEST)).refusal
    assert missing is not None
    assert "has no Deployment 'varuna-manager': give owner_deployment the name" in missing.reason
    world.cluster.create(DEPLOYMENTS, NAMESPACE, deployment)
    assert len((await provider.create(1, REQUEST)).vms) == 1
    world.cluster.delete(DEPLOYMENTS, NAMESPACE, "varuna-manager")
    assert world.cluster.pod(FIRST)["metadata"]["deletionTimestamp"], "the garbage collector deletes it"


async def test_a_template_with_the_deployments_own_labels_is_refused(world: World) -> None:
    """A ReplicaSet would take such pods for its own, and delete those that it has too many of."""
    labels = {"app": "varuna"}
    container = {"name": "agent", "image": "x"}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [container]}}}  # fmt: skip
    world.cluster.create(DEPLOYMENTS, NAMESPACE, {"metadata": {"name": "varuna-manager"}, "spec": spec})
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    provider = world.use(pools(owner_deployment="varuna-manager", template=template))
    refusal = (await provider.create(1, REQUEST)).refusal
    assert refusal is not None
    assert "selects its own pods (app): give the template other labels" in refusal.reason


async def test_the_manager_that_leads_has_the_leaders_label_and_no_other_pod_has_it(world: World) -> None:
    for name in ("manager-a", "manager-b"):
        spec = {"containers": [{"name": "manager", "image": "x"}]}
        world.cluster.create(PODS, NAMESPACE, {"metadata": {"name": name}, "spec": spec})
    leads = {"varuna/leads": "true"}
    for name in ("manager-a", "manager-b", "manager-a"):
        provider = world.use(pools(labels_leader=True), pod_name=name)
        await world.bench.keep_house()
        assert world.cluster.pod_names(leads) == [name]
        await provider.close(end_vms=False)
    world.use()


# ---------------------------------------------------------------- the watch


async def test_a_watch_goes_on_after_the_server_hangs_up(world: World) -> None:
    await world.bench.provider.create(1, REQUEST)
    lists = world.cluster.count_requests("GET", "/pods")
    world.cluster.hang_up()
    world.cluster.remove_pod(FIRST)
    await until(lambda: not world.bench.provider._cache.pods, "the watch tells of the end")
    assert world.cluster.count_requests("GET", "/pods") == lists + 1, "one more watch, and no list"


async def test_after_410_gone_the_pods_are_listed_again(world: World) -> None:
    await world.bench.provider.create(2, REQUEST)
    cache = world.bench.provider._cache
    world.cluster.is_away = True  # the connection breaks, and meanwhile all changes are compacted away
    world.cluster.hang_up()
    await until(lambda: not cache.is_watching, "the watch breaks")
    world.cluster.is_away = False
    await world.bench.provider.list()
    world.cluster.remove_pod(FIRST)
    await until(lambda: FIRST not in cache.pods, "the new watch tells of the end")
    with world.cluster.lock:
        world.cluster.remove_pod(f"varuna-{REQUEST}-001")
        world.cluster.compact()
    await until(lambda: not cache.is_watching, "410 Gone ends the watch")
    assert [vm.ended is None for vm in await world.bench.provider.list()] == [False, False]
    assert cache.is_watching


async def test_bookmarks_keep_a_quiet_watch_from_being_outdated(world: World) -> None:
    await world.bench.provider.create(1, REQUEST)
    await world.bench.catch_up()
    cache = world.bench.provider._cache
    for name in ("other-1", "other-2"):  # changes that this watch does not see
        spec = {"containers": [{"name": "x", "image": "x"}]}
        world.cluster.create(PODS, NAMESPACE, {"metadata": {"name": name}, "spec": spec})
    world.cluster.send_bookmarks()
    watches = world.cluster.count_requests("GET", "/pods")
    await until(lambda: world.cluster.sent_bookmarks == 1, "the bookmark is sent")
    world.cluster.compact()
    world.cluster.hang_up()
    world.cluster.remove_pod(FIRST)
    await until(lambda: FIRST not in cache.pods, "the watch goes on from the bookmark")
    assert world.cluster.count_requests("GET", "/pods") == watches + 1


async def test_a_watch_that_falls_silent_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_SILENCE_S", 0.05)
    await world.bench.provider.list()
    await until(lambda: not world.bench.provider._cache.is_watching, "the silent watch is given up")
    await world.bench.provider.list()


async def test_lists_come_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_PAGE", 1)
    await world.bench.provider.create(5, REQUEST)
    await world.bench.restart_provider()
    assert len(await world.bench.provider.list()) == 5
    assert world.cluster.count_requests("GET", "/pods") >= 1 + 5, "lists with one pod on a page"


async def test_a_throttled_call_is_repeated_after_the_pause_that_the_server_asks_for(world: World) -> None:
    world.cluster.throttle = [0.0, 0.0]
    assert list(await world.bench.provider.list()) == []
    world.cluster.throttle = [30.0]
    created = await world.bench.provider.create(1, REQUEST)
    await world.bench.catch_up()
    assert created.refusal is None or created.refusal.retry_after_s == 30.0


# ---------------------------------------------------------------- pods that do not come up


async def test_a_pod_without_a_node_is_a_refusal_of_its_pool_with_the_schedulers_message(world: World) -> None:
    world.cluster.schedules = False
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    await world.bench.provider.create(1, REQUEST)
    world.cluster.refuse_to_schedule(FIRST, message)
    assert (await world.list_one()).reason_before_hello == f"its pod waits: {message}"
    world.now += 601
    await world.bench.keep_house()
    (vm,) = await world.bench.provider.list()
    assert vm.ended == f"pod {FIRST} had no node within 600 s: {message}"
    assert world.cluster.pod_names() == []
    (other,) = (await world.bench.provider.create(1, "2")).vms
    assert other.gpus == 2, "the next pool is tried"
    world.cluster.refuse_to_schedule(other.id, message)
    world.now += 601
    await world.bench.keep_house()
    refusal = (await world.bench.provider.create(1, "3")).refusal
    assert refusal is None, "the first pool's pause is over"


async def test_when_all_pools_refused_a_request_is_refused_with_what_the_first_one_said(world: World) -> None:
    world.cluster.schedules = False
    provider = world.use(pools(pools=SETTINGS.pools[:1]))
    await provider.create(1, REQUEST)
    world.cluster.refuse_to_schedule(FIRST, "0/3 nodes are available.")
    world.now += 601
    await world.bench.keep_house()
    refusal = (await provider.create(1, "2")).refusal
    assert refusal is not None
    assert refusal.kind is RefusalKind.CAPACITY
    assert refusal.reason == f"pool spot: pod {FIRST} had no node within 600 s: 0/3 nodes are available."
    assert refusal.retry_after_s == pytest.approx(30.0)
    assert world.cluster.count_requests("POST", "/pods") == 1


async def test_a_pod_that_kueue_does_not_admit_is_a_refusal_of_its_quota(world: World) -> None:
    provider = world.use(pools(queue_name="training-queue"))
    await provider.create(1, REQUEST)
    labels = world.cluster.pod(FIRST)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "training-queue"
    vm = await world.list_one()
    waits = "it is not admitted yet (scheduling gate kueue.x-k8s.io/admission)"
    assert vm.reason_before_hello == f"its pod waits: {waits}"
    world.now += 601
    assert (await world.list_one()).ended == (
        f"pod {FIRST} was not admitted to queue training-queue within 600 s: {waits}"
    )
    assert provider._pools._refused["spot"].last.kind is RefusalKind.QUOTA


async def test_a_pod_whose_image_cannot_be_pulled_is_a_failure_with_the_kubelets_message(world: World) -> None:
    world.cluster.schedules = False
    await world.bench.provider.create(1, REQUEST)
    world.cluster.bind_pod(FIRST)
    world.cluster.hold_container(FIRST, "ErrImagePull", "manifest unknown")
    await world.bench.keep_house()
    world.now += 60
    world.cluster.hold_container(FIRST, "ImagePullBackOff", 'Back-off pulling image "registry.test/varuna-agent:1"')
    await world.bench.keep_house()
    assert (await world.list_one()).ended is None
    world.now += 61
    text = 'ImagePullBackOff: Back-off pulling image "registry.test/varuna-agent:1"'
    assert f"the agent's container of pod {FIRST} does not start: {text}" == (await world.list_one()).ended
    assert world.cluster.pod(FIRST)["metadata"]["deletionTimestamp"]
    refused = world.bench.provider._pools._refused["spot"].last
    assert refused.kind is RefusalKind.FAILED


async def test_one_pod_whose_deletion_is_refused_keeps_no_other(world: World) -> None:
    world.cluster.schedules = False
    first, second = (vm.id for vm in (await world.bench.provider.create(2, REQUEST)).vms)
    world.cluster.protected.add(first)
    for name in (first, second):
        world.cluster.refuse_to_schedule(name, "0/3 nodes are available.")
    await world.bench.keep_house()
    world.now += 601
    await world.bench.keep_house()
    assert [pod["metadata"]["name"] for pod in world.cluster.list_objects(PODS)] == [first]
    ends = {vm.id: vm.ended for vm in await world.bench.provider.list()}
    assert ends == {first: None, second: f"pod {second} had no node within 600 s: 0/3 nodes are available."}

    world.cluster.protected.clear()
    await world.bench.keep_house()
    assert world.cluster.list_objects(PODS) == []


async def test_one_ended_pod_whose_removal_is_refused_keeps_no_other(world: World) -> None:
    first, second = (vm.id for vm in (await world.bench.provider.create(2, REQUEST)).vms)
    world.cluster.protected.add(first)
    await world.bench.keep_house()
    for name in (first, second):
        world.cluster.end_pod(name, code=1)
    await world.bench.keep_house()
    world.now += SETTINGS.ended_pods_kept_s + 1
    await world.bench.keep_house()
    assert [pod["metadata"]["name"] for pod in world.cluster.list_objects(PODS)] == [first]


async def test_a_field_of_the_template_that_no_pod_has_is_a_failure_that_names_it(world: World) -> None:
    spec = {"containers": [{"name": "agent", "image": "x"}], "tolerationz": []}
    refusal = (await world.use(pools(template={"spec": spec})).create(1, REQUEST)).refusal
    assert refusal is not None
    assert refusal.kind is RefusalKind.FAILED
    assert "strict decoding error: unknown field" in refusal.reason
    assert "'tolerationz' was unexpected" in refusal.reason


async def test_a_template_that_the_server_refuses_is_a_failure_in_its_words(world: World) -> None:
    container = {"name": "agent", "image": "x", "volumeMounts": [{"name": "nowhere", "mountPath": "/x"}]}
    provider = world.use(pools(template={"spec": {"containers": [container]}}))
    refusal = (await provider.create(2, REQUEST)).refusal
    assert refusal is not None
    assert refusal.kind is RefusalKind.FAILED
    assert f'Pod "{FIRST}" is invalid: spec.containers[agent].volumeMounts.name: Not found: "nowhere"' in refusal.reason


# ---------------------------------------------------------------- how pods end


async def end(world: World, how: str) -> None:
    cluster, node = world.cluster, f"node-of-{FIRST}"
    if how == "oom":
        cluster.end_pod(FIRST, code=137, why="OOMKilled")
    elif how == "crash":
        cluster.end_pod(FIRST, code=1)
    elif how == "left":
        cluster.end_pod(FIRST, code=0, why="Completed")
    elif how == "evicted":
        cluster.end_pod(FIRST, code=137, reason="Evicted", message="The node was low on resource: memory.")
    elif how == "shutdown":
        text = "Pod was terminated in response to imminent node shutdown."
        cluster.disrupt_pod(FIRST, "TerminationByKubelet", text)
        cluster.end_pod(FIRST, code=143, reason="Terminated", message=text)
    elif how == "drained":
        cluster.evict_pod(FIRST)
        cluster.remove_pod(FIRST)
    elif how == "preempted":
        cluster.disrupt_pod(
            FIRST, "PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod"
        )
        cluster.delete(PODS, NAMESPACE, FIRST)
        cluster.remove_pod(FIRST)
    elif how == "kueue":
        cluster.disrupt_pod(FIRST, "StoppedByKueue", "Preempted to accommodate a workload", kind="TerminationTarget")
        cluster.delete(PODS, NAMESPACE, FIRST)
        cluster.remove_pod(FIRST)
    elif how == "deleted":
        cluster.delete(PODS, NAMESPACE, FIRST)
        cluster.remove_pod(FIRST)
    elif how == "forced":
        cluster.remove_pod(FIRST)
    elif how == "node gone":
        cluster.lose_node(node)
        world.now += 5
    elif how == "node silent":
        cluster.delete(PODS, NAMESPACE, FIRST)  # the taint manager's, which no kubelet confirms
        world.now += 100


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("oom", "its container ran out of memory (OOMKilled, limit 8Gi)"),
        ("crash", "its agent ended with exit code 1"),
        ("left", "its agent ended"),
        ("evicted", "its node evicted it (Evicted): The node was low on resource: memory."),
        ("shutdown", "its node shut down (Terminated): Pod was terminated in response to imminent node shutdown."),
        ("drained", "it was evicted through the API, as by kubectl drain: Eviction API: evicting"),
        ("preempted", "the scheduler gave its place to a pod of a higher priority: default-scheduler: preempting to "
         "accommodate a higher priority pod"),
        ("kueue", "StoppedByKueue: Preempted to accommodate a workload"),
        ("deleted", "its pod was deleted, and not by this manager"),
        ("forced", "its pod was deleted at once, as when its node is gone or by kubectl delete --force"),
        ("node gone", f"its node node-of-{FIRST} is gone"),
        ("node silent", f"its node node-of-{FIRST} is lost: the pod was to end and nobody there confirms it"),
    ],
)  # fmt: skip
async def test_the_ends_of_pods_are_told_apart(world: World, how: str, expected: str) -> None:
    container = {"name": "agent", "image": "x", "resources": {"limits": {"memory": "8Gi"}}}
    await world.use(pools(template={"spec": {"containers": [container]}})).create(1, REQUEST)
    await world.bench.keep_house()
    await end(world, how)
    vm = await world.list_one()
    assert vm.id == FIRST
    assert vm.ended == expected
    assert not vm.going
    assert list(await world.bench.provider.list_notices()) == []
    world.now += 5
    assert (await world.list_one()).ended == expected, "it stays so"


async def test_pods_that_have_ended_stay_for_a_while_and_are_then_removed(world: World) -> None:
    await world.bench.provider.create(1, REQUEST)
    world.cluster.end_pod(FIRST, code=1)
    await world.list_one()
    world.now += 899
    await world.list_one()
    assert world.cluster.pod_names() == [FIRST]
    world.now += 2
    await world.bench.keep_house()
    assert world.cluster.pod_names() == []


# ---------------------------------------------------------------- notices


@pytest.mark.parametrize(
    ("announce", "seconds"),
    [
        (lambda cluster: cluster.delete(PODS, NAMESPACE, FIRST), 60),
        (lambda cluster: cluster.evict_pod(FIRST, grace_s=20), 20),
        (lambda cluster: cluster.disrupt_pod(FIRST, "PreemptionByScheduler", "preempting"), 60),
        (lambda cluster: cluster.taint_node(f"node-of-{FIRST}", "cloud.google.com/impending-node-termination"), 25),
        (lambda cluster: cluster.taint_node(f"node-of-{FIRST}", "karpenter.sh/disrupted"), 120),
        (lambda cluster: cluster.taint_node(f"node-of-{FIRST}", "aws-node-termination-handler/spot-itn"), 120),
        (lambda cluster: cluster.set_node_condition(f"node-of-{FIRST}", "PreemptScheduled"), 30),
    ],
    ids=["deletion", "eviction", "preemption", "gke", "karpenter", "aws", "aks"],
)
async def test_what_announces_the_end_of_a_pod_or_node_is_a_notice(world: World, announce: Any, seconds: int) -> None:
    await world.bench.provider.create(1, REQUEST)
    await world.bench.keep_house()
    announce(world.cluster)
    await world.bench.catch_up()
    world.now += 5
    await world.bench.keep_house()
    (notice,) = await world.bench.provider.list_notices()
    assert notice.vm_id == FIRST
    assert notice.id == world.cluster.pod(FIRST)["metadata"]["uid"]
    assert notice.deadline_unix_s - world.now in (seconds, seconds - 5)
    world.now += 5
    await world.bench.keep_house()
    assert list(await world.bench.provider.list_notices()) == [notice], "its deadline does not move"


async def test_taints_that_spot_nodes_always_have_and_silent_nodes_are_no_notices(world: World) -> None:
    await world.bench.provider.create(1, REQUEST)
    node = f"node-of-{FIRST}"
    for key in ("kubernetes.azure.com/scalesetpriority", "nvidia.com/gpu", "node.kubernetes.io/unreachable"):
        world.cluster.taint_node(node, key)
    world.now += 5
    await world.bench.keep_house()
    assert list(await world.bench.provider.list_notices()) == []


async def test_without_the_right_to_read_nodes_all_else_works(world: World) -> None:
    world.server.roles["the manager's"] = [rule for rule in read_rights(NAMESPACE) if "nodes" not in rule["resources"]]
    await world.bench.provider.create(1, REQUEST)
    await world.bench.keep_house()
    world.cluster.taint_node(f"node-of-{FIRST}", "karpenter.sh/disrupted")
    world.now += 5
    assert (await world.list_one()).ended is None
    assert list(await world.bench.provider.list_notices()) == []
    refused: Sequence[str] = world.cluster.forbidden
    assert len(refused) == 1, "it asks again only after ten minutes"
    world.cluster.forbidden.clear()


async def test_a_pod_can_be_preempted_with_and_without_a_notice(world: World) -> None:
    provider = world.bench.provider
    await provider.create(2, REQUEST)
    await provider.preempt_vm(FIRST, 20.0)
    await provider.preempt_vm(f"varuna-{REQUEST}-001", 0.0)
    await world.bench.catch_up()
    (notice,) = await provider.list_notices()
    assert (notice.vm_id, notice.deadline_unix_s) == (FIRST, world.now + 20)
    assert world.cluster.pod_names() == [FIRST]
    with pytest.raises(UnknownVmError, match="has no pod 'stranger' of this fleet"):
        await provider.preempt_vm("stranger", 0.0)
    world.cluster.failures = [500]
    with pytest.raises(ProviderRefusedError):
        await provider.preempt_vm(FIRST, 0.0)


async def test_a_deletion_that_the_server_refuses_leaves_the_vm_in_the_list(world: World) -> None:
    """A VM that was going would count as gone, and nobody would delete it again."""
    provider = world.bench.provider
    await provider.create(1, REQUEST)
    await world.bench.keep_house()
    world.cluster.failures = [500]
    with pytest.raises(api_module.ApiRefusedError):
        await provider.delete([FIRST])
    (vm,) = await provider.list()
    assert not vm.going
    await provider.delete([FIRST])
    (vm,) = await provider.list()
    assert vm.going


async def test_pods_get_their_tokens_also_when_another_chore_fails(world: World) -> None:
    provider = world.use(pools(labels_leader=True), pod_name="outside-of-the-cluster")
    await provider.create(1, REQUEST)
    await world.bench.keep_house()
    assert len(world.cluster.list_objects(SECRETS)) == 1
    assert list(provider._troubles) == ['pods "outside-of-the-cluster" not found']


async def test_while_secrets_are_refused_each_pod_keeps_its_token_and_others_are_given_up(world: World) -> None:
    world.cluster.schedules = False
    world.cluster.secrets_fail_with = ApiError(403, "Forbidden", "exceeded quota: secrets, limited: secrets=10")
    second = f"varuna-{REQUEST}-001"
    await world.bench.provider.create(2, REQUEST)
    world.cluster.refuse_to_schedule(FIRST, "0/3 nodes are available.")
    world.cluster.bind_pod(second)
    for _ in range(5):
        await world.bench.keep_house()
    trouble = ["exceeded quota: secrets, limited: secrets=10"]
    assert list(world.bench.provider._troubles) == trouble, "it is one trouble, which is logged once"
    assert world.bench.tokens == [second]
    assert world.cluster.count_requests("POST", "/secrets") == 1, "it is tried again after a pause"
    world.now += 601
    await world.bench.keep_house()
    assert world.cluster.pod_names() == [second], "the other one had no node for too long"
    assert world.bench.tokens == [second]
    assert world.cluster.count_requests("POST", "/secrets") == 2
    world.cluster.secrets_fail_with = None
    world.now += 1800  # of the hour for which the token is valid
    await world.bench.keep_house()
    assert world.bench.tokens == [second, second]
    assert len(world.cluster.list_objects(SECRETS)) == 1


async def test_a_pod_of_the_users_with_the_fleets_label_does_no_harm(world: World) -> None:
    """It is adopted as a VM, as everything with the fleet's mark."""
    metadata = {"name": "by-hand", "labels": {"varuna/fleet": "varuna"}}
    spec = {"containers": [{"name": "x", "image": "x"}]}
    world.cluster.create(PODS, NAMESPACE, {"metadata": metadata, "spec": spec})
    await world.list_one()
    world.cluster.remove_pod("by-hand")
    assert (await world.list_one()).ended is not None


# ---------------------------------------------------------------- prices


async def test_with_a_limit_of_cost_only_pools_with_a_price_are_used(world: World) -> None:
    priced = KubernetesPool(name="priced", gpus=4, price_per_hour=2.5)
    dear = KubernetesPool(name="dear", gpus=4, price_per_hour=7.0)
    provider = world.use(pools(pools=(SETTINGS.pools[0], priced, dear)), needs_prices=True)
    assert (await provider.get_offer()).price_per_hour == 7.0, "a request may get any pool"
    (vm,) = (await provider.create(1, REQUEST)).vms
    assert (vm.gpus, vm.price_per_hour) == (4, 2.5)
    none = world.use(pools(pools=SETTINGS.pools[:1]), needs_prices=True)
    refusal = (await none.create(1, "2")).refusal
    assert refusal is not None
    assert "give each pool its price_per_hour" in refusal.reason


async def test_the_server_itself_refuses_what_a_real_one_refuses(world: World) -> None:
    """The tests' API server is no better than its refusals."""
    api = make_api(world.server.url, NAMESPACE)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": []}}
    cases: list[tuple[Any, int, str]] = [
        ({**pod, "kind": "Node"}, 400, "BadRequest"),
        ({**pod, "metadata": {"name": "A_b"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}, 422, "Invalid"),
        ({**pod, "spec": {}}, 422, "Invalid"),
    ]
    for body, code, reason in cases:
        with pytest.raises(api_module.ApiRefusedError) as refused:
            await api.create_pod(body)
        assert (refused.value.code, refused.value.reason) == (code, reason)
    stranger = make_api(world.server.url, NAMESPACE, "nobody's")
    with pytest.raises(api_module.ApiRefusedError) as unauthorised:
        await stranger.list_pods({})
    assert unauthorised.value.code == 401
    manager = make_api(world.server.url, "kube-system", "the manager's")
    with pytest.raises(api_module.ApiRefusedError) as forbidden:
        await manager.list_pods({})
    assert forbidden.value.code == 403
    world.cluster.forbidden.clear()
    with pytest.raises(ApiError):
        world.cluster.get(NODES, "", "nowhere")
    for each in (api, stranger, manager):
        await each.close()
