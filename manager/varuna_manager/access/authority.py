"""The manager's certificate authority: made at the first start, it signs the certificates of the manager and agents.

It consists of `<pki_dir>/ca.key` and `ca.pem`. Several managers of one store share them, by a file system that all of
them mount or by copies. Keys are ECDSA P-256: small, and quick to make and to verify.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA_LIFE = timedelta(days=3650)
_MOST_BACKDATED = timedelta(days=1)
"""Certificates are valid from before now, because clocks differ: one that is taken for local time by hours."""
AGENT_ORGANISATION = "varuna agent"


class AuthorityError(Exception):
    """The authority cannot be used, or must not sign a request; `str()` is one line with the way out."""


@dataclass(frozen=True)
class KeyPair:
    """A private key and its certificate (PEM)."""

    key_pem: bytes
    certificate_pem: bytes

    @property
    def not_before(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate_pem).not_valid_before_utc

    @property
    def not_after(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate_pem).not_valid_after_utc


@dataclass(frozen=True)
class AgentSubject:
    """Whom an agent's certificate names. `enrolment`: id of the joining that it goes back to, through all renewals."""

    vm_id: str
    enrolment: str


class Authority:
    """Signs certificates. Made by `open_authority`."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.ca_pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.pin = make_pin(certificate)

    def make_server_pair(self, names: Iterable[str], life: timedelta) -> KeyPair:
        """A new key and certificate for a manager with these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name("varuna manager", "varuna manager")
        builder = self._builder(subject, key.public_key(), life, ExtendedKeyUsageOID.SERVER_AUTH)
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)])
        certificate = builder.add_extension(alternatives, critical=False).sign(self._key, hashes.SHA256())
        return KeyPair(_key_pem(key), certificate.public_bytes(serialization.Encoding.PEM))

    def sign_agent_certificate(self, key: ec.EllipticCurvePublicKey, subject: AgentSubject, life: timedelta) -> bytes:
        """A certificate (PEM) with which the holder of the key can dial a manager."""
        name = _name(subject.vm_id, AGENT_ORGANISATION, subject.enrolment)
        builder = self._builder(name, key, life, ExtendedKeyUsageOID.CLIENT_AUTH)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta, use: x509.ObjectIdentifier
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - min(_MOST_BACKDATED, life / 10))
            .not_valid_after(now + life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def read_requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a signing request; the subject in the request is ignored.

    Raises AuthorityError if the request is malformed or its key is not ECDSA P-256.
    """
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthorityError(f"the signing request is malformed ({_line(error)}): send a PKCS #10 PEM") from error
    if not is_signed:
        raise AuthorityError("the signing request is not signed by its own key: make a new one")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise AuthorityError("the signing request's key is not ECDSA P-256: make one of that kind")
    return key


def key_sha256(key: ec.EllipticCurvePublicKey) -> str:
    """The fingerprint of a key."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def read_agent_subject(certificate_pem: bytes) -> AgentSubject | None:
    """The subject of a certificate that the TLS handshake has verified; None if it is not an agent's."""
    subject = x509.load_pem_x509_certificate(certificate_pem).subject
    found = {attribute.oid: str(attribute.value) for attribute in subject}
    if found.get(NameOID.ORGANIZATION_NAME) != AGENT_ORGANISATION:
        return None
    return AgentSubject(found.get(NameOID.COMMON_NAME, ""), found.get(NameOID.SERIAL_NUMBER, ""))


def read_expiry(certificate_pem: bytes) -> float:
    """When a certificate expires, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc.timestamp()


def make_pin(certificate: x509.Certificate) -> str:
    """The SHA-256 of the authority's certificate in hex, by which a join token pins the authority."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def open_authority(pki_dir: Path) -> Authority:
    """The authority in a folder; makes one if there is none. Raises AuthorityError, OSError."""
    pki_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    pki_dir.chmod(0o700)
    key_file, certificate_file = pki_dir / "ca.key", pki_dir / "ca.pem"
    with (pki_dir / "ca.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # managers that share the folder start at the same time
        # The certificate is written last: a key without one is left over from a start that was killed.
        if not certificate_file.exists():
            _make_authority(key_file, certificate_file)
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthorityError(
            f"the authority in {pki_dir} cannot be read ({_line(error)}): restore ca.key and ca.pem from a backup, or "
            "remove both for a new one (every agent must then join again)"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise AuthorityError(f"{key_file} is not the key of {certificate_file}: copy both from the same manager")
    return Authority(key, certificate)


def _make_authority(key_file: Path, certificate_file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("varuna authority", "varuna manager")
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _MOST_BACKDATED)
        .not_valid_after(now + _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private_file(key_file, _key_pem(key))
    write_private_file(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))


def write_private_file(path: Path, content: bytes) -> None:
    """Write the whole file or nothing; only the owner can ever read it."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _name(common_name: str, organisation: str, serial_number: str = "") -> x509.Name:
    attributes = [
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation),
        x509.NameAttribute(NameOID.COMMON_NAME, common_name),
    ]
    if serial_number:
        attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, serial_number))
    return x509.Name(attributes)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
