"""Commands against a manager whose answers are scripted: what they send, print and exit with."""

from __future__ import annotations

import importlib.metadata
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner, Result

from job_documents import JOB
from varuna_client.cli import app
from varuna_client.commands.options import render_plain
from varuna_client.commands.top import Snapshot
from varuna_client.errors import NotFoundError, UserError
from waiting import POLL_S

Answer = tuple[int, Any]


@dataclass
class ScriptedRest:
    """REST answers by method and path. A function gets the query's parameters."""

    url: str = ""
    answers: dict[str, Answer | Callable[[dict[str, str]], Answer]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--manager-url", self.url])

    def answer(self, method: str, target: str) -> Answer:
        parts = urlsplit(target)
        request = f"{method} {parts.path.removeprefix('/api/v1')}"
        self.requests.append(request)
        found = self.answers.get(request, (404, {"detail": f"{request}: there is none"}))
        return found({name: values[0] for name, values in parse_qs(parts.query).items()}) if callable(found) else found


@pytest.fixture
def rest() -> Iterator[ScriptedRest]:
    scripted = ScriptedRest()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, document = scripted.answer(self.command, self.path)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        scripted.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, args=(POLL_S,))
        serving.start()
        yield scripted
        server.shutdown()
        serving.join()


def vm(name: str, state: str = "ready") -> dict[str, Any]:
    return {"id": name, "state": state, "gpus": 1, "device_memory_bytes": 2**30, "host": "127.0.0.1", "workers": []}


def step(number: int) -> dict[str, Any]:
    at = "2026-01-01T00:00:01+00:00"
    return {
        "step": number,
        "loss": 0.5,
        "step_s": 2.0,
        "between_s": 0.0,
        "examples": 8,
        "generation": 1,
        "at": at,
    }


def test_the_version_is_that_of_the_distribution() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"varuna {importlib.metadata.version('varuna-spot')}\n")


def test_top_prints_once_without_a_terminal(rest: ScriptedRest) -> None:
    rest.answers["GET /jobs"] = (200, [{**JOB, "state": "running", "gpus": 2, "examples_per_s": 120.0}])
    rest.answers["GET /vms"] = (200, [vm("local-1"), vm("local-2"), vm("local-3", state="requested")])
    head, figures, _, jobs, job, _, vms, *rows = rest.run("top").stdout.splitlines()
    assert head.startswith(rest.url)
    assert figures == "1 of 1 jobs running  2 of 3 VMs ready  2 of 2 GPUs busy  120 examples/s"
    assert jobs.startswith("JOB ")
    assert job.startswith("gpt ")
    assert vms.startswith("VM ")
    assert [row.split()[0] for row in rows] == ["local-1", "local-2", "local-3"]
    assert len(json.loads(rest.run("top", "--json").stdout)["vms"]) == 3
    rest.answers |= {"GET /jobs": (200, []), "GET /vms": (200, [])}
    assert "no job runs or waits: varuna submit JOB.yaml" in rest.run("top").stdout


def test_no_caller_can_disguise_its_line_of_the_audit_log(rest: ScriptedRest) -> None:
    entry = {"at": "2026-01-01T00:00:01Z", "who": "?", "role": "", "address": "10.0.0.9", "status": 401}
    paths = ["[/x]", "[conceal]", "\x1b[8m", "x\n2 alice"]
    entries = [{**entry, "id": number, "action": f"GET /api/v1/jobs/{path}"} for number, path in enumerate(paths)]
    rest.answers["GET /audit"] = (200, entries)
    _, *lines = rest.run("audit").stdout.splitlines()
    shown = ["[/x]", "[conceal]", "[8m", "x 2 alice"]
    for line, path in zip(lines, shown, strict=True):
        assert f"10.0.0.9  GET /api/v1/jobs/{path}  " in line
        assert line.endswith(" 401")


def test_top_fits_the_screen() -> None:
    jobs: list[Any] = [{**JOB, "name": f"j{number}"} for number in range(50)]
    vms: list[Any] = [vm(f"local-{number}") for number in range(50)]
    for height, few, many in ((30, jobs[:2], vms), (30, jobs, vms[:2]), (30, jobs, vms), (30, [], [])):
        snapshot = Snapshot(url="http://m", jobs=few, vms=many)
        shown = render_plain(snapshot.render(datetime.now(UTC), height=height, trouble="no manager answers"))
        lines = shown.splitlines()
        assert len(lines) <= height
        assert lines[2] == "no manager answers"
        listed = sum(line.startswith(("j", "local-")) for line in lines)
        left_out = sum(int(line.split()[1]) for line in lines if line.startswith("and "))
        assert listed + left_out == len(few) + len(many)
        assert listed >= min(len(few) + len(many), height - 9)


