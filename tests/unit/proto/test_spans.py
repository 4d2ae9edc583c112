"""When spans are sent, and what their contexts are."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_proto import spans
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.trace_context import child, traceparent
from waiting import DEADLINE_S

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False),
        ({"OTEL_SDK_DISABLED": "true", **ENDPOINT}, False),
    ],
)
def test_only_opentelemetrys_own_variables_ask_for_traces(environ: dict[str, str], wanted: bool) -> None:
    assert spans.are_wanted(environ) is wanted
    if not wanted:
        assert spans.exporter(environ, "varuna-test") is None


def test_a_protocol_that_is_not_spoken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert spans.exporter({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "varuna-test") is None
    assert "http/protobuf" in capsys.readouterr().out


WITHOUT = """
import os, sys
sys.modules["opentelemetry"] = None  # as where it is not installed
from varuna_proto import spans
assert spans.exporter(os.environ, "varuna-test") is None
"""


@pytest.mark.processes
def test_missing_packages_are_told_and_cost_the_traces_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=ENDPOINT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'varuna-spot[otel]'" in done.stdout


NOTHING = """
import sys
import varuna_agent.main, varuna_manager.history.morph_spans
from varuna_proto import spans
assert spans.exporter({}, "varuna-test") is None
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""


@pytest.mark.processes
def test_without_them_nothing_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTHING], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr


@given(st.text(max_size=30), st.integers(1, 10_000), st.integers(0, 4096))
def test_contexts_are_w3cs_and_follow_from_the_names_alone(job_id: str, generation: int, rank: int) -> None:
    root = traceparent(job_id, generation)
    below = child(root, f"rank {rank}")
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", context) for context in (root, below))
    assert root == traceparent(job_id, generation) != traceparent(job_id, generation + 1)
    assert below.split("-")[1] == root.split("-")[1]
    assert len({root, below, child(root, "step"), child(below, "step")}) == 4
    assert child("", "step") == ""


def test_a_worker_gets_its_context_where_others_look_for_it() -> None:
    context = child(traceparent("job-1", 2), "rank 0")
    traced = worker_environment(context).to_environ()
    assert traced["TRACEPARENT"] == context
    assert WorkerEnvironment.from_environ(traced) == worker_environment(context)
    assert "TRACEPARENT" not in worker_environment("").to_environ()


def worker_environment(context: str) -> WorkerEnvironment:
    alone = WorkerEnvironment.alone("job-1", micro_batch=1, global_batch=1)
    return replace(alone, generation=2, traceparent=context)
