"""Which certificates the manager accepts over real TLS, and the error that each of the others gets."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509

from secure_world import Certified, Key, SecureManager
from varuna_manager.access.authority import AgentSubject, open_authority, read_agent_subject
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S, wait_until

VM = "local-1"
pytestmark = pytest.mark.xdist_group("secure")  # one manager for all


@pytest.fixture
def manager(secure: SecureManager) -> SecureManager:
    """A manager with two VMs whose processes do nothing: the tests send what their agents would."""
    return secure


def expired(manager: SecureManager, certified: Certified) -> Certified:
    short = manager.same_with_life(certified, timedelta(seconds=1))
    time.sleep(1.5)  # its life
    return short


def test_an_agent_that_has_joined_is_welcome(manager: SecureManager) -> None:
    assert manager.hello(VM, manager.joined(VM).credentials()) == "welcome"


def test_who_shows_no_certificate_or_another_authoritys_does_not_get_through_the_handshake(
    manager: SecureManager, tmp_path: Path
) -> None:
    ca = manager.authority().ca_pem
    other = open_authority(tmp_path / "pki")
    key = Key()
    theirs = other.sign_agent_certificate(key.public, AgentSubject(VM, "1"), timedelta(hours=1))
    for credentials in (grpc.ssl_channel_credentials(ca), grpc.ssl_channel_credentials(ca, key.pem, theirs), None):
        answer = manager.hello(VM, credentials)
        assert "Socket closed" in answer or "reset" in answer or "Broken pipe" in answer
    wrong_way = manager.hello(VM, grpc.ssl_channel_credentials(other.ca_pem, key.pem, theirs))
    assert "CERTIFICATE_VERIFY_FAILED" in wrong_way
    assert manager.hello(VM, manager.joined(VM).credentials()) == "welcome"  # it lives on


def test_an_expired_certificate_does_not_get_through(manager: SecureManager) -> None:
    certified = manager.joined(VM)
    answer = manager.hello(VM, expired(manager, certified).credentials())
    assert "Socket closed" in answer or "reset" in answer or "Broken pipe" in answer
    assert manager.hello(VM, certified.credentials()) == "welcome"


def test_a_managers_certificate_is_no_agents(manager: SecureManager) -> None:
    authority = manager.authority()
    pair = authority.make_server_pair(["localhost"], timedelta(hours=1))
    credentials = grpc.ssl_channel_credentials(authority.ca_pem, pair.key_pem, pair.certificate_pem)
    assert manager.hello(VM, credentials) != "welcome"


def test_an_agent_cannot_speak_for_another_vm(manager: SecureManager) -> None:
    answer = manager.hello("local-2", manager.joined(VM).credentials())
    assert "the certificate is of VM 'local-1', not of 'local-2'" in answer


def test_a_certificate_that_nobody_joined_for_is_refused(manager: SecureManager) -> None:
    forged = manager.certified(AgentSubject("local-2", "no such enrolment"))
    assert "was replaced by a later joining" in manager.hello("local-2", forged.credentials())


def test_joining_again_ends_the_certificates_of_before(manager: SecureManager) -> None:
    first, second = manager.joined(VM), manager.joined(VM)
    assert "was replaced by a later joining" in manager.hello(VM, first.credentials())
    assert manager.hello(VM, second.credentials()) == "welcome"


def test_revoking_ends_certificates_and_renewal(manager: SecureManager) -> None:
    certified = manager.joined(VM)
    assert manager.admin().post(f"/vms/{VM}/revoke").status_code == 200
    assert "were revoked" in manager.hello(VM, certified.credentials())
    with pytest.raises(grpc.RpcError, match="were revoked"):
        manager.renewed(certified)


def test_the_certificates_of_a_vm_that_is_gone_are_refused(manager: SecureManager) -> None:
    made = manager.admin().put("/fleet", json={"target": 3})
    assert made.status_code == 200
    vm = wait_until(lambda: next((vm for vm in manager.vms() if vm not in (VM, "local-2")), None), "a third VM")
    certified = manager.joined(vm)
    assert manager.admin().put("/providers/local", json={"capacity": 2}).status_code == 200
    assert manager.admin().post(f"/vms/{vm}/preempt", json={"notice_s": 0}).status_code == 200
    wait_until(lambda: vm not in manager.vms(), "its end")
    for path, body in (("/fleet", {"target": 2}), ("/providers/local", {"capacity": None})):
        assert manager.admin().put(path, json=body).status_code == 200
    assert f"VM '{vm}' is gone" in manager.hello(vm, certified.credentials())
    answer = manager.join(manager.token(name="again", join=True, vm_id=vm), vm, Key())
    assert answer.status_code == 403
    assert "is gone" in answer.json()["detail"]


def test_a_renewed_certificate_goes_back_to_the_same_joining(manager: SecureManager) -> None:
    first = manager.joined(VM)
    second = manager.renewed(first)
    assert read_agent_subject(second.certificate) == read_agent_subject(first.certificate)
    for certified in (first, second):  # the answer may be lost: the old one counts until it expires
        assert manager.hello(VM, certified.credentials()) == "welcome"


def beats_after(manager: SecureManager, short: Certified) -> bool:
    """Check that a heartbeat after the certificate's end is acknowledged. False: it ended before its stream began."""
    over = x509.load_pem_x509_certificate(short.certificate).not_valid_after_utc

    def beats() -> Iterator[pb.AgentMessage]:
        yield pb.AgentMessage(hello=pb.Hello(vm_id=VM, incarnation="1", gpus=1, host="127.0.0.1"))
        while datetime.now(UTC) <= over:
            time.sleep(0.1)
        yield pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=7))

    with manager.channel(short.credentials()) as channel:
        call = agent_pb2_grpc.AgentServiceStub(channel).Connect(beats(), timeout=DEADLINE_S)
        try:
            welcome = next(iter(call))
        except grpc.RpcError:
            assert datetime.now(UTC) > over
            return False
        assert welcome.HasField("welcome")
        assert any(message.ack.heartbeat_sequence == 7 for message in call)
        call.cancel()
    return True


