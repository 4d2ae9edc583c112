"""What is under deploy/ and docker/: linted, and true to the metrics, the options and the documentation."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from repository import ROOT
from varuna_agent.workers.guard import OOM_SCORE
from varuna_manager.metrics.from_store import STORE_FAMILIES
from varuna_manager.metrics.instruments import COUNTED_FAMILIES, Instruments
from waiting import DEADLINE_S

PROGRAMS = Path(sys.executable).parent
MONITORING = ROOT / "deploy" / "monitoring"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
_OF_PROMETHEUS = {"le", "instance", "alertname", "alertstate"}
_SELECTOR = re.compile(r"\b((?:varuna|process)_[a-z_]+)\b(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------- monitoring


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "varuna-alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((MONITORING / "varuna-dashboard.json").read_text())
    return document


def queries() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in board["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"].partition("(")[2]


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_every_metric_and_label_of_a_query_exists(where: str, query: str) -> None:
    known = {name: set(each.labels) for each in (*COUNTED_FAMILIES, *STORE_FAMILIES) for name in each.samples}
    of_process = {sample.name for family in Instruments().registry.collect() for sample in family.samples}
    labels: set[str] = set()
    found = _SELECTOR.findall(query)
    assert found, f"{where}: no metric of ours in {query}"
    for name, selector in found:
        assert name in known or name in of_process, f"{where}: there is no metric {name}"
        labels |= known.get(name, set())
        for label, _, _ in _LABEL.findall(selector):
            assert label in known[name], f"{where}: {name} has no label {label}"
    for group in _GROUPED.findall(query):
        for label in filter(None, (each.strip() for each in group.split(","))):
            assert label in labels | _OF_PROMETHEUS, f"{where}: grouped by {label}, which none of its metrics has"


def test_label_values_of_the_rules_are_those_that_are_counted_from_the_start() -> None:
    """PromQL sees no increase from a missing value, so what an alert counts must exist at zero."""
    shown = {
        (sample.name, label, value)
        for family in Instruments().registry.collect()
        for sample in family.samples
        for label, value in sample.labels.items()
    }
    for rule in rules():
        for name, selector in _SELECTOR.findall(rule["expr"]):
            for label, _, wanted in _LABEL.findall(selector):
                if label in ("kind", "phase"):
                    assert (name, label, wanted) in shown, f"{rule['alert']}: {name}{{{label}={wanted!r}}}"


def test_every_alert_says_what_it_is_and_the_documentation_what_to_do() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    documented = re.findall(r"^#### (Varuna\w+)$", text, re.MULTILINE)
    names = [rule["alert"] for rule in rules()]
    assert documented == names, "docs/operations.md explains each alert, in the order of the rules"
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        for place in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
            assert place in rule["expr"] or place in ("instance", "job_name"), f"{rule['alert']}: no label {place}"


def test_the_rules_pass_their_own_tests() -> None:
    """promtool runs the tests where it is installed; this test only checks that they cover every alert."""
    promtool = shutil.which("promtool")
    if promtool is not None:
        run(promtool, "test", "rules", str(MONITORING / "varuna-alerts-test.yaml"))
    tests = yaml.safe_load((MONITORING / "varuna-alerts-test.yaml").read_text())
    (firing,) = tests["tests"][-1]["promql_expr_test"]
    assert firing["exp_samples"][0]["value"] == len(rules()) - 1, "another rule needs another line in that test"


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) <= variables
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


# ---------------------------------------------------------------- docker, systemd, scripts


@pytest.mark.processes
def test_the_dockerfiles_pass_hadolint() -> None:
    run(str(PROGRAMS / "hadolint"), *(str(path) for path in sorted((ROOT / "docker").glob("*.Dockerfile"))))


@pytest.mark.processes
def test_the_compose_file_is_one() -> None:
    command = (str(PROGRAMS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    run(*command, str(ROOT / "docker" / "compose.yaml"))


@pytest.mark.processes
def test_the_scripts_pass_shellcheck() -> None:
    scripts = sorted((ROOT / "deploy").rglob("*.sh"))
    assert len(scripts) >= 2
    run(str(PROGRAMS / "shellcheck"), *map(str, scripts))


@pytest.mark.processes
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_the_units_start_what_there_is(path: Path, tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    program, command, *flags = unit["Service"]["ExecStart"].split()
    assert program == "/opt/varuna/bin/varuna"
    usage = run(str(PROGRAMS / "varuna"), command, "--help")
    for flag in flags:
        if flag.startswith("--"):
            assert flag in usage, f"{path.name}: varuna {command} has no {flag}"
    assert unit["Service"]["Restart"] in ("always", "on-failure")
    documentation = Path(unit["Unit"]["Documentation"].removeprefix("file:///opt/varuna/share/doc/varuna/"))
    assert (ROOT / "docs" / documentation).exists()
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        # It looks for the program where the unit has it.
        verified = tmp_path / path.name
        verified.write_text(path.read_text().replace(program, "/bin/true"))
        assert run(analyze, "verify", "--man=no", str(verified)) == ""


def test_the_units_run_nothing_as_root_but_the_agent() -> None:
    by_name = {path.stem: path.read_text() for path in UNITS}
    assert "\nUser=varuna\n" in by_name["varuna-manager"]
    assert "\nNoNewPrivileges=yes\n" in by_name["varuna-manager"]
    assert "\nCapabilityBoundingSet=\n" in by_name["varuna-manager"]
    assert re.search(r"^CapabilityBoundingSet=(?!.*SYS_ADMIN).+$", by_name["varuna-agent"], re.MULTILINE)


def test_the_agents_unit_lets_it_hold_jobs_in_groups_below_its_own_and_end_them_first() -> None:
    unit = (ROOT / "deploy" / "systemd" / "varuna-agent.service").read_text()
    assert "\nDelegate=cpu memory pids\n" in unit
    assert "ProtectControlGroups=yes" not in unit
    assert re.search(r"^CapabilityBoundingSet=.*CAP_SYS_RESOURCE", unit, re.MULTILINE), "or jobs lower their score"
    score = re.search(r"^OOMScoreAdjust=(-\d+)$", unit, re.MULTILINE)
    assert score is not None
    assert int(score[1]) < OOM_SCORE
