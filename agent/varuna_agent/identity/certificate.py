"""The certificate that identifies this VM to the manager: obtained with a join token, and renewed in time.

As in kubeadm, the token contains the SHA-256 of the authority's certificate. The agent fetches that certificate, which
is public, compares it, and only then sends the token, over a connection that this authority has certified.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from varuna_agent.errors import JoinError
from varuna_agent.link.backoff import Backoff
from varuna_agent.link.channels import open_channel, raise_if_cancelled
from varuna_proto.v1 import identity_pb2, identity_pb2_grpc

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_TIMEOUT_S = 15.0
_MOST_RETRY_S = 300.0
_MOST_SLEEP_S = 3600.0
_FATAL = frozenset({400, 401, 403, 404, 409, 413, 422})
_NOT_YET_VALID = "certificate is not yet valid"
"""What OpenSSL says where this VM's clock is slow, or the manager's was fast: it goes away when that is set."""


@dataclass(frozen=True)
class JoinToken:
    """`vj1.<id>.<secret>.<SHA-256 of the authority's certificate>`."""

    text: str
    id: str
    pin: str

    @classmethod
    def parse_text(cls, text: str) -> JoinToken:
        """Raises JoinError, whose message does not contain the token."""
        parts = text.strip().split(".")
        if len(parts) != 4 or parts[0] != "vj1" or len(parts[3]) != 64:
            raise JoinError("the join token is malformed: it is vj1.<id>.<secret>.<64 hex digits>; copy it whole")
        return cls(text.strip(), parts[1], parts[3].lower())


@dataclass(frozen=True, kw_only=True)
class VmCertificate:
    """The certificate and its key, in a file that only the agent's user can read."""

    key_pem: str
    certificate_pem: str
    ca_pem: str
    token_id: str
    """The id of the join token that it originates from."""

    @property
    def _parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate_pem.encode())

    @property
    def vm_id(self) -> str:
        return str(self._parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    @property
    def not_after(self) -> datetime:
        return self._parsed.not_valid_after_utc

    @property
    def life(self) -> timedelta:
        return self._parsed.not_valid_after_utc - self._parsed.not_valid_before_utc

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca_pem.encode(), self.key_pem.encode(), self.certificate_pem.encode())

    def save_file(self, path: Path) -> None:
        _write_private(path, json.dumps(vars(self)))

    @classmethod
    def load_file(cls, path: Path) -> VmCertificate | None:
        """None if there is no file. Raises JoinError when it cannot be read."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise JoinError(f"{path} cannot be read ({error}): remove it, and join again with a new token") from error


class AgentIdentity:
    """The certificate of this VM, renewed while the agent runs. `path`: where it is kept."""

    def __init__(self, certificate: VmCertificate, path: Path, chance: random.Random) -> None:
        self.certificate = certificate
        self._path = path
        self._chance = chance

    async def keep_renewed(self, managers: Sequence[str]) -> None:
        """Renew the certificate forever, each time before a third of its life is left. Open streams keep the old one.

        A failure is retried with growing pauses: the manager does not answer, or the disk refuses the new certificate,
        which is used at once nevertheless.
        """
        while True:
            life = self.certificate.life
            # A random time, which spreads the renewals of a fleet.
            await _sleep_until(self.certificate.not_after - life * self._chance.uniform(0.34, 0.4))
            backoff = Backoff(min(1.0, life.total_seconds() / 100), _MOST_RETRY_S, self._chance)
            while True:
                if await self._renew_certificate(managers):
                    break
                await asyncio.sleep(backoff.next_s())

    async def _renew_certificate(self, managers: Sequence[str]) -> bool:
        """Get a new certificate from one of the managers; returns whether it is saved."""
        key = ec.generate_private_key(ec.SECP256R1())
        request = identity_pb2.RenewRequest(request_pem=_make_signing_request(key))
        reasons = []
        for manager in managers:
            try:
                async with open_channel(manager, self.certificate.channel_credentials()) as channel:
                    stub: identity_pb2_grpc.IdentityServiceAsyncStub = identity_pb2_grpc.IdentityServiceStub(channel)
                    answer = await stub.Renew(request, timeout=_TIMEOUT_S)
                renewed = replace(self.certificate, key_pem=_key_pem(key), certificate_pem=answer.certificate_pem)
                until = renewed.not_after.isoformat()
            except grpc.aio.AioRpcError as error:
                raise_if_cancelled()
                reasons.append(f"{manager}: {error.code().name}: {error.details()}")
                continue
            except ValueError as error:
                reasons.append(f"{manager} sent no certificate: {error}")
                continue
            self.certificate = renewed
            try:
                await asyncio.to_thread(renewed.save_file, self._path)
            except OSError as error:
                _log.warning("the renewed certificate could not be kept yet", until=until, reason=str(error))
                return False
            _log.info("the certificate was renewed", until=until)
            return True
        _log.warning(
            "the certificate could not be renewed yet", until=self.certificate.not_after.isoformat(), reasons=reasons
        )
        return False


async def _sleep_until(then: datetime) -> None:
    while True:
        left_s = (then - datetime.now(UTC)).total_seconds()
        if left_s <= 0:
            return
        await asyncio.sleep(min(left_s, _MOST_SLEEP_S))  # the wall clock may be changed meanwhile


async def open_identity(
    folder: Path,
    vm_id: str,
    token: JoinToken | None,
    *,
    urls: Sequence[str],
    ca_file: Path | None,
    chance: random.Random,
) -> AgentIdentity | None:
    """The identity saved in `folder`, or a new one by joining; None: there is neither an identity nor a token.

    It joins again with a token that is not the one of its certificate. If that is refused, a certificate that is still
    valid stays in use: the token may be one that only new VMs can join with. Waits for an unreachable manager. Raises
    JoinError.

    Args:
        urls: the URLs of the managers' REST APIs.
        ca_file: the authority that signed their certificates, if it is the operator's and not the manager's own.
    """
    path = folder / "identity.json"
    kept = VmCertificate.load_file(path)
    if kept is not None and kept.vm_id != vm_id and token is None:
        raise JoinError(f"{path} is of VM {kept.vm_id!r}, not of {vm_id!r}: give this VM its own --vm-dir")
    is_current = kept is not None and kept.vm_id == vm_id and kept.not_after > datetime.now(UTC)
    if kept is not None and is_current and (token is None or token.id == kept.token_id):
        return AgentIdentity(kept, path, chance)
    if token is None and kept is not None:
        raise JoinError(
            f"the certificate of VM {vm_id!r} expired at {kept.not_after.isoformat()}: join again with a new token "
            "(varuna token create --join --vm, then --join-token-file)"
        )
    if token is None:
        return None
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        certificate = await _join(folder, vm_id, token, urls=urls, ca_file=ca_file, chance=chance)
    except JoinError as error:
        if kept is None or not is_current:
            raise
        _log.warning("not joined again: the present certificate stays in use", vm=vm_id, reason=str(error))
        return AgentIdentity(kept, path, chance)
    certificate.save_file(path)
    _log.info("this VM has joined", vm=vm_id, until=certificate.not_after.isoformat())
    return AgentIdentity(certificate, path, chance)


async def _join(
    folder: Path, vm_id: str, token: JoinToken, *, urls: Sequence[str], ca_file: Path | None, chance: random.Random
) -> VmCertificate:
    key = _load_or_make_key(folder / "joining.key")
    backoff = Backoff(0.2, 10.0, chance)
    while True:
        for url in urls:
            try:
                return await asyncio.wait_for(_join_once(url, vm_id, token, key=key, ca_file=ca_file), 2 * _TIMEOUT_S)
            except (httpx.TransportError, TimeoutError, _LaterError) as error:
                _raise_if_other(error, url)
                reason = str(error) or type(error).__name__
                if _NOT_YET_VALID in reason:
                    reason += ": compare the clocks of this VM and of the manager"
                _log.info("not joined yet", manager=url, reason=reason)
        await asyncio.sleep(backoff.next_s())


class _LaterError(Exception):
    """The manager cannot answer now."""


async def _join_once(
    url: str, vm_id: str, token: JoinToken, *, key: ec.EllipticCurvePrivateKey, ca_file: Path | None
) -> VmCertificate:
    ca_pem = await _pinned_authority(url, token.pin)
    context = ssl.create_default_context(cafile=ca_file) if ca_file else ssl.create_default_context(cadata=ca_pem)
    body = {"vm_id": vm_id, "request": _make_signing_request(key)}
    # The environment's proxies are for the internet; the manager is on our own network.
    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=_TIMEOUT_S) as client:
        headers = {"Authorization": f"Bearer {token.text}"}
        answer = await client.post(f"{url}/api/v1/join", json=body, headers=headers)
    document = _document(answer)
    if answer.status_code != 200:
        text = f"the manager at {url} does not take VM {vm_id!r}: {document.get('detail', answer.status_code)}"
        raise JoinError(text) if answer.status_code in _FATAL else _LaterError(text)
    return VmCertificate(
        key_pem=_key_pem(key), certificate_pem=str(document["certificate"]), ca_pem=ca_pem, token_id=token.id
    )


async def _pinned_authority(url: str, pin: str) -> str:
    """Fetch the authority's certificate (PEM), and check that it is the one that the token names."""
    # This request sends no secret, and the answer is trusted only for its hash.
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=_TIMEOUT_S) as client:
        answer = await client.get(f"{url}/api/v1/ca")
    if answer.status_code != 200:
        text = f"the manager at {url} has no authority: {_document(answer).get('detail', answer.status_code)}"
        raise JoinError(text) if answer.status_code in _FATAL else _LaterError(text)
    try:
        certificate = x509.load_pem_x509_certificate(answer.content)
    except ValueError as error:
        raise JoinError(f"{url} sent no certificate of an authority: is it a Varuna manager?") from error
    found = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
    if found != pin:
        raise JoinError(
            f"the authority of the manager at {url} is not the one that the join token names (SHA-256 {found[:16]}..., "
            f"expected {pin[:16]}...): it is another manager, or somebody in between; the token was not sent"
        )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _raise_if_other(error: BaseException, url: str) -> None:
    """Raise JoinError for an error that does not go away by waiting."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text and _NOT_YET_VALID not in text:
        raise JoinError(
            f"the certificate of {url} cannot be trusted ({text}): dial a name that the manager has in --server-names, "
            "or give --join-ca if its certificate is not from its own authority"
        ) from error
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
        raise JoinError(
            f"{url} speaks no TLS: start the manager with --secure, or give its right --join-url"
        ) from error


def _document(answer: httpx.Response) -> dict[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _load_or_make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key with which this VM joins; a retry uses the same key, because an answer may have been lost."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    except (FileNotFoundError, ValueError, TypeError):
        pass  # no key yet, or a partial one, which the manager has never seen
    key = ec.generate_private_key(ec.SECP256R1())
    _write_private(path, _key_pem(key))
    return key


def _make_signing_request(key: ec.EllipticCurvePrivateKey) -> str:
    """The subject is empty, because the manager chooses it."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _write_private(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
