"""The wheel, and the script that puts the agent on hosts, as far as that goes without a registry and an ssh server.

With both, in an empty environment: `make soak-install`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cryptography.x509 import load_pem_x509_certificate

from repository import ROOT
from secure_world import SecureManager
from varuna_manager.access.authority import make_pin
from varuna_manager.providers.static import read_hosts
from waiting import DEADLINE_S

pytestmark = pytest.mark.slow


INSTALL = ROOT / "deploy" / "hosts" / "install.sh"
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=DEADLINE_S)
    (found,) = folder.glob("varuna_spot-*.whl")
    return found


def test_the_wheel_holds_all_that_the_packages_hold(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = ("proto/varuna_proto", "varuna_runtime/varuna_planner", "varuna_runtime/varuna", "agent/varuna_agent")
    for folder in (*folders, "manager/varuna_manager", "manager/varuna_client"):
        top = (ROOT / folder).parent
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith((".nbi", ".nbc")):
                assert str(path.relative_to(top)) in names, f"{path} is not in the wheel"
    share = next(name for name in names if ".data/data/share/" in name).partition("share/")[0] + "share/"
    for source, target in (("docs", "doc/varuna"), ("deploy/monitoring", "varuna/monitoring")):
        for path in (ROOT / source).rglob("*"):
            if path.is_file():
                assert f"{share}{target}/{path.relative_to(ROOT / source)}" in names
    assert f"{share}varuna/systemd/varuna-agent.service" in names
    tops = {name.partition("/")[0] for name in names if ".data/" not in name and ".dist-info/" not in name}
    assert tops == {"varuna_proto", "varuna_planner", "varuna", "varuna_agent", "varuna_manager", "varuna_client"}


def install(*arguments: str, manager: SecureManager | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    if manager is not None:
        environment |= {"VARUNA_MANAGER_URL": manager.url, "VARUNA_CA": str(manager.ca_file)}
        environment["VARUNA_TOKEN_FILE"] = str(manager.data_dir / "admin-token")
    return subprocess.run(
        [str(INSTALL), *arguments], env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


def test_the_list_of_hosts_is_what_the_manager_reads(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.txt"
    inventory.write_text("# mine\n\none root@10.0.0.1 --gpus 8 --device cuda\ntwo  me@two.example.com\n")
    answer = install("--list", str(inventory))
    assert answer.returncode == 0, answer.stderr
    (tmp_path / "hosts.yaml").write_text(answer.stdout)
    hosts = read_hosts(tmp_path / "hosts.yaml")
    assert [(host.name, host.gpus) for host in hosts] == [("one", 8), ("two", 1)]
    example = install("--list", str(INSTALL.parent / "hosts.example.txt"))
    assert example.stdout.count("gpus: 8") == 2


@pytest.mark.parametrize(
    ("line", "arguments", "problem"),
    [
        ("", [], "there is no host in it"),
        ("one", [], "has no ssh destination"),
        ("one -oProxyCommand=x", [], "is not an ssh destination"),
        ("one host --gpus $(reboot)", [], "contain a character that no option has"),
        ("../one host", [], "a host's name is"),
        ("one host\none other", [], "occurs twice"),
        ("one host", ["--wheel", "nowhere.whl"], "there is no wheel"),
        ("one host", ["--start", "cron"], "systemd, process or none"),
        ("one host", ["--prefix", "/x"], "--prefix goes with"),
        ("one host", ["--colour"], "is not an option"),
        ("one host", ["--manager"], "needs a value"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path: Path, line: str, arguments: list[str], problem: str) -> None:
    inventory = tmp_path / "hosts.txt"
    inventory.write_text(f"{line}\n")
    answer = install("--manager", "m:8751", str(inventory), *arguments)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert problem in answer.stderr


VARUNA = """#!/usr/bin/env python3
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
vm = json.loads((folder / "vm.json").read_text())
with (folder / "log").open("a") as log:
    if sys.argv[1] == "vms":
        vm["asked"] = vm.get("asked", 0) + 1
        if vm["asked"] in vm.get("unanswered", []):
            (folder / "vm.json").write_text(json.dumps(vm))
            sys.exit("varuna: the manager does not answer")
        print(json.dumps([vm]))
        if vm["state"] == "draining" and vm["workers"]:
            vm["workers"].pop()
    else:
        print(" ".join(sys.argv[1:]), len(vm["workers"]), file=log)
    if sys.argv[1] == "drain":
        vm |= {"state": "draining", "cordoned_at": "now"}
(folder / "vm.json").write_text(json.dumps(vm))
"""
SSH = """#!/bin/sh
case $2 in
*setup.sh*)
    start=$(tar -xOf - ./settings | grep ^start=)
    echo "setup $start" >>{folder}/log
    [ "$start" = start=none ] || sed -i s/draining/ready/ {folder}/vm.json ;;
