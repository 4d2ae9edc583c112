"""Secrets of jobs in an Azure Key Vault: Azure's own client against a small vault, and a manager that reads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError

from fake_vault import FakeVault, StaticCredential, fake_vault, vault_of
from repository import WORKERS
from scripted_manager import ScriptedManager
from varuna_manager.jobs import secrets as secrets_module
from varuna_manager.jobs.secrets import MOST_BYTES, SecretAwayError, SecretError, Secrets
from varuna_manager.jobs.vault import FRESH_S, KEEP_S, PAUSE_S, VaultSecrets, open_vault
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S, until

VALUE = "of-the-vault-zebra-sesame"
REFERENCES = {"TOKEN": "vault:hf-token"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVault]:
    with fake_vault(tmp_path) as vault:
        vault.secrets = {"hf-token": VALUE}
        yield vault


@asynccontextmanager
async def reading(server: FakeVault, **options: Any) -> AsyncIterator[tuple[VaultSecrets, Clock]]:
    clock = Clock()
    source = vault_of(server.url, server.ca_file, now=clock, **{"timeout_s": DEADLINE_S, **options})
    try:
        yield source, clock
    finally:
        await source.close()


async def ask(source: VaultSecrets, name: str = "hf-token") -> None:
    """Carry out the request that is due, to its end."""
    request = source.prefetch_secret(name)
    assert request is not None, "no request is due"
    await request


async def test_reading_waits_for_nothing_and_asks_the_vault_once_in_a_while(server: FakeVault) -> None:
    async with reading(server) as (source, clock):
        with pytest.raises(SecretAwayError, match=r"127\.0\.0\.1:[0-9]+ is being asked for it"):
            source.read("hf-token")
        await ask(source)
        assert source.read("hf-token") == VALUE.encode()
        assert source.prefetch_secret("hf-token") is None, "what is fresh is not asked for"
        clock.now += FRESH_S
        server.secrets["hf-token"] = "rotated"
        assert source.read("hf-token") == VALUE.encode(), "until the vault has answered"
        await ask(source)
        assert source.read("hf-token") == b"rotated"
        assert server.requests == ["hf-token"] * 2
        assert None not in server.versions


async def test_a_secret_that_the_vault_does_not_have_is_asked_for_again_later(server: FakeVault) -> None:
    async with reading(server) as (source, clock):
        await ask(source, "other")
        with pytest.raises(SecretError, match="has no secret of this name: ask the manager's operator") as raised:
            source.read("other")
        assert not isinstance(raised.value, SecretAwayError)
        assert source.prefetch_secret("other") is None
        server.secrets["other"] = "there now"
        clock.now += PAUSE_S
        with pytest.raises(SecretError, match="has no secret"):  # one reason until there is another
            source.read("other")
        await ask(source, "other")
        assert source.read("other") == b"there now"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ForbiddenByRbac", r"\(403, ForbiddenByRbac\): give its identity the role Key Vault Secrets User"),
        ("SecretDisabled", "the secret is disabled"),
        ("ForbiddenByFirewall", "through the vault's firewall"),
        ("no word\n", r"to the manager \(403\): give its identity"),
    ],
)
async def test_a_vault_that_refuses_a_secret_ends_its_use_at_once(server: FakeVault, code: str, words: str) -> None:
    async with reading(server) as (source, clock):
        await ask(source)
        server.refuses = code
        clock.now += FRESH_S
        await ask(source)
        with pytest.raises(SecretError, match=words) as raised:
            source.read("hf-token")
        assert not isinstance(raised.value, SecretAwayError)
        assert "appid" not in str(raised.value), "users do not learn who the manager is"
        assert len(str(raised.value).splitlines()) == 1
        server.refuses = ""
        clock.now += PAUSE_S
        await ask(source)
        assert source.read("hf-token") == VALUE.encode()


def slow(server: FakeVault) -> None:
    server.is_slow = True


def broken(server: FakeVault) -> None:
    server.status = 503


def garbled(server: FakeVault) -> None:
    server.body = f'{{"value": "{VALUE}", '.encode()


@pytest.mark.parametrize(
    ("harm", "timeout_s", "words"),
    [
        (slow, 2.0, "does not answer within 2 s"),
        (broken, DEADLINE_S, "answers with status 503 and no secret"),
        (garbled, DEADLINE_S, "answers with status 200 and no secret"),
    ],
)
async def test_launches_go_on_for_some_minutes_while_the_vault_is_away(
    server: FakeVault,
    capfd: pytest.CaptureFixture[str],
    harm: Callable[[FakeVault], None],
    timeout_s: float,
    words: str,
) -> None:
    async with reading(server, timeout_s=timeout_s) as (source, clock):
        while request := source.prefetch_secret("hf-token"):  # 2 s may be short on a machine that does much else
            await request
            clock.now += PAUSE_S
        harm(server)
        clock.now += FRESH_S
        await ask(source)
        assert source.read("hf-token") == VALUE.encode()
        assert source.prefetch_secret("other") is None, "the vault is left alone for a while, whatever is wanted of it"
        clock.now += KEEP_S - FRESH_S
        with pytest.raises(SecretAwayError, match=words) as raised:
            source.read("hf-token")
        assert VALUE not in str(raised.value)
    assert VALUE not in "".join(capfd.readouterr())


async def test_a_vault_that_cannot_be_reached_makes_a_launch_wait(server: FakeVault) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        source = vault_of(f"https://127.0.0.1:{nobody.getsockname()[1]}", server.ca_file, timeout_s=DEADLINE_S)
        await ask(source)
        with pytest.raises(SecretAwayError, match=r"127\.0\.0\.1:[0-9]+ cannot be asked \(\w+\)"):
            source.read("hf-token")
        await source.close()


async def test_a_vault_that_asks_for_patience_is_left_alone_for_so_long(server: FakeVault) -> None:
    async with reading(server) as (source, clock):
        server.status, server.retry_after = 429, "60"
        await ask(source)
        assert server.requests == ["hf-token"], "the client makes no retries of its own"
        clock.now += 59
        assert source.prefetch_secret("hf-token") is None
        with pytest.raises(SecretAwayError, match="status 429"):
            source.read("hf-token")
        server.status = 200
        clock.now += 1
        await ask(source)
        assert source.read("hf-token") == VALUE.encode()


class NoIdentity(StaticCredential):
    async def get_token(self, *scopes: str, **options: Any) -> Any:
        raise ClientAuthenticationError("DefaultAzureCredential failed\nAttempted credentials: none")


async def test_a_manager_without_an_identity_waits_and_logs_why(
    server: FakeVault, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reading(server, credential=NoIdentity()) as (source, clock):
        await ask(source)
        clock.now += PAUSE_S
        with pytest.raises(
            SecretAwayError, match=r"no identity that 127\.0\.0\.1:[0-9]+ accepts: its log has the details"
        ):
            source.read("hf-token")
        await ask(source)
    assert capsys.readouterr().out.count("DefaultAzureCredential failed Attempted credentials: none") == 1


class AnyIdentity(StaticCredential):
    asked = 0

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        self.asked += 1
        return await super().get_token(*scopes, **options)


async def test_the_identitys_token_is_for_azures_vaults_only(server: FakeVault) -> None:
    identity = AnyIdentity()
    async with reading(server, credential=identity, verify_challenge_resource=True) as (source, _):
        await ask(source)
        with pytest.raises(SecretAwayError, match="cannot be asked"):
            source.read("hf-token")
    assert (identity.asked, server.requests) == (0, [])
    await open_vault("https://kv.vault.azure.net").close()  # which is made so


async def test_no_value_is_kept_for_longer_than_it_may_be_used(server: FakeVault) -> None:
    source = vault_of(server.url, server.ca_file, keep_s=0.01, timeout_s=DEADLINE_S)
    await ask(source)
    await until(lambda: not source._values, "the value to be forgotten, though nobody asks for it")
    await source.close()


async def test_a_new_job_waits_for_the_vaults_answer_and_is_refused_only_for_what_will_not_change(
    server: FakeVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets_module, "SUBMISSION_WAIT_S", DEADLINE_S)
    server.secrets |= {"large": "x" * (MOST_BYTES + 1), "empty": None}
    async with reading(server) as (source, _):
        secrets = Secrets({"vault": source})
        assert await secrets.explain_refusal({**REFERENCES, "B": "vault:hf-token"}) == ""
        assert server.requests == ["hf-token"]
        assert secrets.read_values(REFERENCES) == {"TOKEN": VALUE}
        assert "'vault:none': 127.0.0.1" in await secrets.explain_refusal({**REFERENCES, "B": "vault:none"})
        assert f"larger than {MOST_BYTES} bytes" in await secrets.explain_refusal({"A": "vault:large"})
        assert "has no value" in await secrets.explain_refusal({"A": "vault:empty"})
        server.status = 500
        assert await secrets.explain_refusal({"A": "vault:new"}) == ""
        assert "answers with status 500" in secrets.explain_missing({"A": "vault:new"})


async def test_many_names_are_asked_for_a_few_at_a_time_and_not_at_all_once_the_vault_is_away(
    server: FakeVault,
) -> None:
    server.status = 500
    async with reading(server) as (source, _):
        requests = [source.prefetch_secret(f"name-{number}") for number in range(50)]
        await asyncio.gather(*filter(None, requests))
        assert 1 <= len(server.requests) <= 8


@pytest.mark.slow
async def test_a_managers_jobs_have_the_vaults_secrets_which_go_nowhere_else(
    manager: ScriptedManager, server: FakeVault
) -> None:
    manager.program = (str(WORKERS / "manager_on_fake_vault.py"), str(server.ca_file))
    await manager.start("--vms", "1", "--secrets-vault", server.url, "--log-level", "debug")
    spec = {"name": "train", "workdir": "/tmp", "run": "true", "global_batch": 8}
    refused = await manager.rest.post("jobs", json={**spec, "secrets": {"A": "vault:none"}})
    assert (refused.status_code, "has no secret of this name" in refused.json()["detail"]) == (422, True)

    server.status = 503
    await manager.submit(secrets={**REFERENCES, "LATER": "vault:later"})
    (agent,) = await manager.connect_vms(1)

    def reason_has(words: str) -> Callable[[], Any]:
        async def has() -> bool:
            return words in ((await manager.get("jobs/train"))["reason"] or "")

        return has

    await until(reason_has("secret 'vault:hf-token': 127.0.0.1"), "the job to wait for the vault")
    assert not agent.commands("launch")
    server.status = 200
    await until(reason_has("secret 'vault:later'"), "the job to wait for a secret that is not there")
    server.secrets["later"] = f"later-{VALUE}"
    first = await agent.launch(1)
    assert first.secrets == {"TOKEN": VALUE, "LATER": f"later-{VALUE}"}

    server.is_slow = True  # the next launch uses what has been read
    agent.exited(first, pb.EXIT_CAUSE_KILLED)
    again = await agent.launch(2)
    assert again.secrets == first.secrets

    shown = [m.SerializeToString() for m in agent.received if m.WhichOneof("body") != "launch"]
    for path in ("jobs", "events?limit=10000", "vms", "jobs/train/generations", "../../metrics"):
        shown.append((await manager.rest.get(path)).content)
    shown += [path.read_bytes() for path in manager.data_dir.rglob("*") if path.is_file()]
    log = (manager.data_dir.parent / "manager.log").read_bytes()
    assert b"the vault is away" in log
    assert b"the vault answers again" in log
    assert not [text for text in (*shown, log) if b"zebra-sesame" in text or b"a-token-of" in text]
