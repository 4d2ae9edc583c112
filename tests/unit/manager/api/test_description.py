"""The API's description is complete, its examples are true, and docs/rest.md agrees with it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from repository import ROOT
from varuna_client.rest import calls
from varuna_manager.api.http import examples, reference
from varuna_manager.domain.spec import JobSpec
from varuna_proto import rest, rest_fleet


@pytest.fixture(scope="module")
def api() -> dict[str, Any]:
    return reference.make_description()


def operations(api: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, call) for path, calls in api["paths"].items() for method, call in calls.items()]


def test_every_call_has_a_name_of_its_own_a_tag_words_and_an_answer_with_a_type(api: dict[str, Any]) -> None:
    found = operations(api)
    assert len({call["operationId"] for _, _, call in found}) == len(found) > 40
    tags = {tag["name"] for tag in api["tags"]}
    for path, method, call in found:
        assert set(call["tags"]) <= tags, path
        assert call.get("description"), f"{method} {path} says nothing of itself"
        good = next(answer for status, answer in call["responses"].items() if status.startswith("2"))
        assert good["content"], path
        for media, content in good["content"].items():
            assert content["schema"] or media != "application/json", f"{method} {path} has no type"


def test_every_reference_leads_somewhere(api: dict[str, Any]) -> None:
    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            return own.union(*map(references, part.values()))
        return set().union(*map(references, part)) if isinstance(part, list) else set()

    names = {reference.rpartition("/")[2] for reference in references(api)}
    assert names <= set(api["components"]["schemas"])


@pytest.mark.parametrize("name", examples.DOCUMENTS)
def test_examples_are_of_their_types(name: str) -> None:
    kind = getattr(rest, name, None) or getattr(rest_fleet, name)
    checked = TypeAdapter(kind).validate_python(examples.DOCUMENTS[name], strict=False)
    assert set(checked) == set(examples.DOCUMENTS[name]), "it has keys that the type does not have"


@pytest.mark.parametrize("name", examples.JOB_SPECS)
def test_examples_of_jobs_are_jobs(name: str) -> None:
    JobSpec.model_validate(examples.JOB_SPECS[name]["value"])


def test_docs_rest_md_is_what_the_api_says(api: dict[str, Any]) -> None:
    assert (ROOT / "docs/rest.md").read_text() == reference.render_page(api), "run: make docs"


def test_the_client_calls_what_there_is(api: dict[str, Any]) -> None:
    """Each of its calls is one of the API's, with parameters that it has."""
    made = [
        calls.submit({}),
        calls.jobs(state=["running"], name="a", since="x"),
        calls.job("a"),
        calls.change("a", {}),
        calls.cancel("a"),
        calls.retry("a"),
        calls.delete("a"),
        calls.profile("a"),
        calls.generations("a", brief=True),
        calls.generation("a", 1),
        calls.plans("a"),
        calls.plan("a"),
        calls.plan("a", 1),
        calls.metrics("a"),
        calls.metric_buckets("a", to_step=9),
        calls.time("a"),
        calls.cost("a"),
        calls.pipeline("a", generation=1),
        calls.checkpoints("a"),
        calls.events("a", vm="v", kind=["k"], since="x", until="y"),
        calls.events(),
        calls.newest_events("a", before=3),
        calls.logs("a", generation=1),
        calls.log_chunk("a", generation=1, limit=5, wait_s=1.0),
        calls.search_log("a", "b", generation=1),
        calls.stacks("a", generation=1),
        calls.vms(state=["ready"], job="a", quarantined=True, text="b"),
        calls.vm("v"),
        calls.vm_summary(),
        calls.drain("v"),
        calls.cordon("v"),
        calls.uncordon("v"),
        calls.preempt("v", notice_s=1.0),
        calls.fleet(),
        calls.fleet_history(since="x", until="y"),
        calls.fleet_cost(since="x"),
        calls.set_fleet_target(1),
        calls.set_local_capacity(1),
        calls.whoami(),
        calls.create_token({}),
        calls.tokens(),
        calls.revoke_token("t"),
        calls.revoke_vm("v"),
        calls.audit(after=1),
        calls.archive_size("0" * 64),
    ]
    call: Any
    for call in made:
        taken = parameters(api, call.method.lower(), call.path)
        assert {name for name, _ in call.params} <= taken, f"{call.method} {call.path}"


def parameters(api: dict[str, Any], method: str, path: str) -> set[str]:
    """Of the call's query."""
    parts = path.split("/")
    for template, found in api["paths"].items():
        pattern = template.removeprefix("/api/v1").split("/")
        fits = len(pattern) == len(parts) and all(
            own.startswith("{") or own == part for own, part in zip(pattern, parts, strict=True)
        )
        if fits and method in found:
            return {one["name"] for one in found[method].get("parameters", ()) if one["in"] == "query"}
    raise AssertionError(f"the API has no {method} {path}")
