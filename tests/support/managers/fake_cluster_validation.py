"""What an API server checks of new objects: Kubernetes' published schemas, and the commonest of its further rules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml
from kubernetes_validate import utils

VERSION = "1.37"
utils.schema_contents = functools.cache(utils.schema_contents)  # it reads megabytes of JSON for each object
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|e\d+)?")


def find_warnings(made: dict[str, Any]) -> list[str]:
    """Fields that no schema knows. An API server drops them."""
    try:
        kubernetes_validate.validate(made, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        if error.validator == "additionalProperties":
            place = ".".join(map(str, error.path))
            return [f'unknown field in "{place}": {error.message}']
    return []


def validate_object(made: dict[str, Any]) -> str | None:
    """Why an API server refuses it."""
    try:
        kubernetes_validate.validate(made, VERSION)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return next(_find_flaws(made), None)


def read_manifests(text: str) -> list[dict[str, Any]]:
    """The objects of a file of YAML documents."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def _find_flaws(made: dict[str, Any]) -> Iterator[str]:
    metadata = made["metadata"]
    name = metadata.get("name", "")
    is_named = bool(_NAME.fullmatch(name)) and len(name) <= 253
    if not is_named and not (name == "" and metadata.get("generateName")):
        yield f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain'
    for key, value in metadata.get("labels", {}).items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            yield f'metadata.labels: Invalid value: "{key}={value}"'
    for owner in metadata.get("ownerReferences", []):
        if not owner.get("uid"):
            yield "metadata.ownerReferences.uid: Required value: uid must not be empty"
    if made["kind"] == "Pod":
        yield from _find_pod_flaws(made["spec"], "spec")
    elif made["kind"] == "Deployment":
        labels = made["spec"]["template"]["metadata"]["labels"]
        if not made["spec"]["selector"]["matchLabels"].items() <= labels.items():
            yield "spec.template.metadata.labels: Invalid value: `selector` does not match template `labels`"
        yield from _find_pod_flaws(made["spec"]["template"]["spec"], "spec.template.spec")


def _find_pod_flaws(spec: dict[str, Any], place: str) -> Iterator[str]:
    if spec.get("restartPolicy", "Always") not in ("Always", "OnFailure", "Never"):
        yield f'{place}.restartPolicy: Unsupported value: "{spec["restartPolicy"]}"'
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        yield f"{place}.terminationGracePeriodSeconds: must be greater than or equal to 0"
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    for volume in volumes:
        if volumes.count(volume) > 1:
            yield f'{place}.volumes.name: Duplicate value: "{volume}"'
    names = [container["name"] for container in spec["containers"]]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        if names.count(container["name"]) > 1:
            yield f'{place}.containers.name: Duplicate value: "{container["name"]}"'
        yield from _find_container_flaws(container, volumes, f"{place}.containers[{container['name']}]")
    for toleration in spec.get("tolerations", []):
        if toleration.get("operator", "Equal") == "Exists" and toleration.get("value"):
            yield f"{place}.tolerations.operator: value must be empty when `operator` is 'Exists'"


def _find_container_flaws(container: dict[str, Any], volumes: list[str], place: str) -> Iterator[str]:
    if not container.get("image"):
        yield f"{place}.image: Required value"
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f'{place}.volumeMounts.name: Not found: "{mount["name"]}"'
    resources = container.get("resources", {})
    for kind in ("limits", "requests"):
        for name, value in resources.get(kind, {}).items():
            if not _QUANTITY.fullmatch(str(value)):
                yield f'{place}.resources.{kind}.{name}: quantities must match a regular expression: "{value}"'
            if "/" in name and not re.fullmatch(r"\d+", str(value)):
                yield f"{place}.resources.{kind}.{name}: must be an integer"