esac
"""


def upgrade(tmp_path: Path, **state: object) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Upgrade a host with two workers; returns also what was done to it. `state`: more of its VM."""
    (tmp_path / "bin").mkdir()
    folder = tmp_path / "bin"
    for name, text in (("varuna", VARUNA), ("ssh", SSH.replace("{folder}", str(folder)))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    vm = {"id": "one", "state": "ready", "workers": [1, 2], "last_heard_s": 0.1, **state}
    (folder / "vm.json").write_text(json.dumps(vm))
    (tmp_path / "hosts.txt").write_text("one me@nowhere\n")
    (tmp_path / "varuna_spot-1.whl").write_text("")
    options = ["--manager", "m:1", "--wheel", str(tmp_path / "varuna_spot-1.whl"), "--drain-deadline", "30"]
    answer = subprocess.run(
        [str(INSTALL), *options, "--ssh", str(folder / "ssh"), str(tmp_path / "hosts.txt")],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    log = folder / "log"
    return answer, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("unanswered", [(), (2, 3), (5,)])
@pytest.mark.parametrize("cordoned_at", [None, "yesterday"])
def test_an_upgrade_drains_the_host_and_leaves_its_cordon_as_it_was(
    tmp_path: Path, cordoned_at: str | None, unanswered: tuple[int, ...]
) -> None:
    """`unanswered`: which of its questions the manager does not answer."""
    answer, log = upgrade(tmp_path, cordoned_at=cordoned_at, unanswered=unanswered)
    assert answer.returncode == 0, answer.stderr
    expected = ["setup start=none", "drain one --deadline 30 2", "setup start=systemd"]
    assert log == [*expected, *(["uncordon one 0"] if cordoned_at is None else [])]


def test_a_host_whose_jobs_nobody_knows_is_left_as_it_is(tmp_path: Path) -> None:
    answer, log = upgrade(tmp_path, unanswered=[1])
    assert (answer.returncode, log) == (1, [])
    assert answer.stderr.splitlines()[-1] == "one: it is left as it is: the manager does not answer"


def test_a_host_gets_the_wheel_a_token_of_its_own_and_the_unit(
    wheel: Path, tmp_path: Path, secure: SecureManager
) -> None:
    """`ssh` is a shell with an empty environment, and pip may fetch nothing: what the wheel needs stays away."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nshift\nexec env -i PATH=/usr/bin:/bin HOME={tmp_path} sh -c "$*"\n')
    ssh.chmod(0o755)
    prefix = tmp_path / "host"
    inventory = tmp_path / "hosts.txt"
    inventory.write_text("local-1 me@nowhere --gpus 2\n")
    options = ["--manager", secure.grpc, "--wheel", str(wheel), "--extras", "", "--pip", "--no-index --no-deps"]
    options += ["--python", sys.executable, "--ssh", str(ssh), "--prefix", str(prefix), "--start", "none"]
    answer = install(*options, str(inventory), manager=secure)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    etc = prefix / "etc" / "varuna"
    token = (etc / "join-token").read_text()
    assert {(etc / name).stat().st_mode & 0o777 for name in ("agent.env", "join-token")} == {0o600}
    assert token not in answer.stdout + answer.stderr
    certificate = load_pem_x509_certificate(secure.authority().ca_pem)
    assert make_pin(certificate) in token, "the host trusts this authority only"
    flags = (etc / "agent.env").read_text()
    assert flags.startswith(f'VARUNA_AGENT_FLAGS="--manager {secure.grpc} --vm-id local-1 --join-token-file {etc}')
    assert "--gpus 2" in flags
    version = (prefix / "opt" / "varuna").resolve()
    assert (version / "bin" / "varuna").exists()
    assert (version / "share" / "doc" / "varuna" / "operations.md").exists()
    assert list(version.glob("lib/python3*/site-packages/varuna_agent"))

    (prefix / "var/lib/varuna-agent/identity").mkdir(parents=True)
    (prefix / "var/lib/varuna-agent/identity/identity.json").write_text("{}")  # it has joined
    other = tmp_path / "newer"
    other.mkdir()
    (other / wheel.name).write_bytes(wheel.read_bytes())

    def install_copy(constraints: str) -> str:
        (other / "constraints.txt").write_text(constraints)
        found = hashlib.sha256(wheel.read_bytes() + constraints.encode()).hexdigest()[:12]
        copied = prefix / "opt" / f"varuna-{found}"
        if not copied.exists():
            shutil.copytree(version, copied, symlinks=True)  # as if it were installed: that is slow
        again = install(*options, "--wheel", str(other / wheel.name), str(inventory), manager=secure)
        assert again.returncode == 0, again.stdout + again.stderr
        return found

    for _ in range(2):  # as an upgrade does it
        newer = install_copy("# another version of what it needs\n")
    assert (prefix / "opt" / "varuna").resolve().name == f"varuna-{newer}"
    assert (version / "bin" / "varuna").exists(), "the version before stays: workers may still run on it"
    assert (etc / "join-token").read_text() == token, "a host that has joined needs no other token"

    # Not started since, so that an agent of the first version still runs: it has to find all its files.
    agent = subprocess.Popen([str(version / "bin" / "python"), "-c", "import time; time.sleep(1000)"])
    try:
        install_copy("# a third one\n")
        assert (version / "bin" / "varuna").exists()
        assert (prefix / "opt" / f"varuna-{newer}").exists(), "the previous version"
    finally:
        agent.kill()
        agent.wait()
    install_copy("# a third one\n")
    assert not version.exists()
