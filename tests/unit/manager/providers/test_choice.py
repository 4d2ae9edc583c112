"""`--provider KIND:FILE` finds a provider of any installed package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from varuna_manager.providers.base import Provider
from varuna_manager.providers.choice import (
    check_choice,
    find_kind,
    get_agent_start,
    get_request_timeout_s,
    has_local_vms,
    make_provider,
)
from varuna_manager.providers.kind import AgentStart, ProviderContext
from varuna_manager.providers.static import StaticProvider, read_hosts
from varuna_manager.settings import ManagerSettings

MODULE = """
from varuna_manager.providers.kind import AgentStart, ProviderKind
from varuna_manager.providers.static import KIND as STATIC
from varuna_manager.providers.static import StaticProvider, read_hosts

def make(hosts, context):
    made = StaticProvider(hosts, 0.0)
    made.context = context
    return made

KIND = ProviderKind(
    read_settings=read_hosts,
    make_provider=make,
    agents=AgentStart.INSTALLED,
    argument="RACK.yaml",
    request_timeout_s=7.0,
)
TEXT = "no kind"
"""


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, package: str, *lines: str) -> None:
        """A package whose entry points of the group are these lines."""
        info = self._folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[varuna_manager.providers]", *lines]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "their_rack.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "their_rack", raising=False)
    return Site(folder)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "rack.yaml"
    path.write_text("hosts: [{name: gpu-1}]\n")
    return path


def test_a_package_of_others_brings_a_provider(site: Site, hosts: Path) -> None:
    site.install("their-package", "rack = their_rack:KIND")
    chosen = f"rack:{hosts}"
    assert check_choice(chosen) == chosen
    assert not has_local_vms(chosen)
    assert get_agent_start(chosen) is AgentStart.INSTALLED
    context = ProviderContext(needs_prices=True)
    made: Provider = make_provider(chosen, context)
    assert isinstance(made, StaticProvider)
    assert vars(made)["context"] is context
    with pytest.raises(ValueError, match=r"local, replay:TRACE\.csv, azure:SETTINGS\.yaml,.* rack:RACK\.yaml"):
        check_choice("cloud:x")


def test_a_kind_has_a_request_timeout_of_its_own_unless_one_is_given(site: Site, hosts: Path) -> None:
    site.install("their-package", "rack = their_rack:KIND")
    assert get_request_timeout_s(f"rack:{hosts}") == 7.0
    assert ManagerSettings(provider=f"rack:{hosts}").make_rules().request_timeout_s == 7.0
    given = ManagerSettings(provider=f"rack:{hosts}", request_timeout_s=3.0)
    assert given.make_rules().request_timeout_s == 3.0
    plain = ManagerSettings().make_rules().request_timeout_s
    assert ManagerSettings(provider=f"static:{hosts}").make_rules().request_timeout_s == plain


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rack = their_rack:MISSING", r"'rack' of their-package cannot be loaded \(AttributeError: .*MISSING"),
        ("rack = no_such_module:KIND", r"\(ModuleNotFoundError: .*no_such_module.*: repair or uninstall their-package"),
        ("rack = their_rack:TEXT", "'rack' of their-package cannot be used: their_rack:TEXT is a str and not a Prov"),
    ],
)
def test_an_entry_point_that_does_not_work_is_refused_in_one_line(
    site: Site, hosts: Path, line: str, message: str
) -> None:
    site.install("their-package", line)
    with pytest.raises(ValueError, match=message) as raised:
        check_choice(f"rack:{hosts}")
    assert "\n" not in str(raised.value)
    assert check_choice(f"static:{hosts}")
    with pytest.raises(ValueError, match=r"^expected local") as raised:
        check_choice("cloud:x")
    assert "rack" not in str(raised.value)


def test_two_packages_with_one_name_are_told_to_the_operator(site: Site, hosts: Path) -> None:
    site.install("their-package", "rack = their_rack:KIND")
    site.install("other-package", "rack = their_rack:KIND")
    with pytest.raises(ValueError, match="other-package and their-package both have a provider 'rack': uninstall one"):
        find_kind("rack")


def test_no_package_takes_the_place_of_local_and_replay(site: Site, hosts: Path) -> None:
    site.install("their-package", "local = their_rack:KIND", "replay = their_rack:KIND")
    with pytest.raises(ValueError, match="expected local"):
        check_choice(f"local:{hosts}")
    with pytest.raises(ValueError, match=r"rack\.yaml, line 1"):
        check_choice(f"replay:{hosts}")


@pytest.mark.parametrize("chosen", ["static", "static:", "azure", "replay:", ":", ""])
def test_a_choice_without_its_file_is_refused(chosen: str) -> None:
    with pytest.raises(ValueError, match=r"^expected local, replay"):
        check_choice(chosen)


def test_a_list_of_hosts_with_values_that_yaml_cannot_make_is_named(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: [{name: a, gpus: 2026-13-45}]\n")
    with pytest.raises(ValueError, match=r"^list of hosts .*hosts\.yaml is not YAML \(month must be in 1\.\.12"):
        read_hosts(hosts)