def test_a_stream_outlives_the_certificate_that_it_was_opened_with(manager: SecureManager) -> None:
    certified, life = manager.joined(VM), timedelta(seconds=4)
    while not beats_after(manager, manager.same_with_life(certified, life)):
        life *= 2  # this machine needed longer than that to open a stream


def test_the_manager_tells_how_long_its_agents_certificates_last(manager: SecureManager) -> None:
    short = manager.same_with_life(manager.joined(VM), timedelta(minutes=5))
    viewer = manager.client(manager.token(name="certificates", role="viewer"))
    spoken = threading.Event()

    def days_left() -> float:
        lines = viewer.get(f"{manager.url}/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("varuna_agent_certificate_days_left ")]
        return float(line.split()[1])

    def words() -> Iterator[pb.AgentMessage]:
        yield pb.AgentMessage(hello=pb.Hello(vm_id=VM, incarnation="1", gpus=1, host="127.0.0.1"))
        spoken.wait(DEADLINE_S)

    with manager.channel(short.credentials()) as channel:
        call = agent_pb2_grpc.AgentServiceStub(channel).Connect(words(), timeout=DEADLINE_S)
        assert next(iter(call)).HasField("welcome")
        assert 0 < days_left() < 5 / 24 / 60
        manager.renewed(short)
        assert days_left() > 5 / 24 / 60, "the stream goes on, and so would the alert"
        spoken.set()
        call.cancel()


def test_an_expired_certificate_is_not_renewed(manager: SecureManager) -> None:
    with pytest.raises(grpc.RpcError):
        manager.renewed(expired(manager, manager.joined(VM)))


def test_a_request_that_is_none_gets_no_certificate(manager: SecureManager) -> None:
    key = Key()
    for wrong in ("", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "é"):
        key.request = wrong
        answer = manager.join(manager.token(name="test", join=True, vm_id=VM), VM, key)
        assert answer.status_code == 422, answer.text
        assert "signing request" in answer.json()["detail"]


def test_garbage_and_plain_text_on_the_tls_ports_do_no_harm(manager: SecureManager) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{manager.url.removeprefix('https://')}/healthz", trust_env=False)
    for address in (manager.grpc, manager.url.removeprefix("https://")):
        host, _, port = address.rpartition(":")
        for content in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(2000), b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as raw:
                raw.sendall(content)
    assert manager.client().get("/healthz").status_code == 200
    assert manager.hello("local-2", manager.joined("local-2").credentials()) == "welcome"


def test_keys_are_for_the_managers_user_only(manager: SecureManager) -> None:
    pki = manager.data_dir / "pki"
    assert pki.stat().st_mode & 0o777 == 0o700
    for file in (pki / "ca.key", manager.data_dir / "admin-token", manager.data_dir / "manager.db"):
        assert file.stat().st_mode & 0o777 == 0o600
    assert not (manager.data_dir / "server.pem").exists()


def test_the_manager_shows_a_certificate_for_its_names(manager: SecureManager) -> None:
    port = manager.url.rpartition(":")[2]
    trusting = ssl.create_default_context(cafile=manager.ca_file)
    with httpx.Client(verify=trusting, trust_env=False, timeout=DEADLINE_S) as client:
        assert client.get(f"https://localhost:{port}/healthz").status_code == 200
    with (
        httpx.Client(trust_env=False, timeout=DEADLINE_S) as client,
        pytest.raises(httpx.ConnectError, match="VERIFY_FAILED"),
    ):
        client.get(f"https://localhost:{port}/healthz")


def test_certificates_last_no_longer_than_asked(manager: SecureManager) -> None:
    certificate = x509.load_pem_x509_certificate(manager.joined(VM).certificate)
    assert certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=7)
