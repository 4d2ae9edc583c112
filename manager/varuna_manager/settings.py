"""The manager's settings: flags beat environment variables VARUNA_MANAGER_*, which beat the defaults here."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from varuna_manager.domain.observed import Rules
from varuna_manager.domain.retention import KeepDays
from varuna_manager.domain.webhooks import WEBHOOK_EVENTS, WebhookTarget
from varuna_manager.extras import check_extra
from varuna_manager.providers.choice import check_choice, get_request_timeout_s, has_local_vms
from varuna_manager.providers.kind import CLOUD_REQUEST_TIMEOUT_S
from varuna_manager.providers.replay import ReplaySettings
from varuna_proto.hosts import Network, is_loopback, networks

_SHORTEST_SECRET = 16


class ManagerSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VARUNA_MANAGER_", frozen=True, extra="forbid")

    data_dir: Path = Field(
        default=Path("varuna-data"), description="folder of the store, of local VMs and of checkpoints without a URL"
    )
    database_url: str | None = Field(
        default=None, description="sqlite:///... or postgresql://...; default: SQLite in data_dir"
    )
    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; any but a loopback address requires tokens and certificates (as --secure)",
    )
    secure: bool = Field(
        default=False, description="require tokens and certificates on a loopback address too; elsewhere always"
    )
    secrets_dir: Path | None = Field(
        default=None,
        description="folder of the files that jobs may name as their secrets; default: secrets in data_dir",
    )
    secrets_vault: str = Field(
        default="",
        description="https://NAME.vault.azure.net, the Azure Key Vault whose secrets jobs may name; default: none",
    )
    pki_dir: Path | None = Field(
        default=None,
        description="folder of the certificate authority's key and certificate, which several managers share; "
        "default: pki in data_dir",
    )
    server_names: str = Field(
        default="", description="further names and addresses for this manager's certificate, separated by commas"
    )
    tls_cert: Path | None = Field(
        default=None,
        description="certificate for REST (PEM, with its chain); default: one that the manager's authority signs",
    )
    tls_key: Path | None = Field(
        default=None, validate_default=True, description="the key of --tls-cert (PEM, no passphrase)"
    )
    trusted_proxies: str = Field(
        default="",
        description="addresses and networks of the reverse proxies before this manager, separated by commas; it takes "
        "a caller's address (X-Forwarded-For) only from them",
    )
    connections_per_address: int = Field(
        default=200,
        ge=1,
        description="most connections from one address to REST and the dashboard; trusted proxies have no limit",
    )
    agent_certificate_ttl_s: float = Field(
        default=7 * 86_400.0, ge=1, description="lifetime of an agent's certificate; the agent renews it in time"
    )
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024, description="largest body of a REST request")
    changes_per_s: float = Field(
        default=20.0,
        gt=0,
        description="most requests per second of one token that change something; a burst may use those of 5 s",
    )
    http_port: int = Field(
        default=8750, ge=0, le=65535, description="port of REST and the dashboard; 0: a free one, kept over restarts"
    )
    grpc_port: int = Field(
        default=8751, ge=0, le=65535, description="port for agents; 0: a free one, kept over restarts"
    )
    profile_cache_url: str | None = Field(
        default=None,
        description="folder or object store of profiles, so that no model is measured twice on the same hardware; "
        "'': none; default: profiles in data_dir",
    )
    default_checkpoint_url: str | None = Field(
        default=None,
        description="folder or object store for the checkpoints of jobs that name none, which all VMs and managers "
        "reach; default: checkpoints in data_dir with local VMs and one manager, else none: such jobs are refused",
    )
    leader_lease_s: float = Field(
        default=10.0,
        gt=0,
        description="with several managers on one PostgreSQL: silence of the leader after which another one takes over",
    )
    advertise_host: str | None = Field(
        default=None, description="name or address at which users and agents reach this manager; default: host"
    )
    managers: str | None = Field(
        default=None,
        description="host:port for agents of every manager, separated by commas; agents that this manager starts dial "
        "them; default: this manager's",
    )
    local_dir: Path | None = Field(
        default=None,
        description="folder of the local VMs, which managers on one machine may share; default: in data_dir",
    )
    provider: str = Field(
        default="local",
        description="where VMs come from: local, replay:TRACE.csv, or KIND:FILE, such as static:HOSTS.yaml or "
        "azure:SETTINGS.yaml",
    )
    replay_speed: float = Field(
        default=ReplaySettings.speed, gt=0, description="seconds of the trace that pass in one second"
    )
    replay_notice_s: float = Field(
        default=ReplaySettings.notice_s, ge=0, description="notice before the trace takes a VM; 0: none"
    )
    replay_start_s: float = Field(
        default=ReplaySettings.start_s, ge=0, description="where to start, in seconds from the trace's beginning"
    )
    replay_loop: bool = Field(default=ReplaySettings.loop, description="start again at the end of the trace")
    agent_wheel: Path | None = Field(
        default=None,
        description="varuna's wheel for new VMs, or a folder (make wheel) whose newest one is used; "
        "constraints.txt beside it pins its dependencies",
    )
    vms: int | None = Field(
        default=None, ge=0, description="number of VMs to keep; default: as at the last start, at first 0"
    )
    min_vms: int | None = Field(default=None, ge=0, description="with --max-vms: VMs to keep when no job needs them")
    max_vms: int | None = Field(default=None, ge=0, description="keep as many VMs as the jobs want, at most this many")
    max_cost_per_hour: float | None = Field(
        default=None,
        gt=0,
        description="limit on the cost of all VMs, in the provider's currency, where it has prices; default: none",
    )
    spare_after_s: float = Field(
        default=300.0, ge=0, description="with --max-vms: how long to keep a VM that no job needs"
    )
    capacity: int | None = Field(
        default=None, ge=0, description="VMs that the emulated market grants at first; default: any number"
    )
    gpus_per_vm: int = Field(default=1, ge=1, description="devices of a local VM")
    device_memory_bytes: int = Field(default=2 * 1024**3, ge=1, description="memory of each device of a local VM")
    agent_command: tuple[str, ...] | None = Field(
        default=None,
        description="JSON list: the command that starts an agent on this machine; default: this Python's varuna_agent",
    )
    keep_vms: bool | None = Field(
        default=None,
        description="whether local VMs stay when the manager is stopped, for the next manager on the same data_dir; "
        "default: they end with Ctrl-C (SIGINT) and stay with SIGTERM, with which services are stopped and restarted",
    )
    heartbeat_interval_s: float = Field(
        default=Rules.heartbeat_interval_s, gt=0, description="time between two heartbeats of an agent"
    )
    suspect_after_s: float = Field(
        default=Rules.suspect_after_s, gt=0, description="silence after which nothing new is launched on a VM"
    )
    lost_after_s: float = Field(
        default=Rules.lost_after_s, gt=0, description="silence after which a VM's workers are given up"
    )
    lease_s: float = Field(
        default=Rules.lease_s, gt=0, description="silence of the manager after which an agent ends its workers"
    )
    request_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="longest time from a VM's request to its agent's first message; "
        f"default: {Rules.request_timeout_s:g}, for a cloud's VMs {CLOUD_REQUEST_TIMEOUT_S:g}",
    )
    growth_settle_s: float = Field(
        default=Rules.growth_settle_s, ge=0, description="age that new devices must reach before a job grows into them"
    )
    growth_prepare_s: float = Field(
        default=Rules.growth_prepare_s,
        ge=0,
        description="longest further wait for their agents to prepare the job's workers",
    )
    newcomers_wait_s: float = Field(
        default=Rules.newcomers_wait_s,
        ge=0,
        description="longest time that a planned morph waits for the processes that are started ahead for it; 0: it "
        "starts them after the old ones have stopped",
    )
    start_settle_s: float = Field(
        default=Rules.start_settle_s, ge=0, description="longest wait of a new job for VMs that are on their way"
    )
    first_step_timeout_s: float = Field(
        default=Rules.first_step_timeout_s,
        gt=0,
        description="longest time from a generation's launch to its first step",
    )
    hang_minimum_s: float = Field(
        default=Rules.hang_minimum_s, gt=0, description="shortest time without a step that counts as a hang"
    )
    slow_threshold: float = Field(
        default=Rules.slow_threshold,
        gt=0,
        description="a VM is slow when it takes longer than its peers for the same work by this fraction",
    )
    slow_looks: int = Field(
        default=Rules.slow_looks, ge=1, description="checks in a row, 5 s apart, that must find a VM slow"
    )
    storm_losses: int = Field(
        default=Rules.storm_losses,
        ge=1,
        description="VMs lost within a minute that make a storm; jobs then keep their shape unless they must change it",
    )
    quarantine_s: float = Field(
        default=Rules.quarantine_s, gt=0, description="how long a slow VM is quarantined for the first time"
    )
    reconcile_interval_s: float = Field(
        default=0.5, gt=0, description="time between two rounds of decisions when nothing happens"
    )
    keep_events_days: float = Field(
        default=KeepDays.events, ge=0, description="how long to keep events; 0, here and below: for ever"
    )
    keep_jobs_days: float = Field(
        default=KeepDays.jobs,
        ge=0,
        description="how long to keep a job that is over, with its steps, generations and events",
    )
    keep_vms_days: float = Field(
        default=KeepDays.vms,
        ge=0,
        description="how long to keep a VM that is gone; one that trained for a job is kept as long as the job",
    )
    keep_archives_days: float = Field(
        default=KeepDays.archives,
        ge=0,
        description="how long to keep the packed workdir of a job that is over, for varuna retry",
    )
    keep_logs_days: float = Field(
        default=KeepDays.logs,
        ge=0,
        description="how long to keep logs of local VMs that are gone, stacks, traces, and plans that were not chosen",
    )
    keep_tokens_days: float = Field(
        default=KeepDays.tokens,
        ge=0,
        description="how long to keep a token that is used up, revoked or expired",
    )
    webhook_url: str | None = Field(
        default=None, description="where to send the events of --webhook-events, as signed JSON; default: nowhere"
    )
    webhook_secret_file: Path | None = Field(
        default=None,
        validate_default=True,
        description="file with the key of the signatures: 16 characters or more, in one line",
    )
    webhook_events: str = Field(
        default=",".join(WEBHOOK_EVENTS), description="kinds of events for --webhook-url, separated by commas"
    )
    log_level: str = Field(default="info", description="debug, info, warning or error")
    log_format: str = Field(
        default="auto",
        description="format of the log on standard error: json (one object per line), text (to read), or auto: text on "
        "a terminal, else json",
    )

    @field_validator("provider")
    @classmethod
    def _check_provider(cls, provider: str) -> str:
        return check_choice(provider)

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, text: str) -> str:
        networks(text)
        return text

    @field_validator("secrets_vault")
    @classmethod
    def _check_vault(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme != "https" or url.rstrip("/") != f"https://{parts.netloc}" or "@" in parts.netloc):
            raise ValueError("expected https://NAME.vault.azure.net")
        if url:
            check_extra("azure", "Azure's SDK", "aiohttp", "azure.identity", "azure.keyvault.secrets")
        return url.rstrip("/")

    @field_validator("max_vms")
    @classmethod
    def _check_max_vms(cls, max_vms: int | None, given: ValidationInfo) -> int | None:
        if max_vms is not None and given.data.get("vms") is not None:
            raise ValueError("--vms N is a fixed number, --max-vms follows the jobs: give one of them")
        if max_vms is not None and max_vms < (given.data.get("min_vms") or 0):
            raise ValueError(f"it is below --min-vms {given.data['min_vms']}: raise it")
        return max_vms

    def make_replay_settings(self) -> ReplaySettings:
        return ReplaySettings(**{each.name: getattr(self, f"replay_{each.name}") for each in fields(ReplaySettings)})

    @field_validator("tls_key")
    @classmethod
    def _check_tls_key(cls, key: Path | None, given: ValidationInfo) -> Path | None:
        if (key is None) != (given.data.get("tls_cert") is None):
            raise ValueError("a certificate needs its key: give both --tls-cert and --tls-key, or neither")
        return key

    @field_validator("webhook_url")
    @classmethod
    def _check_webhook_url(cls, url: str | None) -> str | None:
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise ValueError("expected http://HOST/... or https://HOST/...")
        return url

    @field_validator("webhook_secret_file")
    @classmethod
    def _check_webhook_secret(cls, path: Path | None, given: ValidationInfo) -> Path | None:
        if given.data.get("webhook_url") is not None:
            _read_webhook_secret(path)
        return path

    @field_validator("webhook_events")
    @classmethod
    def _check_webhook_events(cls, names: str) -> str:
        unknown = _split_names(names) - WEBHOOK_EVENTS.keys()
        if unknown or not _split_names(names):
            raise ValueError(f"{names!r}: expected some of {', '.join(WEBHOOK_EVENTS)}, separated by commas")
        return names

    def make_webhook_target(self) -> WebhookTarget | None:
        """Where events are sent; None: nowhere."""
        if self.webhook_url is None:
            return None
        secret = _read_webhook_secret(self.webhook_secret_file)
        return WebhookTarget(url=self.webhook_url, secret=secret, names=_split_names(self.webhook_events))

    @property
    def logs_text(self) -> bool:
        """Whether people read the log."""
        return self.log_format == "text" or (self.log_format == "auto" and sys.stderr.isatty())

    @property
    def is_secure(self) -> bool:
        """Whether agents need certificates and users tokens."""
        return self.secure or not is_loopback(self.host)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """The addresses and networks of `trusted_proxies`."""
        return networks(self.trusted_proxies)

    @property
    def names(self) -> list[str]:
        """Names and addresses of this manager, apart from `host`."""
        given = [self.advertise_host or "", *self.server_names.split(",")]
        return [name.strip() for name in given if name.strip()]

    @field_validator("log_level")
    @classmethod
    def _check_log_level(cls, level: str) -> str:
        if level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"{level!r} is none of debug, info, warning, error")
        return level

    @field_validator("log_format")
    @classmethod
    def _check_log_format(cls, log_format: str) -> str:
        if log_format not in ("auto", "json", "text"):
            raise ValueError(f"{log_format!r} is none of auto, json, text")
        return log_format

    def profile_cache(self, data_dir: Path) -> str:
        """The URL of the profile cache; empty: there is none."""
        url = str(data_dir / "profiles") if self.profile_cache_url is None else self.profile_cache_url
        return _as_url(url) if url else ""

    def checkpoint_root(self, data_dir: Path, *, is_shared: bool) -> str | None:
        """The URL below which jobs that name no URL have their checkpoints; None: there is no such place.

        `is_shared`: as for `explain_no_checkpoint_root`.
        """
        if self.default_checkpoint_url is not None:
            return _as_url(self.default_checkpoint_url)
        return None if self.explain_no_checkpoint_root(is_shared=is_shared) else _as_url(str(data_dir / "checkpoints"))

    def explain_no_checkpoint_root(self, *, is_shared: bool) -> str:
        """Why a folder in data_dir is no place for checkpoints, where no URL is set; empty: it is one.

        `is_shared`: several managers share the store.
        """
        if self.default_checkpoint_url is not None:
            return ""
        if is_shared:
            return "another one may lead later"
        return "" if has_local_vms(self.provider) else "its VMs are other machines"

    def ends_vms(self, *, is_interrupt: bool, is_shared: bool) -> bool:
        """Whether the local VMs end with the manager at a stop signal.

        `is_interrupt`: it is SIGINT. `is_shared`: several managers share the store, so that another takes the VMs over.
        """
        if not has_local_vms(self.provider):
            return False
        return is_interrupt and not is_shared if self.keep_vms is None else not self.keep_vms

    def make_keep_days(self) -> KeepDays:
        return KeepDays(**{each.name: getattr(self, f"keep_{each.name}_days") for each in fields(KeepDays)})

    def make_rules(self) -> Rules:
        """The thresholds of the decisions: those that are settings, and the defaults of the others."""
        names = [each.name for each in fields(Rules) if each.name in type(self).model_fields]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        timeout_s = get_request_timeout_s(self.provider)
        if timeout_s is not None:
            given.setdefault("request_timeout_s", timeout_s)
        return Rules(**given)


def is_wildcard(host: str) -> bool:
    """Whether the host stands for every address of this machine."""
    return host in ("0.0.0.0", "::")


def _split_names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _read_webhook_secret(path: Path | None) -> bytes:
    """Raises ValueError."""
    if path is None:
        raise ValueError("--webhook-url needs a key for its signatures: give --webhook-secret-file")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"{path} has {len(secret)} characters: put {_SHORTEST_SECRET} or more there")
    return secret


def _as_url(place: str) -> str:
    """A place that is not a URL is a folder, relative to where the manager runs."""
    return place if "://" in place else Path(place).expanduser().absolute().as_uri()
