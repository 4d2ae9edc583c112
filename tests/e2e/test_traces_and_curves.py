"""A real job morphs: manager, agents and workers send its trace, and its curves are complete."""

from __future__ import annotations

import gzip
import json
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manager_world import all_ready, run_varuna
from restartable_manager import RestartableManager
from small_training import SMALL_MODEL
from varuna_client.demo.processes import DemoProcesses
from varuna_proto.trace_context import traceparent
from waiting import wait_until

pytestmark = pytest.mark.xdist_group("e2e")

SCRIPT = (
    SMALL_MODEL
    + """
    import varuna

    first = model.resume() + 1
    if first == 1:
        model.checkpoint()
    Path(f"context-{os.environ['VARUNA_GENERATION']}-{os.environ['RANK']}").write_text(os.environ["TRACEPARENT"])
    for step, batch in Batches(data, first_step=first, last_step=100_000):
        model.step(batch)
        varuna.log({"half": step / 2}, step)
        if Path("end").exists() and step >= int(Path("end").read_text()):
            break  # on every rank at the same step
        time.sleep(0.02)
"""
)


STARTING = {"wait", "process", "meet", "trace", "script", "load", "first step"}
"""The parts of a rank's start."""


class Span(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]


class TraceCollector(ThreadingHTTPServer):
    """As much of an OpenTelemetry collector as the test needs: OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: TraceCollector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.server.spans.append(
                        Span(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _values(span.attributes),
                        )
                    )
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """The logs do not go to stderr."""


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def receiver() -> Iterator[TraceCollector]:
    with TraceCollector() as server, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve_forever, 0.05)
        yield server
        server.shutdown()
        serving.result()


@pytest.fixture
def manager(tmp_path: Path, receiver: TraceCollector) -> Iterator[RestartableManager]:
    folder = tmp_path / "manager"
    folder.mkdir()
    with DemoProcesses(folder) as processes:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        manager = RestartableManager(processes, folder, "--vms", "2", environment=environment)
        manager.start()
        yield manager


@pytest.mark.slow
def test_a_morph_is_traced_and_the_curves_go_on(
    manager: RestartableManager, receiver: TraceCollector, tmp_path: Path
) -> None:
    workdir = tmp_path / "small"
    workdir.mkdir()
    (workdir / "train.py").write_text(textwrap.dedent(SCRIPT))
    job = {
        "name": "small",
        "run": "python train.py",
        "global_batch": 4,
        "copy_workdir": False,
        "resources": {"max_gpus": 1},  # so that it moves from the one VM to the other once
        "env": {"VARUNA_TENSORBOARD": str(tmp_path / "curves")},
    }
    (workdir / "job.yaml").write_text(json.dumps(job))
    with manager.client() as client:
        wait_until(lambda: all_ready(client, 2), "two VMs")
        assert run_varuna("submit", str(workdir / "job.yaml"), url=manager.url).returncode == 0
        wait_until(lambda: client.job("small")["step"] > 20, "the first steps")
        number = (client.job("small")["generation"] or 0) + 1
        drained = next(vm["id"] for vm in client.vms() if vm["workers"])
        assert run_varuna("drain", drained, url=manager.url).returncode == 0
        wait_until(lambda: client.job("small")["generation"] == number, "the morph")
        at = client.job("small")["step"] or 0
        wait_until(lambda: (client.job("small")["step"] or 0) > at + 10, "steps after the morph")
        (workdir / "end.part").write_text(str(client.job("small")["step"]))
        (workdir / "end.part").rename(workdir / "end")
        wait_until(lambda: client.job("small")["state"] == "succeeded", "the job's end")
        ended = client.job("small")

        logged = client.logged_values("small", points=10_000)
        metrics = client.metrics("small")

    assert [one["name"] for one in logged] == ["half"]
    assert logged[0]["step"] == [step["step"] for step in metrics], "those of both generations, and each once"
    assert logged[0]["value"] == [step / 2 for step in logged[0]["step"]]
    check_trace(receiver, ended["id"], number, workdir)
    check_curves(tmp_path / "curves", ended["step"])


def is_whole(spans: list[Span]) -> bool:
    """Whether all has come: manager, agents and workers each send their parts on their own, in any order."""
    ids = {span.span_id for span in spans}
    names = {(span.service, span.name) for span in spans}
    starts = [span for span in spans if span.name == "start rank"]
    manager = {("varuna-manager", name) for name in ("morph", "stop", "launch", "step")}
    return (
        names >= manager | {("varuna-agent", "stop rank")}
        and bool(starts)
        and all({span.name for span in spans if span.parent_id == start.span_id} >= STARTING for start in starts)
        and all(span.parent_id in ids for span in spans if span.name != "morph")
    )


def check_trace(receiver: TraceCollector, job_id: str, number: int, workdir: Path) -> None:
    """The trace of the morph that began generation `number`."""
    _, trace_id, root_id, _ = traceparent(job_id, number).split("-")

    def spans() -> list[Span]:
        return [span for span in receiver.spans if span.trace_id == trace_id]

    try:
        wait_until(lambda: is_whole(spans()), "the trace")
    except AssertionError as error:
        raise AssertionError(f"{error}: {[(span.service, span.name, span.parent_id) for span in spans()]}") from error
    found = spans()
    (root,) = [span for span in found if span.name == "morph"]
    assert (root.span_id, root.parent_id) == (root_id, "")
    assert root.attributes["varuna.job"] == job_id
    assert root.attributes["varuna.generation"] == number
    ids = {span.span_id for span in found}
    assert len(ids) == len(found), "no two spans have one id"
    assert all(span.parent_id in ids for span in found if span is not root)
    manager_parts = [span for span in found if span.service == "varuna-manager" and span is not root]
    names = [span.name for span in manager_parts]  # a part that took no time is left out
    assert names == [name for name in ("notice", "stop", "plan", "launch", "step") if name in names]
    assert all(root.begin_ns <= span.begin_ns <= span.end_ns <= root.end_ns + 1000 for span in manager_parts)
    for start in [span for span in found if span.name == "start rank"]:
        assert start.parent_id == root_id
        own = [span for span in found if span.parent_id == start.span_id]
        assert {span.service for span in own} == {"varuna-agent", "varuna-worker"}
        # The worker itself could have added spans of its own there.
        context = (workdir / f"context-{number}-{start.attributes['varuna.rank']}").read_text()
        assert context.split("-")[1:3] == [trace_id, start.span_id]


def check_curves(folder: Path, last: int) -> None:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert len(list(folder.iterdir())) == 2, "two generations wrote"
    for name in ("loss", "step_s", "examples_per_s", "learning_rate"):
        points = events.Scalars(f"train/{name}")
        assert [point.step for point in points] == list(range(1, last + 1)), name
        assert all(point.value > 0 for point in points)
    halves = {point.step: point.value for point in events.Scalars("script/half")}
    assert halves == {step: step / 2 for step in range(1, last + 1)}
    assert all(point.value == pytest.approx(1e-4) for point in events.Scalars("train/learning_rate"))
