"""The authority and the manager's own certificates."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
import trustme
from cryptography import x509

from varuna_manager.access import authority as authority_module
from varuna_manager.access import server_tls
from varuna_manager.access.authority import (
    AgentSubject,
    Authority,
    AuthorityError,
    open_authority,
    read_agent_subject,
    write_private_file,
)
from varuna_manager.access.server_tls import OperatorFiles, ServerTls
from varuna_manager.server.security import server_names
from varuna_manager.settings import ManagerSettings
from waiting import DEADLINE_S, until

HOUR = timedelta(hours=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return open_authority(tmp_path / "pki")


def shown_by(tls: ServerTls, ca_pem: bytes | str, name: str = "localhost") -> x509.Certificate:
    """The certificate that a client gets who trusts this authority. Raises ssl.SSLError."""
    here, there = socket.socketpair()
    here.settimeout(DEADLINE_S)
    there.settimeout(DEADLINE_S)

    def serve() -> None:
        with contextlib.suppress(ssl.SSLError, OSError), tls.https.wrap_socket(there, server_side=True) as wrapped:
            wrapped.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    data = ca_pem if isinstance(ca_pem, str) else ca_pem.decode()
    try:
        with ssl.create_default_context(cadata=data).wrap_socket(here, server_hostname=name) as wrapped:
            der = wrapped.getpeercert(binary_form=True)
            assert der is not None
            return x509.load_der_x509_certificate(der)
    finally:
        here.close()
        thread.join()
        there.close()


def fill_disk_once(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The next file for OpenSSL cannot be written. Returns what was to be written, from then on."""
    written: list[bytes] = []

    def fail_first(path: Path, content: bytes) -> None:
        written.append(content)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_private_file(path, content)

    monkeypatch.setattr(server_tls, "write_private_file", fail_first)
    return written


def test_an_authority_is_made_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_authority(tmp_path / "pki"), range(16)))
    assert len({authority.pin for authority in found}) == 1


def test_a_start_that_was_killed_leaves_nothing_that_matters(tmp_path: Path) -> None:
    first = open_authority(tmp_path / "pki")
    (tmp_path / "pki" / "ca.pem").unlink()  # killed between key and certificate
    (tmp_path / "pki" / "ca.key.part").write_text("half a")
    second = open_authority(tmp_path / "pki")
    assert second.pin != first.pin
    assert open_authority(tmp_path / "pki").pin == second.pin


def test_what_is_wrong_with_an_authority_is_said(tmp_path: Path) -> None:
    open_authority(tmp_path / "one")
    open_authority(tmp_path / "two")
    (tmp_path / "one" / "ca.key").write_bytes((tmp_path / "two" / "ca.key").read_bytes())
    with pytest.raises(AuthorityError, match="is not the key of"):
        open_authority(tmp_path / "one")
    (tmp_path / "two" / "ca.key").write_text("no key")
    with pytest.raises(AuthorityError, match="from a backup, or remove both"):
        open_authority(tmp_path / "two")


def test_certificates_are_valid_where_a_clock_is_hours_slow(authority: Authority, tmp_path: Path) -> None:
    pair = authority.make_server_pair(["localhost"], timedelta(days=90))
    key = x509.load_pem_x509_certificate(pair.certificate_pem).public_key()
    of_agent = authority.sign_agent_certificate(key, AgentSubject("vm-1", "abc"), timedelta(days=7))  # type: ignore[arg-type]
    for pem in (authority.ca_pem, pair.certificate_pem, of_agent):
        assert x509.load_pem_x509_certificate(pem).not_valid_before_utc < datetime.now(UTC) - timedelta(hours=13)


