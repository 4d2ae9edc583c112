"""What a person reads who starts a manager in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varuna_client.rest.client import DEFAULT_URL
from varuna_manager.server.texts import render_welcome
from varuna_manager.settings import ManagerSettings

DATA = Path("/data")


def test_the_first_line_says_where_the_dashboard_is_and_what_comes_next() -> None:
    assert render_welcome(ManagerSettings(), DEFAULT_URL, DATA, ends_vms=True) == (
        "dashboard: http://127.0.0.1:8750/ - next, in another terminal: varuna submit JOB.yaml - "
        "Ctrl-C ends this manager and its local VMs"
    )


def test_the_client_is_told_what_it_does_not_find_by_itself() -> None:
    elsewhere = render_welcome(ManagerSettings(), "http://127.0.0.1:9000", DATA, ends_vms=False)
    assert "terminal: export VARUNA_MANAGER_URL=http://127.0.0.1:9000; varuna submit JOB.yaml - " in elsewhere
    assert elsewhere.endswith("Ctrl-C ends this manager and leaves its VMs running")
    secure = render_welcome(ManagerSettings(secure=True), "https://127.0.0.1:8750", DATA, ends_vms=True)
    assert (
        "export VARUNA_MANAGER_URL=https://127.0.0.1:8750 VARUNA_CA=/data/pki/ca.pem "
        "VARUNA_TOKEN_FILE=/data/admin-token; varuna submit JOB.yaml"
    ) in secure


def test_checkpoints_are_in_the_data_directory_only_where_all_find_them(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts:\n  - name: a\n")

    def find_root(*, is_shared: bool = False, **settings: Any) -> tuple[str | None, str]:
        given = ManagerSettings(**settings)
        root = given.checkpoint_root(Path("/data"), is_shared=is_shared)
        return root, given.explain_no_checkpoint_root(is_shared=is_shared)

    assert find_root() == ("file:///data/checkpoints", "")
    assert find_root(is_shared=True) == (None, "another one may lead later")
    assert find_root(provider=f"static:{hosts}") == (None, "its VMs are other machines")
    given = "file:///shared"
    assert find_root(is_shared=True, provider=f"static:{hosts}", default_checkpoint_url="/shared") == (given, "")


def test_only_a_single_managers_local_vms_end_with_it(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts:\n  - name: a\n")

    def ends(*, is_interrupt: bool = True, is_shared: bool = False, **settings: Any) -> bool:
        return ManagerSettings(**settings).ends_vms(is_interrupt=is_interrupt, is_shared=is_shared)

    assert ends()
    assert not ends(is_interrupt=False)
    assert not ends(is_shared=True)
    assert not ends(keep_vms=True)
    assert ends(keep_vms=False, is_interrupt=False)
    assert not ends(keep_vms=False, provider=f"static:{hosts}")
