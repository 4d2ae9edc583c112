"""The manager's settings: flags beat environment variables VARUNA_MANAGER_*, which beat the defaults here."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from varuna_manager.domain.observed import Rules
from varuna_manager.domain.retention import KeepDays
from varuna_manager.domain.webhooks import WEBHOOK_EVENTS, WebhookTarget
from varuna_manager.extras import check_extra
from varuna_manager.providers.chosen import CHOICES, check_choice, is_cloud
from varuna_manager.providers.replay import ReplaySettings
from varuna_proto.hosts import Network, is_loopback, networks

_SHORTEST_SECRET = 16


class ManagerSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VARUNA_MANAGER_", frozen=True, extra="forbid")

    data_dir: Path = Field(default=Path("varuna-data"), description="store, VM folders, checkpoints without a URL")
    database_url: str | None = Field(
        default=None, description="sqlite:///... or postgresql://...; default: SQLite in data_dir"
    )
    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; on any but a loopback one, tokens and certificates are asked for (--secure)",
    )
    secure: bool = Field(
        default=False, description="ask for tokens and certificates on a loopback address too; elsewhere always"
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
        description="the authority's key and certificate; several managers share it; default: pki in data_dir",
    )
    server_names: str = Field(
        default="", description="further names and addresses of this manager for its certificate, separated by commas"
    )
    tls_cert: Path | None = Field(
        default=None, description="your certificate (PEM, with its chain) for REST; default: one of the authority's"
    )
    tls_key: Path | None = Field(
        default=None, validate_default=True, description="the key of --tls-cert (PEM, no passphrase)"
    )
    trusted_proxies: str = Field(
        default="",
        description="addresses and networks of the reverse proxies before this manager, separated by commas; only they "
        "are believed when they say whose call it is (X-Forwarded-For)",
    )
    connections_per_address: int = Field(
        default=200, ge=1, description="connections that one address may hold to REST and dashboard; not a proxy's"
    )
    agent_certificate_ttl_s: float = Field(
        default=7 * 86_400.0, ge=1, description="life of an agent's certificate; the agent renews it in time"
    )
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024, description="of a call of the REST API")
    changes_per_s: float = Field(
        default=20.0, gt=0, description="calls of one token that change something, on the average; 5 s' worth at once"
    )
    http_port: int = Field(default=8750, ge=0, le=65535, description="REST and status page; 0: a free one, kept")
    grpc_port: int = Field(default=8751, ge=0, le=65535, description="agents; 0: a free one, kept over restarts")
    profile_cache_url: str | None = Field(
        default=None,
        description="folder or object store of profiles, so that no model is measured twice on the same hardware; "
        "'' for none; default: profiles in data_dir",
    )
    default_checkpoint_url: str | None = Field(
        default=None,
        description="folder or object store for the checkpoints of jobs that name none; default: a folder in data_dir, "
        "or none where several managers share a store",
    )
    leader_lease_s: float = Field(
        default=10.0, gt=0, description="several managers on PostgreSQL: silence after which another one leads"
    )
    advertise_host: str | None = Field(
        default=None, description="by which users and agents reach this manager; default: host"
    )
    managers: str | None = Field(
        default=None,
        description="host:port of every manager's agent port, separated by commas, for the agents that are started "
        "here; default: this manager's",
    )
    local_dir: Path | None = Field(
        default=None,
        description="folder of the local VMs, which managers on one machine may share; default: in data_dir",
    )
    provider: str = Field(default="local", description=f"where VMs come from: {CHOICES}")
    replay_speed: float = Field(default=1.0, gt=0, description="seconds of the replayed trace per second")
    replay_notice_s: float = Field(default=0.0, ge=0, description="notice before the trace takes a VM; 0: none")
    replay_start_s: float = Field(default=0.0, ge=0, description="where in the trace to start, from its beginning")
    replay_loop: bool = Field(default=False, description="begin the trace again at its end")
    agent_wheel: Path | None = Field(
        default=None,
        description="what new VMs install: varuna's wheel, or a folder whose newest one is taken (make wheel); "
        "constraints.txt beside it pins the rest",
    )
    vms: int | None = Field(default=None, ge=0, description="VMs wanted; default: as before, at first 0")
    min_vms: int | None = Field(default=None, ge=0, description="with --max-vms: VMs that are kept without any job")
    max_vms: int | None = Field(default=None, ge=0, description="as many VMs as the jobs want, at most these")
    max_cost_per_hour: float | None = Field(
        default=None, gt=0, description="of all VMs, where the provider knows prices, in its currency; default: any"
    )
    spare_after_s: float = Field(
        default=300.0, ge=0, description="with --max-vms: how long a VM that no job needs is kept without work"
    )
    capacity: int | None = Field(
        default=None, ge=0, description="VMs that the local market grants at first; default: any"
    )
    gpus_per_vm: int = Field(default=1, ge=1, description="devices of a local VM")
    device_memory_bytes: int = Field(default=2 * 1024**3, ge=1, description="memory of each device of a local VM")
    agent_command: tuple[str, ...] | None = Field(
        default=None, description="JSON list: what starts an agent on this machine; default: this Python's varuna_agent"
    )
    local_ephemeral: bool = Field(default=False, description="end the local VMs when the manager is told to end")
    heartbeat_interval_s: float = Field(default=1.0, gt=0, description="between an agent's heartbeats")
    suspect_after_s: float = Field(default=5.0, gt=0, description="silence after which nothing is launched on a VM")
    lost_after_s: float = Field(default=10.0, gt=0, description="silence after which a VM's workers are given up")
    lease_s: float = Field(default=60.0, gt=0, description="silence after which an agent ends its workers")
    request_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="how long a VM may take from its request to its agent's first word; "
        "default: 120, of a cloud's VMs 1200",
    )
    growth_settle_s: float = Field(
        default=2.0, ge=0, description="how long new devices must have been there to be used"
    )
    growth_prepare_s: float = Field(
        default=30.0, ge=0, description="and how long at most for their agents to prepare for the job's workers"
    )
    start_settle_s: float = Field(default=5.0, ge=0, description="how long a new job waits for VMs on their way")
    first_step_timeout_s: float = Field(default=120.0, gt=0, description="from a launch to its first step")
    hang_minimum_s: float = Field(default=30.0, gt=0, description="time without a step that may be a hang")
    slow_threshold: float = Field(
        default=0.15, gt=0, description="a VM that takes this much longer than its peers for the same work is slow"
    )
    slow_looks: int = Field(default=3, ge=1, description="looks in a row (5 s apart) before a VM counts as slow")
    storm_losses: int = Field(
        default=4, ge=1, description="VMs lost within a minute: no job changes its shape by choice for a while"
    )
    quarantine_s: float = Field(default=600.0, gt=0, description="for how long a slow VM is left alone at first")
    reconcile_interval_s: float = Field(default=0.5, gt=0, description="between looks when nothing rings")
    keep_events_days: float = Field(default=30.0, ge=0, description="how long events are kept; 0: for ever, as below")
    keep_jobs_days: float = Field(
        default=60.0, ge=0, description="how long a job is kept that is over, with its steps, generations and events"
    )
    keep_vms_days: float = Field(
        default=30.0,
        ge=0,
        description="how long a VM is kept that is gone; one that trained for a job, as long as the job",
    )
    keep_archives_days: float = Field(
        default=30.0, ge=0, description="how long a job's packed workdir is kept when it is over: for varuna retry"
    )
    keep_logs_days: float = Field(
        default=7.0,
        ge=0,
        description="how long logs of local VMs that are gone are kept, stacks, traces, and the plans not taken",
    )
    keep_tokens_days: float = Field(
        default=7.0, ge=0, description="how long a token is kept that was used up, revoked, or has expired"
    )
    webhook_url: str | None = Field(
        default=None, description="is sent what --webhook-events names, as signed JSON; default: nobody is told"
    )
    webhook_secret_file: Path | None = Field(
        default=None, validate_default=True, description="the signature's key: 16 characters or more, in one line"
    )
    webhook_events: str = Field(
        default=",".join(WEBHOOK_EVENTS), description="what --webhook-url is told of, separated by commas"
    )
    log_level: str = Field(default="info", description="debug, info, warning or error")
    log_format: str = Field(
        default="json", description="of the log on standard error: json (an object a line) or text (to read)"
    )

    @field_validator("provider")
    @classmethod
    def _known_provider(cls, provider: str) -> str:
        return check_choice(provider)

    @field_validator("trusted_proxies")
    @classmethod
    def _known_proxies(cls, text: str) -> str:
        networks(text)
        return text

    @field_validator("secrets_vault")
    @classmethod
    def _readable_vault(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme != "https" or url.rstrip("/") != f"https://{parts.netloc}" or "@" in parts.netloc):
            raise ValueError("expected https://NAME.vault.azure.net")
        if url:
            check_extra("azure", "Azure's SDK", "aiohttp", "azure.identity", "azure.keyvault.secrets")
        return url.rstrip("/")

    @field_validator("max_vms")
    @classmethod
    def _one_way_to_say_how_many(cls, max_vms: int | None, given: ValidationInfo) -> int | None:
        if max_vms is not None and given.data.get("vms") is not None:
            raise ValueError("--vms N is a fixed number, --max-vms follows the jobs: give one of them")
        if max_vms is not None and max_vms < (given.data.get("min_vms") or 0):
            raise ValueError(f"it is below --min-vms {given.data['min_vms']}: raise it")
        return max_vms

    def replay(self) -> ReplaySettings:
        """How a trace is played."""
        return ReplaySettings(
            speed=self.replay_speed, notice_s=self.replay_notice_s, start_s=self.replay_start_s, loop=self.replay_loop
        )

    @field_validator("tls_key")
    @classmethod
    def _both_or_none(cls, key: Path | None, given: ValidationInfo) -> Path | None:
        if (key is None) != (given.data.get("tls_cert") is None):
            raise ValueError("a certificate needs its key: give both --tls-cert and --tls-key, or neither")
        return key

    @field_validator("webhook_url")
    @classmethod
    def _web_address(cls, url: str | None) -> str | None:
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise ValueError("expected http://HOST/... or https://HOST/...")
        return url

    @field_validator("webhook_secret_file")
    @classmethod
    def _readable_secret(cls, path: Path | None, given: ValidationInfo) -> Path | None:
        if given.data.get("webhook_url") is not None:
            _webhook_secret(path)
        return path

    @field_validator("webhook_events")
    @classmethod
    def _known_events(cls, names: str) -> str:
        unknown = _names(names) - WEBHOOK_EVENTS.keys()
        if unknown or not _names(names):
            raise ValueError(f"{names!r}: expected some of {', '.join(WEBHOOK_EVENTS)}, separated by commas")
        return names

    def webhook(self) -> WebhookTarget | None:
        """Who is told of events; None: nobody."""
        if self.webhook_url is None:
            return None
        secret = _webhook_secret(self.webhook_secret_file)
        return WebhookTarget(url=self.webhook_url, secret=secret, names=_names(self.webhook_events))

    @property
    def is_secure(self) -> bool:
        """Whether agents need certificates and users tokens."""
        return self.secure or not is_loopback(self.host)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """What `trusted_proxies` names."""
        return networks(self.trusted_proxies)

    @property
    def names(self) -> list[str]:
        """By which this manager is reached, apart from `host`."""
        given = [self.advertise_host or "", *self.server_names.split(",")]
        return [name.strip() for name in given if name.strip()]

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, level: str) -> str:
        if level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"{level!r} is none of debug, info, warning, error")
        return level

    @field_validator("log_format")
    @classmethod
    def _known_format(cls, log_format: str) -> str:
        if log_format not in ("json", "text"):
            raise ValueError(f"{log_format!r} is neither json nor text")
        return log_format

    def profile_cache(self, data_dir: Path) -> str:
        """The URL of the profile cache; empty: none. What is no URL is a folder, seen from where the manager runs."""
        url = str(data_dir / "profiles") if self.profile_cache_url is None else self.profile_cache_url
        return _as_url(url) if url else ""

    def checkpoint_root(self, data_dir: Path, *, is_shared: bool) -> str | None:
        """The URL below which jobs that name none have their checkpoints.

        None: nowhere, for another manager that shares the store (`is_shared`) would not find them in our data_dir.
        """
        if self.default_checkpoint_url is not None:
            return _as_url(self.default_checkpoint_url)
        return None if is_shared else _as_url(str(data_dir / "checkpoints"))

    def keep_days(self) -> KeepDays:
        """How long what is over is kept."""
        return KeepDays(
            events=self.keep_events_days,
            jobs=self.keep_jobs_days,
            vms=self.keep_vms_days,
            archives=self.keep_archives_days,
            logs=self.keep_logs_days,
            tokens=self.keep_tokens_days,
        )

    def rules(self) -> Rules:
        """The thresholds of the decisions."""
        return Rules(
            heartbeat_interval_s=self.heartbeat_interval_s,
            suspect_after_s=self.suspect_after_s,
            lost_after_s=self.lost_after_s,
            lease_s=self.lease_s,
            request_timeout_s=self.request_timeout_s or (1200.0 if is_cloud(self.provider) else 120.0),
            growth_settle_s=self.growth_settle_s,
            growth_prepare_s=self.growth_prepare_s,
            start_settle_s=self.start_settle_s,
            first_step_timeout_s=self.first_step_timeout_s,
            hang_minimum_s=self.hang_minimum_s,
            slow_threshold=self.slow_threshold,
            slow_looks=self.slow_looks,
            storm_losses=self.storm_losses,
            quarantine_s=self.quarantine_s,
        )


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of this machine."""
    return host in ("0.0.0.0", "::")


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _webhook_secret(path: Path | None) -> bytes:
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
    """What is no URL is a folder, seen from where the manager runs."""
    return place if "://" in place else Path(place).expanduser().absolute().as_uri()
