"""Which tokens give access to what, how often a caller may try, and what the audit log has of it."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import psutil
import pytest

from secure_world import Key, SecureManager
from varuna_client import Client, RefusedError, UnreachableError
from varuna_client.errors import TlsError
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("secure")  # one manager for all
SPEC = {"name": "train", "workdir": "/tmp", "run": "true", "global_batch": 8}


@pytest.fixture
def manager(secure: SecureManager) -> SecureManager:
    return secure


def detail(answer: httpx.Response) -> str:
    return str(answer.json()["detail"])


def test_nothing_but_health_the_page_and_joining_is_open(manager: SecureManager) -> None:
    nobody = manager.client()
    for path in ("/jobs", "/vms", "/fleet", "/events", "/events/stream", "/tokens", "/audit"):
        answer = nobody.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "set VARUNA_TOKEN" in detail(answer)
    nobody = manager.client()
    assert nobody.get("/healthz").status_code == 200
    assert nobody.get("/ca").status_code == 200
    assert nobody.get(f"{manager.url}/").status_code == 200
    assert "default-src 'self'" in nobody.get(f"{manager.url}/app.js").headers["content-security-policy"]
    assert nobody.get(f"{manager.url}/metrics").status_code == 401


@pytest.mark.parametrize(
    ("role", "reads", "submits", "administers"),
    [("viewer", 200, 403, 403), ("user", 200, 201, 403), ("admin", 200, 201, 200)],
)
def test_a_role_may_do_its_own_and_no_more(
    manager: SecureManager, role: str, reads: int, submits: int, administers: int
) -> None:
    client = manager.client(manager.token(name=f"a-{role}", role=role))
    assert client.get("/jobs").status_code == reads
    submitted = client.post("/jobs", json={**SPEC, "name": f"of-{role}"})
    assert submitted.status_code == submits
    if submits == 201:
        assert client.post(f"/jobs/{submitted.json()['id']}/cancel").status_code == 200
    assert client.put("/fleet", json={"target": 2}).status_code == administers
    assert client.get("/tokens").status_code == administers
    assert client.get("/audit").status_code == administers
    assert client.post("/no/such/thing").status_code == (405 if role == "admin" else 403)


def test_a_viewer_reads_no_values_of_environment_variables(manager: SecureManager) -> None:
    spec = {**SPEC, "name": "with-env", "env": {"WANDB_API_KEY": "k-17", "EMPTY": ""}}
    user = manager.client(manager.token(name="env-user", role="user"))
    job = user.post("/jobs", json=spec).json()["id"]
    viewer = manager.client(manager.token(name="env-viewer", role="viewer"))
    try:
        paths = (f"/jobs/{job}", "/jobs/with-env", "/jobs", f"/jobs/{job}/events", "/events", "/generations", "/vms")
        answers = [viewer.get(path) for path in paths]
        assert not [answer.text for answer in answers if "k-17" in answer.text]
        assert answers[0].json()["spec"]["env"] == {"WANDB_API_KEY": "(hidden)", "EMPTY": "(hidden)"}
        assert user.get(f"/jobs/{job}").json()["spec"]["env"] == spec["env"]
        assert "k-17" not in manager.log
    finally:
        user.post(f"/jobs/{job}/cancel")


def test_tokens_expire_if_nobody_says_when(manager: SecureManager) -> None:
    manager.token(name="ageless", role="user")
    manager.token(name="null", role="user", ttl_s=None)
    tokens = {token["name"]: token for token in manager.admin().get("/tokens").json()}
    for name in ("ageless", "null", "bootstrap-admin"):
        life = datetime.fromisoformat(tokens[name]["expires_at"]) - datetime.fromisoformat(tokens[name]["created_at"])
        assert life == timedelta(days=90), name


def test_tokens_that_expired_were_revoked_or_never_were_open_nothing(manager: SecureManager) -> None:
    admin = manager.admin()
    short = manager.token(name="short", role="admin", ttl_s=0.5)
    revoked = manager.token(name="revoked", role="admin")
    assert admin.delete("/tokens/revoked").status_code == 200
    time.sleep(0.6)  # its life
    good = manager.token(name="good", role="admin")
    kind, number, secret = good.split(".")
    cases = {
        short: "expired",
        revoked: "was revoked",
        f"{kind}.{number}.{secret[:-1]}": "does not know the token",
        f"{kind}.0000.{secret}": "does not know the token",
        manager.token(name="joins", join=True): "starts with 'vt1.'",
        "vt1.." + "x" * 5000: "starts with 'vt1.'",
        "nonsense": "starts with 'vt1.'",
    }
    caller = manager.client()
    for text, reason in cases.items():
        answer = caller.get("/jobs", headers={"Authorization": f"Bearer {text}"})
        assert answer.status_code == 401
        assert reason in detail(answer)
        assert secret not in answer.text
    assert manager.client(good).get("/jobs").status_code == 200


def test_a_join_token_is_good_once_and_for_its_vm(manager: SecureManager) -> None:
    token, key = manager.token(name="one", join=True), Key()
    assert manager.join(token, "vm-a", key).status_code == 200
    assert manager.join(token, "vm-a", key).status_code == 200  # the same agent: our answer may have been lost
    again = manager.join(token, "vm-a", Key())
    assert (again.status_code, "has joined before" in detail(again)) == (403, True)
    other = manager.join(token, "vm-b", Key())
    assert (other.status_code, "was used before" in detail(other)) == (401, True)

    own = manager.token(name="own", join=True, vm_id="vm-c")
    assert manager.join(own, "vm-d", Key()).status_code == 403
    assert manager.join(own, "vm-c", Key()).status_code == 200
    many = manager.token(name="many", join=True, single_use=False)
    assert [manager.join(many, f"vm-{n}", Key()).status_code for n in range(3)] == [200, 200, 200]


def test_join_tokens_that_expired_were_revoked_or_are_of_the_api_join_nobody(manager: SecureManager) -> None:
    short = manager.token(name="short-join", join=True, ttl_s=0.3)
    revoked = manager.token(name="revoked-join", join=True)
    assert manager.admin().delete("/tokens/revoked-join").status_code == 200
    time.sleep(0.4)  # its life
    for token in (short, revoked, manager.admin_token, "vj1.a.b.c", "nonsense"):
        assert manager.join(token, "vm-x", Key()).status_code == 401


@pytest.mark.parametrize("vm_id", ["..", "../../etc", "a/b", ".hidden", "a" * 64, "a\n", "é", ""])
def test_a_vm_id_that_is_no_plain_name_does_not_join(manager: SecureManager, vm_id: str) -> None:
    token = manager.token(name="odd", join=True)
    assert manager.join(token, vm_id, Key()).status_code == 422


def test_who_guesses_has_to_wait_and_others_do_not(manager: SecureManager) -> None:
    guesser = manager.client("vt1.0.0")
    assert [guesser.get("/jobs").status_code for _ in range(10)] == [401] * 10
    answer = wait_until(lambda: found if (found := guesser.get("/jobs")).status_code == 429 else None, "a refusal")
    assert int(answer.headers["retry-after"]) >= 1
    assert manager.admin().get("/jobs").status_code == 200
    own = {"Authorization": f"Bearer {manager.admin_token}"}
    assert guesser.get("/jobs", headers=own).status_code == 200, "from the same address"
    assert [guesser.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
    joins = manager.client("vj1.0.0.0")
    body = {"vm_id": "vm-1", "request": Key().request}
    assert [joins.post("/join", json=body).status_code for _ in range(10)] == [401] * 10
    wait_until(lambda: joins.post("/join", json=body).status_code == 429, "a refusal")
    own = {"Authorization": f"Bearer {manager.token(name='behind', join=True)}"}
    assert joins.post("/join", json={**body, "vm_id": "vm-behind"}, headers=own).status_code == 200


def test_large_bodies_and_headers_are_refused(manager: SecureManager) -> None:
    admin = manager.admin()
    answer = admin.post("/jobs", json={**SPEC, "run": "x" * 30_000})
    assert (answer.status_code, "larger than 20000 bytes" in detail(answer)) == (413, True)

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 1000

    assert admin.post("/jobs", content=chunks(), headers={"Content-Type": "application/json"}).status_code == 413
    with contextlib.suppress(httpx.TransportError):  # it may hang up while we are still sending
        assert admin.get("/jobs", headers={"X-Long": "x" * 200_000}).status_code in (400, 431)
    assert manager.admin().get("/jobs").status_code == 200


def test_every_change_is_written_down_with_who_what_and_from_where(manager: SecureManager) -> None:
    ann = manager.client(manager.token(name="ann", role="user"))
    job = ann.post("/jobs", json={**SPEC, "name": "audited"}).json()["id"]
    assert ann.post(f"/jobs/{job}/cancel").status_code == 200
    assert ann.put("/fleet", json={"target": 3}).status_code == 403
    entries = manager.admin().get("/audit", params={"limit": 10_000}).json()
    mine = [(entry["action"], entry["status"], entry["role"]) for entry in entries if entry["who"] == "ann"]
    assert mine == [
        ("POST /api/v1/jobs", 201, "user"),
        (f"POST /api/v1/jobs/{job}/cancel", 200, "user"),
        ("PUT /api/v1/fleet", 403, "user"),
    ]
    assert all(entry["address"].startswith("127.") for entry in entries)


def test_the_client_says_in_one_line_what_is_wrong(manager: SecureManager) -> None:
    ca, port = str(manager.ca_file), manager.url.rpartition(":")[2]
    with Client(manager.url, token=manager.admin_token, ca=ca, timeout_s=DEADLINE_S) as client:
        assert client.jobs() is not None
        assert client.tokens()
    cases: list[tuple[Any, dict[str, Any], str, str]] = [
        (RefusedError, {"ca": ca}, manager.url, "requires a token: set VARUNA_TOKEN"),
        (TlsError, {"token": "vt1.a.b"}, manager.url, "is not trusted"),
        (UnreachableError, {}, f"http://127.0.0.1:{port}", f"call it as https://127.0.0.1:{port}"),
    ]
    for kind, arguments, url, words in cases:
        with Client(url, **arguments, timeout_s=DEADLINE_S) as client, pytest.raises(kind, match=words) as raised:
            client.jobs()
        assert len(str(raised.value).splitlines()) == 1


def test_secrets_are_in_no_event_log_process_list_or_store(manager: SecureManager) -> None:
    user = manager.token(name="secretive", role="user")
    join = next(manager.data_dir.glob("vms/*/join-token")).read_text()
    assert manager.client(user + "x").get("/jobs").status_code == 401
    secrets = [token.split(".")[2] for token in (manager.admin_token, user, join)]
    shown = [manager.log, manager.admin().get("/events", params={"limit": 10_000}).text]
    shown += [manager.admin().get(path).text for path in ("/audit", "/tokens", "/vms")]
    for process in psutil.process_iter():
        try:
            shown.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    with sqlite3.connect(f"file:{manager.data_dir / 'manager.db'}?mode=ro", uri=True) as store:
        shown += ["\n".join(store.iterdump())]
    store.close()
    for secret in secrets:
        assert len(secret) >= 40
        assert not [text for text in shown if secret in text]