def test_several_jobs_are_cancelled_even_if_one_cannot_be(rest: ScriptedRest) -> None:
    for name in ("a", "b"):
        rest.answers[f"GET /jobs/{name}"] = (200, {**JOB, "id": f"job-{name}", "name": name})
        rest.answers[f"POST /jobs/job-{name}/cancel"] = (200, {**JOB, "name": name, "state": "cancelling"})
    done = rest.run("cancel", "a", "nobody", "b", "a")
    assert done.stdout.splitlines() == ["job a is cancelling", "job b is cancelling"]
    assert isinstance(done.exception, NotFoundError)
    assert done.stderr == ""
    done = rest.run("cancel", "nobody", "b", "no", "--json")
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["b"]
    assert done.stderr.splitlines() == ["varuna: GET /jobs/nobody: there is none"]
    assert str(done.exception) == "GET /jobs/no: there is none"
    assert rest.run("cancel").exit_code == 2


def test_what_show_prints_is_of_one_moment(rest: ScriptedRest) -> None:
    """What happens between its requests is not in it."""

    def made(number: int) -> dict[str, Any]:
        plan = {"p": 2, "d": 2, "micro_batch": 1, "global_batch": 10}
        about = {"kind": "training", "state": "ended", "reason": f"reason {number}", "phases": [], "resumed_step": 0}
        return {"number": number, **about, "plan": plan, **plan}

    def event(number: int) -> dict[str, Any]:
        return {"id": number, "at": JOB["created_at"], "kind": "note", "message": f"event {number}", "generation": 2}

    def checkpoint(at_step: int) -> dict[str, Any]:
        return {"generation": 2, "step": at_step, "total_bytes": 2**20, "at": JOB["created_at"]}

    time = {"causes": [], "useful_s": 6.0, "elapsed_s": 8.0, "total_s": 8.0, "goodput": 0.75}
    cost = {"gpu_hours": 2.0, "cost": None, "cost_per_hour": None, "vms_without_price": 0}
    course = {"loss": {"mean": [3.0, 2.5]}}
    rest.answers["GET /jobs/gpt/report"] = (
        200,
        {"job": JOB, "generations": [made(2), made(3)], "plan": None, "time": time, "cost": cost, "course": course}
        | {"checkpoint": checkpoint(6), "events": [event(4), event(5)]},
    )
    rest.answers["GET /jobs/j-1/generations"] = (200, [made(number) for number in range(1, 5)])
    shown = rest.run("show", "gpt").stdout
    assert [f"reason {number}" in shown for number in range(1, 5)] == [True, True, True, False]
    assert "goodput 75%" in shown
    rest.answers["GET /jobs/j-1/metrics"] = (200, [step(number) for number in range(1, 10)])
    rest.answers["GET /jobs/j-1/checkpoints"] = (200, [checkpoint(number) for number in (3, 6, 9)])
    rest.answers["GET /jobs/j-1/events"] = (200, [event(number) for number in range(1, 8)])
    document = json.loads(rest.run("show", "gpt", "--json").stdout)
    assert [one["number"] for one in document["generations"]] == [1, 2, 3]
    assert [one["step"] for one in document["metrics"]] == list(range(1, JOB["step"] + 1))
    assert [one["step"] for one in document["checkpoints"]] == [3, 6]
    assert [one["id"] for one in document["events"]] == [1, 2, 3, 4, 5]


def test_the_metrics_are_all_steps_on_however_many_pages(rest: ScriptedRest) -> None:
    def page(query: dict[str, str]) -> Answer:
        after = int(query["after_step"])
        return 200, [step(number) for number in range(after + 1, min(after + 3, 8))]

    rest.answers["GET /jobs/gpt"] = (200, JOB)
    rest.answers["GET /jobs/j-1/metrics"] = page
    rest.answers["GET /jobs/j-1/metrics/logged"] = (200, [])
    heads, *rows = rest.run("metrics", "gpt", "--csv").stdout.splitlines()
    assert heads == "step,time,loss,examples_per_s,step_s,between_s,examples,generation"
    assert [row.split(",")[0] for row in rows] == [str(number) for number in range(1, 8)]
    assert [each["step"] for each in json.loads(rest.run("metrics", "gpt", "-n", "2", "--json").stdout)] == [6, 7]
    assert rest.run("metrics", "gpt").stdout.splitlines()[-1].split()[0] == "7"
    logged = {"name": "accuracy", "step": [5, 7], "value": [0.25, 0.5], "generation": [1, 1], "at_unix_s": [1.0, 2.0]}
    rest.answers["GET /jobs/j-1/metrics/logged"] = (200, [logged])
    assert rest.run("metrics", "gpt", "--csv").stdout.splitlines()[-1].endswith(",0.5")
    documents = json.loads(rest.run("metrics", "gpt", "-n", "2", "--json").stdout)
    assert [each["logged"] for each in documents] == [{}, {"accuracy": 0.5}]
    rest.answers["GET /jobs/j-1/metrics"] = (200, [])
    assert rest.run("metrics", "gpt").stdout == "job gpt has made no step yet: it is failed\n"
    assert isinstance(rest.run("metrics", "gpt", "--csv", "--json").exception, UserError)
