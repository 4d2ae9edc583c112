"""The Terraform description and the cloud-init documents of a fleet on Azure, as far as they can be checked offline."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import jsonschema
import pytest
import yaml

from repository import ROOT
from varuna_manager.providers.azure_kind import describe_machine
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize
from varuna_manager.providers.boot import render_cloud_init
from varuna_manager.providers.kind import Origin
from varuna_manager.settings import ManagerSettings

DEPLOY = ROOT / "deploy" / "azure"
TEMPLATE = DEPLOY / "manager-cloud-init.yaml.tftpl"
SCHEMA = json.loads((ROOT / "tests" / "data" / "cloud-config.schema.json").read_text())
SIZE = AzureSize(name="Standard_NC24ads_A100_v4", gpus=2, device_memory_gib=80)
SETTINGS = AzureSettings(
    subscription_id="s",
    resource_group="g",
    location="westeurope",
    sizes=(SIZE,),
    image="Canonical:ubuntu-24_04-lts:server:latest",
    subnet_id="/subnets/vms",
    ssh_public_key="ssh-ed25519 AAAA",
)
MACHINE = describe_machine(SETTINGS, "varuna-r-000", SIZE)
ORIGIN = Origin(
    managers="10.20.0.10:8751,10.20.0.11:8751",
    urls=("https://10.20.0.10:8750", "https://10.20.0.11:8750"),
    ca_pem="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
)
TOKEN = f"vj1.abc.secret.{'0' * 64}"
MOST_CUSTOM_DATA = 64 * 1024


def check_cloud_config(text: str) -> dict[str, Any]:
    """The document, which is valid by cloud-init's own schema."""
    assert text.startswith("#cloud-config\n")
    document: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(document, SCHEMA)
    known = {name for part in SCHEMA["$defs"].values() for name in part.get("properties", {})}
    assert not document.keys() - known
    assert len(base64.b64encode(text.encode())) <= MOST_CUSTOM_DATA
    return document


