"""What jobs may name as their secrets, and what the manager reads for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from decision_views import decide, devices, job, vm
from varuna_manager.domain.spec import JobSpec
from varuna_manager.jobs.secrets import MOST_BYTES, SecretError, Secrets
from varuna_manager.providers.choice import check_choice
from varuna_manager.settings import ManagerSettings

SPEC = {"name": "gpt", "workdir": "/w", "run": "true", "global_batch": 8}
VALUE = "s3cr3t-value"


def secrets(folder: Path, **environ: str) -> Secrets:
    return Secrets.of_manager(folder, environ)


def test_secrets_are_files_of_one_folder_and_variables_of_one_prefix(tmp_path: Path) -> None:
    (tmp_path / "hf-token").write_text(f"{VALUE}\n")
    found = secrets(tmp_path, VARUNA_MANAGER_SECRET_KEY="k", VARUNA_MANAGER_DATABASE_URL="postgresql://")
    assert found.read_values({"A": "file:hf-token", "B": "env:KEY"}) == {"A": VALUE, "B": "k"}
    assert found.explain_missing({"A": "file:hf-token"}) == found.explain_missing({}) == ""
    (tmp_path / "hf-token").write_text("rotated")
    assert found.read_values({"A": "file:hf-token"}) == {"A": "rotated"}


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("file:none", "'file:none': .*none of the manager cannot be read .No such file"),
        ("file:folder", "Is a directory"),
        ("file:large", f"larger than {MOST_BYTES} bytes"),
        ("file:binary", "is not text"),
        ("file:nul", "is not text"),
        ("env:DATABASE_URL", "no variable VARUNA_MANAGER_SECRET_DATABASE_URL"),
        ("env:PATH", "no variable VARUNA_MANAGER_SECRET_PATH"),
        ("vault:key", "this manager reads no vault: its operator starts it with --secrets-vault"),
        ("cloud:key", "this manager knows file, env, vault"),
    ],
)
def test_what_is_no_secret_is_told_without_its_value(tmp_path: Path, reference: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_text(VALUE * MOST_BYTES)
    (tmp_path / "binary").write_bytes(VALUE.encode() + b"\xff")
    (tmp_path / "nul").write_bytes(VALUE.encode() + b"\0")
    found = secrets(tmp_path, PATH="/bin", VARUNA_MANAGER_DATABASE_URL="postgresql://")
    with pytest.raises(SecretError, match=words) as raised:
        found.read_values({"A": reference})
    assert VALUE not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"A": VALUE},
        {"A": "file:../pki/ca.key"},
        {"A": "file:/etc/passwd"},
        {"A": "file:.."},
        {"A": "file:"},
        {"A": "file:a\n"},
        {"A": "env:A=B"},
        {"A": "https://vault/x"},
        {"A": "vault:a/../b"},
        {"A": "vault:a.b"},
        {"A": "vault:a_b"},
        {"A": "vault:a\n"},
        {"A": "vault:"},
        {"A B": "file:a"},
        {"": "file:a"},
        {"A=": "file:a"},
        {"A\0": "file:a"},
        {"VARUNA_RANK": "file:a"},
        {"OWN": "file:a"},  # in env too
    ],
)
def test_a_spec_names_only_what_an_operator_can_have_laid_out(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate({**SPEC, "env": {"OWN": "1"}, "secrets": wrong})
    assert VALUE not in str(raised.value.errors()[0]["msg"])
    right = {"A": "file:a", "_B1": "env:HF_TOKEN", "C": "vault:a-1"}
    JobSpec.model_validate({**SPEC, "env": {"OWN": "1"}, "secrets": right})


def test_a_job_waits_while_a_secret_of_it_cannot_be_read() -> None:
    waiting = decide(job(missing_secret="secret 'file:hf': gone", devices=devices("a")), vm("a"))
    assert not waiting.actions
    assert "secret 'file:hf': gone" in waiting.reason


@pytest.mark.parametrize(
    "url",
    [
        "kv",
        "http://kv.vault.azure.net",  # the manager's token would go over the network as it is
        "https://",
        "https://kv.vault.azure.net/secrets/x",
        "https://kv.vault.azure.net?x=1",
        "https://user:pass@kv.vault.azure.net",
    ],
)
def test_a_vault_is_named_by_its_address_alone(url: str) -> None:
    with pytest.raises(ValidationError, match=r"expected https://NAME\.vault\.azure\.net"):
        ManagerSettings(secrets_vault=url)
    assert ManagerSettings(secrets_vault="https://kv.vault.azure.net/").secrets_vault == "https://kv.vault.azure.net"


@pytest.mark.parametrize("missing", ["azure", "azure.keyvault", "azure.identity", "aiohttp"])
def test_a_manager_without_azures_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without(missing, sys.meta_path)])
    with pytest.raises(ValidationError, match=r"not installed: pip install 'varuna-spot\[azure\]'"):
        ManagerSettings(secrets_vault="https://kv.vault.azure.net")
    if missing == "azure":
        with pytest.raises(ValueError, match=r"not installed: pip install 'varuna-spot\[azure\]'"):
            check_choice("azure:settings.yaml")


class _Without:
    """Finds the module nowhere, as where it is not installed."""

    def __init__(self, missing: str, finders: Sequence[Any]) -> None:
        self._missing = missing
        self._finders = tuple(finders)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == self._missing:
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self._finders)), None)

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        for finder in self._finders:
            yield from getattr(finder, "find_distributions", lambda *context: ())(*context)
