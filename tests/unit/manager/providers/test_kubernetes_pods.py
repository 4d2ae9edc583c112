"""The pod of a VM, made from a user's template, and the settings that give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_cluster_validation import VERSION, validate_object
from varuna_agent.main import _make_parser
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.kubernetes.pod_body import Owner, make_pod_body, make_pod_name, make_secret_body
from varuna_manager.providers.kubernetes.settings import KubernetesSettings, read_kubernetes_settings

ORIGIN = Origin(managers="varuna-manager:8751", urls=("https://varuna-manager:8750",), ca_pem="the authority")
AGENT: dict[str, Any] = {"name": "agent", "image": "varuna-agent:1"}


def settings(**fields: Any) -> KubernetesSettings:
    document = {"template": {"spec": {"containers": [AGENT]}}, "pools": [{"name": "spot"}], **fields}
    return KubernetesSettings.model_validate(document)


def pod(owner: Owner | None = None, **fields: Any) -> dict[str, Any]:
    given = settings(**fields)
    body = make_pod_body(given, given.pools[0], "varuna-1-000", "1", ORIGIN, owner)
    assert validate_object(body) is None, VERSION
    return body


def test_a_name_says_whose_pod_it_is_and_fits_into_a_host_name() -> None:
    tag = "0123456789abcdef" * 2
    assert make_pod_name("varuna", tag, 7) == f"varuna-{tag}-007"
    assert len(make_pod_name("f" * 20, tag, 999)) <= 63


def test_tags_that_are_no_names_still_give_different_names() -> None:
    tags = ["Request_1", "request_1", "request-1", "x" * 40, "x" * 41, "_", "-"]
    names = [make_pod_name("varuna", tag, 0) for tag in tags]
    assert len({*names}) == len(tags)
    for name in names:
        body = {"metadata": {"name": name}, "spec": {"containers": [AGENT]}, "apiVersion": "v1", "kind": "Pod"}
        assert validate_object(body) is None, name


def test_the_agent_gets_arguments_that_it_knows_and_its_token_in_a_file() -> None:
    body = pod(pools=[{"name": "spot", "gpus": 4, "device_memory_gib": 80}])
    options = _make_parser().parse_args(body["spec"]["containers"][0]["args"])
    assert (options.vm_id, options.manager, options.gpus, options.device) == (
        "varuna-1-000", "varuna-manager:8751", 4, "cuda",
    )  # fmt: skip
    assert options.device_memory_bytes == 80 << 30
    (volume,) = body["spec"]["volumes"]
    (mount,) = body["spec"]["containers"][0]["volumeMounts"]
    assert volume["secret"]["secretName"] == "varuna-1-000"
    assert str(options.join_token_file) == f"{mount['mountPath']}/token"
    assert mount["readOnly"]


def test_arguments_of_the_template_win() -> None:
    agent = {**AGENT, "args": ["--memory-part=0", "--log-format=text"]}
    body = pod(template={"spec": {"containers": [agent]}})
    options = _make_parser().parse_args(body["spec"]["containers"][0]["args"])
    assert (options.memory_part, options.log_format) == (0.0, "text")


def test_what_the_template_does_not_say_is_filled_in() -> None:
    spec = pod()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] == 60
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["python3", "-m", "varuna_agent.notices.pre_stop", "/data/vm", "52"]
    assert spec["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert "resources" not in pod(device="cpu")["spec"]["containers"][0]


def test_what_the_template_says_stays() -> None:
    agent = {
        **AGENT,
        "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
        "resources": {"limits": {"memory": "8Gi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    spec = {
        "containers": [{"name": "sidecar", "image": "x"}, agent],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "terminationGracePeriodSeconds": 25,
        "automountServiceAccountToken": True,
    }
    template = {"metadata": {"labels": {"team": "ml"}, "annotations": {"x": "y"}}, "spec": spec}
    pool = {"name": "spot", "node_selector": {"spot": "true"}, "tolerations": [{"key": "b", "operator": "Exists"}]}
    body = pod(template=template, pools=[pool], queue_name="training")
    made = body["spec"]
    assert made["containers"][1]["lifecycle"] == agent["lifecycle"]
    assert made["containers"][1]["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}
    assert [mount["name"] for mount in made["containers"][1]["volumeMounts"]] == ["data", "varuna-join"]
    assert made["containers"][0] == {"name": "sidecar", "image": "x"}
    assert made["nodeSelector"] == {"disk": "ssd", "spot": "true"}
    assert [toleration["key"] for toleration in made["tolerations"]] == ["a", "b"]
    assert (made["terminationGracePeriodSeconds"], made["automountServiceAccountToken"]) == (25, True)
    assert body["metadata"]["annotations"] == {"x": "y"}
    assert body["metadata"]["labels"] == {
        "app.kubernetes.io/name": "varuna-agent",
        "team": "ml",
        "kueue.x-k8s.io/queue-name": "training",
        "varuna/fleet": "varuna",
        "varuna/request": "1",
        "varuna/pool": "spot",
    }
    assert spec["tolerations"] == [{"key": "a", "operator": "Exists"}], "the settings stay as they are"


def test_the_secret_belongs_to_its_pod() -> None:
    owner = Owner(api_version="apps/v1", kind="Deployment", name="varuna-manager", uid="1")
    body = pod(owner)
    (reference,) = body["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["uid"], reference["controller"]) == ("Deployment", "1", False)
    body["metadata"]["uid"] = "2"
    secret = make_secret_body(body, "token")
    assert validate_object(secret) is None
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "2"
    assert secret["metadata"]["name"] == body["metadata"]["name"]


def test_a_pool_may_have_a_template_of_its_own() -> None:
    other = {"spec": {"containers": [{"name": "agent", "image": "varuna-agent:2"}]}}
    body = pod(pools=[{"name": "spot", "template": other}])
    assert body["spec"]["containers"][0]["image"] == "varuna-agent:2"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": None}, "template: there is none: give a template with spec.containers"),
        ({"template": {"spec": {}}}, "template: spec.containers is no list of containers"),
        ({"template": {"spec": {"containers": []}}}, "template: no container is named 'agent'"),
        ({"template": {"spec": {"containers": [{"name": "agent"}]}}}, "the container 'agent' has no image"),
        ({"template": {"spec": {"containers": [AGENT]}, "status": {}}}, "'status' is unknown"),
        (
            {"template": {"spec": {"containers": [AGENT], "restartPolicy": "Always"}}},
            "restartPolicy 'Always': an agent joins once",
        ),
        (
            {"template": {"spec": {"containers": [{**AGENT, "resources": {"limits": {"nvidia.com/gpu": 2}}}]}}},
            "its limit nvidia.com/gpu is 2 and pool spot has gpus: 1: leave the limit out",
        ),
        ({"pools": []}, "pools: Tuple should have at least 1 item"),
        ({"pools": [{"name": "spot"}, {"name": "spot"}]}, "pools: 'spot' occurs twice"),
        ({"pools": [{"name": "Spot"}]}, "pools.0.name 'Spot': String should match pattern"),
        ({"pending_timeout_s": 5000}, "pending_timeout_s 5000: Input should be less than or equal to 1500"),
        ({"colour": "blue"}, "colour 'blue': Extra inputs are not permitted"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "provider.yaml"
    document = {"template": {"spec": {"containers": [AGENT]}}, "pools": [{"name": "spot"}], **fields}
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError) as raised:
        read_kubernetes_settings(path)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"{path}: ")
    assert message in line