def files_of(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Content and mode by path."""
    found = {}
    for file in document["write_files"]:
        content = file["content"]
        if file.get("encoding") == "b64":
            content = base64.b64decode(content).decode()
        found[file["path"]] = (content, file["permissions"])
    return found


def check_shell(text: str) -> None:
    checker = str(Path(sys.executable).with_name("shellcheck"))
    checked = subprocess.run([checker, "-"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


# ---------------------------------------------------------------- a spot VM


@pytest.mark.processes
def test_a_spot_vms_document_is_valid_and_keeps_its_token_to_root() -> None:
    document = check_cloud_config(render_cloud_init(ORIGIN, MACHINE, TOKEN))
    files = files_of(document)
    assert files["/etc/varuna/join-token"] == (f"{TOKEN}\n", "0600")
    assert [path for path, (content, _) in files.items() if TOKEN in content] == ["/etc/varuna/join-token"]
    assert files["/etc/varuna/ca.pem"] == (ORIGIN.ca_pem, "0644")
    assert (
        files["/etc/systemd/system/varuna-agent.service"][0]
        == (ROOT / "deploy" / "systemd" / "varuna-agent.service").read_text()
    )
    script, mode = files["/usr/local/sbin/varuna-install-agent"]
    assert mode == "0755"
    check_shell(script)
    assert document["runcmd"] == [["/usr/local/sbin/varuna-install-agent"]]


def test_the_agents_flags_are_those_that_the_agent_knows() -> None:
    from varuna_agent.main import _make_parser

    files = files_of(yaml.safe_load(render_cloud_init(ORIGIN, MACHINE, TOKEN)))
    name, _, flags = files["/etc/varuna/agent.env"][0].strip().partition("=")
    assert name == "VARUNA_AGENT_FLAGS"
    assert f"${name}" in files["/etc/systemd/system/varuna-agent.service"][0]
    options = _make_parser().parse_args(["--vm-dir", "/var/lib/varuna-agent", *flags.split()])
    assert (options.vm_id, options.host, options.notices, options.device) == ("varuna-r-000", "auto", "azure", "cuda")
    assert (options.gpus, options.device_memory_bytes) == (2, 80 << 30)
    assert options.manager == ORIGIN.managers
    assert options.join_url == "https://10.20.0.10:8750,https://10.20.0.11:8750"
    assert options.join_token_file == Path("/etc/varuna/join-token")
    assert options.join_ca is None


def test_a_manager_with_a_certificate_that_everybody_knows_is_asked_with_the_images_trust_store() -> None:
    public = Origin(managers="m.example.com:8751", urls=("https://m.example.com:8750",), ca_pem=None)
    files = files_of(yaml.safe_load(render_cloud_init(public, MACHINE, TOKEN)))
    assert "/etc/varuna/ca.pem" not in files
    assert "--join-ca=/etc/ssl/certs/ca-certificates.crt" in files["/etc/varuna/agent.env"][0]
    assert "CA_FILE=''" in files["/etc/varuna/install.env"][0]


# ---------------------------------------------------------------- Terraform


@cache
def loaded() -> dict[str, list[Any]]:
    """All blocks of the description, by kind. To parse them takes more than a second."""
    blocks: dict[str, list[Any]] = {}
    for path in sorted(DEPLOY.glob("*.tf")):
        for kind, found in hcl2.loads(path.read_text()).items():
            blocks.setdefault(kind, []).extend(found)
    return blocks


def plain(name: str) -> str:
    return name.strip('"')


def names(blocks: list[Any]) -> set[str]:
    return {plain(name) for block in blocks for name in block}


def full_names(blocks: list[Any]) -> set[str]:
    return {f"{plain(kind)}.{plain(name)}" for block in blocks for kind, named in block.items() for name in named}


def whole_text() -> str:
    """Without comments."""
    text = "\n".join(path.read_text() for path in sorted(DEPLOY.glob("*.tf")))
    return re.sub(r"(^|\s)#.*", "", text)


def test_everything_that_the_description_refers_to_exists() -> None:
    blocks, text = loaded(), whole_text()
    variables = set(re.findall(r"\bvar\.(\w+)", text))
    assert variables == names(blocks["variable"]), "a variable is not there, or nobody asks for it"
    declared = {plain(name) for block in blocks["locals"] for name in block if not name.startswith("__")}
    assert set(re.findall(r"\blocal\.(\w+)", text)) == declared
    assert set(re.findall(r"\bdata\.(\w+\.\w+)", text)) == full_names(blocks["data"])
    resources = full_names(blocks["resource"])
    referred = set(re.findall(r"(?<!data\.)\b((?:azurerm|random)_\w+\.\w+)", text))
    assert referred <= resources, referred - resources
    for path in re.findall(r'\$\{path\.module\}/([^"]+)"', text):
        assert (DEPLOY / path).is_file(), path


def test_every_variable_says_what_it_is() -> None:
    for block in loaded()["variable"]:
        for name, body in block.items():
            assert body.get("description"), name


@pytest.mark.long
def test_the_fleets_role_can_do_nothing_beyond_its_vms() -> None:
    (role,) = [
        block['"azurerm_role_definition"']['"fleet"']
        for block in loaded()["resource"]
        if '"azurerm_role_definition"' in block
    ]
    actions = {plain(action) for action in role["permissions"][0]["actions"]}
    assert not [action for action in actions if "*" in action]
    assert not [action for action in actions if action.startswith("Microsoft.Authorization/")]
    assert "Microsoft.Compute/virtualMachines/simulateEviction/action" in actions


def test_the_manager_reads_the_subscription_only_where_somebody_says_so() -> None:
    (grant,) = [
        block['"azurerm_role_assignment"']['"eviction_rates"']
        for block in loaded()["resource"]
        if '"eviction_rates"' in block.get('"azurerm_role_assignment"', {})
    ]
    assert plain(grant["role_definition_name"]) == "Reader"
    assert "var.read_subscription" in grant["count"]
    (variable,) = [block for block in loaded()["variable"] if '"read_subscription"' in block]
    assert variable['"read_subscription"']["default"] is False


def test_the_manager_reads_a_vaults_secrets_only_where_somebody_names_the_vault() -> None:
    (grant,) = [
        block['"azurerm_role_assignment"']['"secrets"']
        for block in loaded()["resource"]
        if '"secrets"' in block.get('"azurerm_role_assignment"', {})
    ]
    assert plain(grant["role_definition_name"]) == "Key Vault Secrets User"
    assert "var.secrets_vault_id == null ? 0 : 1" in grant["count"]
    assert grant["scope"] == "${var.secrets_vault_id}"
    (variable,) = [block for block in loaded()["variable"] if '"secrets_vault_id"' in block]
    assert variable['"secrets_vault_id"']["default"] in (None, "null")


def rendered_manager(*, secrets_vault: str = "") -> str:
    """The template, as Terraform's templatefile fills it in: it has no directives."""
    template = TEMPLATE.read_text()
    assert "%{" not in template
    call = re.search(r"templatefile\(.*?\.tftpl\", \{\n(.*?)\n  \}\)\)", (DEPLOY / "main.tf").read_text(), re.DOTALL)
    assert call is not None
    given = set(re.findall(r"^    (\w+) += ", call.group(1), re.MULTILINE))
    assert set(re.findall(r"\$\{(\w+)\}", template)) == given
    settings = SETTINGS.model_dump_json()
    values = {
        "service": base64.b64encode((ROOT / "deploy/systemd/varuna-manager.service").read_bytes()).decode(),
        "install": base64.b64encode((DEPLOY / "varuna-install.sh").read_bytes()).decode(),
        "azure_settings": base64.b64encode(settings.encode()).decode(),
        "client_id": "00000000-0000-0000-0000-000000000000",
        "private_ip": "10.20.0.10",
        "public_ip": "203.0.113.7",
        "secrets_vault": secrets_vault,
        "max_vms": "8",
        "max_cost_per_hour": "12.5",
        "checkpoint_url": "abfss://checkpoints@account.dfs.core.windows.net/jobs",
    }
    return re.sub(r"\$\{(\w+)\}", lambda found: values[found.group(1)], template)


@pytest.mark.processes
@pytest.mark.parametrize("secrets_vault", ["", "https://training-jobs.vault.azure.net"])
def test_the_managers_document_is_valid_and_its_settings_are_the_managers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secrets_vault: str
) -> None:
    files = files_of(check_cloud_config(rendered_manager(secrets_vault=secrets_vault)))
    check_shell(files["/usr/local/sbin/varuna-install"][0])
    (tmp_path / "azure.yaml").write_text(files["/etc/varuna/azure.yaml"][0])
    environment = dict(line.split("=", 1) for line in files["/etc/varuna/manager.env"][0].splitlines())
    prefix = "VARUNA_MANAGER_"
    given = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}
    assert given.keys() <= ManagerSettings.model_fields.keys()
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("/etc/varuna/", f"{tmp_path}/"))
    settings = ManagerSettings()
    assert settings.is_secure
    assert settings.provider == f"azure:{tmp_path}/azure.yaml"
    assert settings.secrets_vault == secrets_vault
    assert (settings.max_vms, settings.max_cost_per_hour) == (8, 12.5)
    assert settings.make_rules().request_timeout_s == 1200.0
    unit = files["/etc/systemd/system/varuna-manager.service"][0]
    assert "EnvironmentFile=-/etc/varuna/manager.env" in unit


def test_the_settings_that_terraform_writes_are_those_of_the_provider() -> None:
    call = re.search(r"yamlencode\(\{\n(.*?)\n    \}\)\)", (DEPLOY / "main.tf").read_text(), re.DOTALL)
    assert call is not None
    written = set(re.findall(r"^      (\w+) += ", call.group(1), re.MULTILINE))
    assert written <= AzureSettings.model_fields.keys()
    required = {name for name, field in AzureSettings.model_fields.items() if field.is_required()}
    assert required <= written
    sizes = re.search(r'variable "sizes" \{.*?object\(\{(.*?)\}\)\)', (DEPLOY / "variables.tf").read_text(), re.DOTALL)
    assert sizes is not None
    assert set(re.findall(r"^ +(\w+) += ", sizes.group(1), re.MULTILINE)) == AzureSize.model_fields.keys()
