"""Two secure managers on one PostgreSQL: the other one honours what the first one signed when it leads.

They share the authority (`--pki-dir`) and the store, which has tokens, enrolments and revocations. Real agents join
through the first; it is killed; they come back to the second with the certificates that they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from sqlalchemy import update

from left_vms import kill_left_vms
from own_ports import own_ports
from secure_world import Certified, Key, SecureManager, secure_manager
from varuna_manager.access.authority import AgentSubject, read_agent_subject
from varuna_manager.db.engine import Database
from varuna_manager.db.models import LeadershipRow
from waiting import wait_until

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.slow]


@contextlib.contextmanager
def two_managers(folder: Path, database_url: str) -> Iterator[tuple[SecureManager, SecureManager]]:
    """(the leader, the other). Whichever leads starts two local VMs, with real agents.

    However slow this machine is, the leader renews its lease in time; `lapse` ends that of one that is dead.
    """
    ports = own_ports(2)
    shared = [
        *("--database-url", database_url, "--pki-dir", str(folder / "pki"), "--local-dir", str(folder / "local")),
        *("--managers", ",".join(f"127.0.0.1:{port}" for port in ports), "--leader-lease-s", "600", "--vms", "2"),
        *("--default-checkpoint-url", str(folder / "checkpoints")),
        *("--suspect-after-s", "3600", "--lost-after-s", "3600"),  # however long this machine stands still
    ]
    first, second = (["--grpc-port", str(port)] for port in ports)
    with (
        secure_manager(folder / "first", *shared, *first, pki_dir=folder / "pki") as leader,
        secure_manager(folder / "second", *shared, *second, pki_dir=folder / "pki", stands_by=True) as other,
    ):
        try:
            yield leader, other
        finally:
            other.process.kill()  # so that no VM that ends here is replaced
            kill_left_vms(folder / "local" / "vms")


def lapse(database_url: str) -> None:
    """End the lease now."""

    async def end() -> None:
        database = Database(database_url)
        async with database.write() as session:
            await session.execute(update(LeadershipRow).values(expires_at=0.0))
        await database.close()

    asyncio.run(end())


def test_tokens_certificates_and_vms_outlive_the_leader(tmp_path: Path, postgres_url: str) -> None:
    with two_managers(tmp_path, postgres_url) as (leader, other):
        admin = leader.admin_token
        assert leader.authority().ca_pem == other.authority().ca_pem
        assert not (other.data_dir / "admin-token").exists(), "there is one first token, not one for each manager"
        wait_until(lambda: states(leader, admin) == ["ready", "ready"], "two VMs")
        before = agents(tmp_path)

        user = leader.token(name="ann", role="user")
        revoked = leader.token(name="bob", role="admin")
        assert leader.admin().delete("/tokens/bob").status_code == 200
        used, unused = (leader.token(name=name, join=True) for name in ("used", "unused"))
        key, other_vm = Key(), vm_ids(leader, admin)[0]
        joined = Certified(key, certificate_of(leader.join(used, "elsewhere", key)), leader.authority().ca_pem)
        outcast = Certified(key, certificate_of(leader.join(token_for(leader, "outcast"), "outcast", key)), joined.ca)
        assert leader.admin().post("/vms/outcast/revoke").status_code == 200
        while_standing_by(other, admin, unused)

        leader.process.kill()
        leader.process.wait()
        lapse(postgres_url)
        other.wait_until_leading()

        # The VMs: the same agents, never started again, on new streams that their certificates opened.
        wait_until(lambda: all_heard(other, admin), "both VMs to come back")
        assert agents(tmp_path) == before
        wait_until(lambda: states(other, admin) == ["ready", "ready"], "both VMs to be ready")

        # REST tokens.
        assert other.client(user).get("/jobs").status_code == 200
        assert other.client(user).put("/fleet", json={"target": 5}).status_code == 403
        refused = other.client(revoked).get("/jobs")
        assert (refused.status_code, "was revoked" in refused.text) == (401, True)

        # Join tokens: one that was used is used, even for another VM; its own agent may ask again; the other is good.
        again = other.join(used, "yet-another", Key())
        assert (again.status_code, "was used before" in again.text) == (401, True)
        repeated = certificate_of(other.join(used, "elsewhere", key))
        assert read_agent_subject(repeated) == read_agent_subject(joined.certificate)
        assert other.join(unused, "new", Key()).status_code == 200
        assert other.join(unused, "newer", Key()).status_code == 401

        # Certificates: renewed by the other authority's twin; revoked stays revoked; a forged enrolment is none.
        renewed = other.renewed(joined)
        assert read_agent_subject(renewed.certificate) == read_agent_subject(joined.certificate)
        with pytest.raises(grpc.RpcError, match="were revoked"):
            other.renewed(outcast)
        assert "were revoked" in other.hello("outcast", outcast.credentials())
        forged = other.certified(AgentSubject(other_vm, "no such enrolment"))
        assert "was replaced by a later joining" in other.hello(other_vm, forged.credentials())

        # The one that led comes back, and stands by with the same authority.
        leader.start_again(stands_by=True)
        answer = leader.client(user).put("/fleet", json={"target": 2})
        assert answer.status_code == 503
        assert answer.json()["leader"] == other.url
        assert leader.client(user).get("/jobs").status_code == 200


def while_standing_by(other: SecureManager, admin: str, unused: str) -> None:
    """It reads tokens, and signs no certificate."""
    assert other.client(admin).get("/vms").status_code == 200
    assert other.client("vt1.0.0").get("/vms").status_code == 401
    joining = other.join(unused, "new", Key())
    assert joining.status_code == 503, "so the token is still good"
    refusal = other.hello("local-1", other.certified(AgentSubject("local-1", "any")).credentials())
    assert "does not lead" in refusal


def token_for(manager: SecureManager, vm_id: str) -> str:
    return manager.token(name=f"of-{vm_id}", join=True, vm_id=vm_id)


def certificate_of(answer: httpx.Response) -> bytes:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["certificate"]).encode()


def all_vms(manager: SecureManager, token: str) -> list[dict[str, Any]]:
    client = manager.client(token)

    def answered() -> httpx.Response | None:
        answer = client.get("/vms", params={"gone": False})
        assert answer.status_code in (200, 503), answer.text
        return answer if answer.status_code == 200 else None

    vms: list[dict[str, Any]] = wait_until(answered, "the VMs").json()
    return vms


def vm_ids(manager: SecureManager, token: str) -> list[str]:
    return [vm["id"] for vm in all_vms(manager, token)]


def states(manager: SecureManager, token: str) -> list[str]:
    return [vm["state"] for vm in all_vms(manager, token)]


def all_heard(manager: SecureManager, token: str) -> bool:
    vms = all_vms(manager, token)
    return len(vms) == 2 and all(vm["last_heard_s"] is not None for vm in vms)


def agents(folder: Path) -> dict[str, int]:
    """The agents' processes, by VM."""
    return {file.parent.name: json.loads(file.read_text())["pid"] for file in (folder / "local").rglob("vm.json")}