async def test_a_certificate_that_a_clock_set_back_makes_valid_later_is_replaced(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(days=40)

    with monkeypatch.context() as before:
        before.setattr(authority_module, "datetime", Ahead)
        tls = ServerTls(authority, ["localhost"], tmp_path)
    assert tls.find_pair().not_before > datetime.now(UTC)
    keeping = asyncio.create_task(tls.run())
    await until(lambda: tls.find_pair().not_before < datetime.now(UTC), beside=keeping)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def test_only_an_agents_certificate_names_an_agent(authority: Authority) -> None:
    pair = authority.make_server_pair(["localhost"], HOUR)
    assert read_agent_subject(pair.certificate_pem) is None
    key = x509.load_pem_x509_certificate(pair.certificate_pem).public_key()
    subject = AgentSubject("vm-1", "abc")
    assert read_agent_subject(authority.sign_agent_certificate(key, subject, HOUR)) == subject  # type: ignore[arg-type]


def test_the_certificate_is_for_the_managers_names() -> None:
    names = server_names(
        ManagerSettings(host="10.1.2.3", server_names="a.example, b.example", advertise_host="c.example")
    )
    assert {"localhost", "127.0.0.1", "::1", "10.1.2.3", "a.example", "b.example", "c.example"} <= set(names)
    everywhere = server_names(ManagerSettings(host="0.0.0.0"))
    assert "0.0.0.0" not in everywhere
    assert "127.0.0.1" in everywhere


@pytest.mark.long
async def test_the_managers_certificate_is_renewed_in_time(authority: Authority, tmp_path: Path) -> None:
    tls = ServerTls(authority, ["localhost"], tmp_path, life=timedelta(seconds=2))
    first = x509.load_pem_x509_certificate(tls.find_pair().certificate_pem).serial_number
    keeping = asyncio.create_task(tls.run())

    def is_renewed() -> bool:
        try:
            return shown_by(tls, authority.ca_pem).serial_number != first
        except ssl.SSLError:  # the machine stood still for longer than a certificate lives: the next is on its way
            return False

    # In this thread, like the manager's own handshakes: never in the middle of an exchange.
    await until(is_renewed)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert list(tmp_path.glob("server.pem*")) == []  # no key stays on the disk


async def test_a_disk_that_is_full_for_a_moment_does_not_end_the_renewal(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ServerTls(authority, ["localhost"], tmp_path, life=timedelta(seconds=0.3))
    written = fill_disk_once(monkeypatch)
    keeping = asyncio.create_task(tls.run())
    await until(lambda: len(written) >= 3 or keeping.done(), "certificates after the failure")
    assert not keeping.done(), keeping.exception()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    pair = tls.find_pair()
    assert written[-1] == pair.key_pem + pair.certificate_pem


def test_a_certificate_that_could_not_be_loaded_is_loaded_once_it_can_be(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ServerTls(authority, ["localhost"], tmp_path, life=HOUR)
    written = fill_disk_once(monkeypatch)
    tls._load()
    assert written == [], "its key is on the disk no more often than it has to be"
    tls._pair = authority.make_server_pair(["localhost"], HOUR)
    with pytest.raises(OSError, match="No space left"):
        tls._load()
    tls._load()
    tls._load()
    assert len(written) == 2
    serial = x509.load_pem_x509_certificate(tls.find_pair().certificate_pem).serial_number
    assert shown_by(tls, authority.ca_pem).serial_number == serial


@pytest.mark.long
async def test_the_operators_certificate_is_shown_and_read_again(authority: Authority, tmp_path: Path) -> None:
    operator = trustme.CA()
    files = OperatorFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")

    def issue() -> int:
        issued = operator.issue_cert("manager.example")
        issued.private_key_pem.write_to_path(str(files.key))
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(str(files.certificate), append=number > 0)
        return x509.load_pem_x509_certificate(files.certificate.read_bytes()).serial_number

    serial = issue()
    tls = ServerTls(authority, ["localhost"], tmp_path, files, life=timedelta(seconds=2))
    trusted = operator.cert_pem.bytes()
    assert (await asyncio.to_thread(shown_by, tls, trusted, "manager.example")).serial_number == serial
    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(shown_by, tls, authority.ca_pem, "manager.example")
    newer = issue()
    keeping = asyncio.create_task(tls.run())
    # In this thread, like the manager's own handshakes: never in the middle of an exchange.
    await until(lambda: shown_by(tls, trusted, "manager.example").serial_number == newer)
    files.key.write_text("no key")  # what there was stays in use
    tried = tls.find_pair()
    await until(lambda: tls.find_pair() != tried)
    assert shown_by(tls, trusted, "manager.example").serial_number == newer
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def test_an_operators_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    (tmp_path / "key.pem").write_text("no key")
    for certificate in ("cert.pem", "none.pem"):
        files = OperatorFiles(certificate=tmp_path / certificate, key=tmp_path / "key.pem")
        with pytest.raises(AuthorityError, match=f"--tls-cert .*{certificate}"):
            ServerTls(authority, ["localhost"], tmp_path, files)
