"""Whatever the REST API's own description allows, and what it does not, is answered as described: never with a 5xx."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from forked_manager import ManagerZygote
from scripted_manager import ScriptedManager
from waiting import DEADLINE_S

pytestmark = pytest.mark.slow


@schemathesis.serializer("application/gzip")
def as_it_is(context: schemathesis.SerializationContext, value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


EXAMPLES = 12
"""Of each call; CI plays the same ones each time."""
ENDLESS = ["/api/v1/events/stream"]


@pytest.fixture
async def url(tmp_path: Path, manager_zygote: ManagerZygote) -> AsyncIterator[str]:
    """A manager whose only VM never comes, so that whatever is submitted runs nowhere."""
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: [{name: nobody}]\n")
    manager = ScriptedManager(tmp_path / "data", manager_zygote)
    flags = ("--changes-per-s", "1000", "--default-checkpoint-url", str(tmp_path / "checkpoints"))
    await manager.start("--provider", f"static:{hosts}", *flags)
    await manager.submit(name="known")
    yield str(manager.rest.base_url.copy_with(path="/"))
    await manager.close()


async def test_every_call_answers_as_its_description_says(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}openapi.json").exclude(path=ENDLESS)
    calls = [result.ok() for result in schema.get_all_operations()]
    assert len(calls) > 15
    for call in calls:
        _play(call, url)


def _play(call: schemathesis.APIOperation, url: str) -> None:  # type: ignore[type-arg]
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=call.as_strategy(GenerationMode.POSITIVE) | call.as_strategy(GenerationMode.NEGATIVE))
    def answers(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, timeout=DEADLINE_S)
        case.validate_response(response, checks=(not_a_server_error, status_code_conformance))

    answers()
