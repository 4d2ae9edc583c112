"""A secure manager as a process, and what calls it: REST from addresses of their own, gRPC with any certificate."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import CertificateSigningRequestBuilder, Name
from grpc import Channel, ChannelCredentials

from http_limits import ONE_CALL_EACH
from left_vms import kill_left_vms
from own_ports import own_ports
from varuna_manager.access.authority import AgentSubject, Authority, open_authority, read_agent_subject
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc, identity_pb2, identity_pb2_grpc
from waiting import DEADLINE_S, wait_until

IDLE_VM = json.dumps(["/bin/sh", "-c", "exec sleep 3600", "vm"])
_callers = count(1)


class Key:
    """A key with what one does with it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.public = self._key.public_key()
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        self.pem = self._key.private_bytes(encoding, form, serialization.NoEncryption())
        request = CertificateSigningRequestBuilder().subject_name(Name([])).sign(self._key, hashes.SHA256())
        self.request = request.public_bytes(encoding).decode()


@dataclass
class Certified:
    """A key, its certificate, and the authority by which its holder knows the manager."""

    key: Key
    certificate: bytes
    ca: bytes

    def credentials(self) -> ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key.pem, self.certificate)


@dataclass
class SecureManager:
    """Made by `secure_manager`."""

    data_dir: Path
    command: list[str]
    process: subprocess.Popen[bytes]
    pki_dir: Path
    clients: list[httpx.Client] = field(default_factory=list)

    def kill_and_start_again(self) -> None:
        self.process.kill()
        self.start_again()

    def start_again(self, *, stands_by: bool = False) -> None:
        """After its process was killed."""
        self.process.wait()
        self.process = _start(self.command, self.data_dir)
        self.wait_until_ready(stands_by=stands_by)

    def wait_until_ready(self, *, stands_by: bool = False) -> None:
        """Until it leads; or (`stands_by`) until it answers without leading."""
        files = [self.data_dir / "manager.json", self.ca_file]
        files += [] if stands_by else [self.data_dir / "admin-token"]

        def answers() -> bool:
            assert self.process.poll() is None, self.log
            return all(file.exists() for file in files) and self._readiness() == (503 if stands_by else 200)

        wait_until(answers, "the manager")

    def wait_until_leading(self) -> None:
        """For one that stood by."""
        wait_until(lambda: self._readiness() == 200, f"{self.url} to lead")

    def _readiness(self) -> int | None:
        """The status of /readyz. None: the manager starts, or changes its role, and closed the connection."""
        with contextlib.suppress(httpx.TransportError):
            return self.client().get("/readyz").status_code
        return None

    @property
    def _addresses(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.data_dir / "manager.json").read_text())
        return document

    @property
    def url(self) -> str:
        return str(self._addresses["url"])

    @property
    def grpc(self) -> str:
        return str(self._addresses["grpc"])

    @property
    def ca_file(self) -> Path:
        return self.pki_dir / "ca.pem"

    @property
    def log(self) -> str:
        return (self.data_dir / "manager.log").read_text()

    @property
    def admin_token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    def authority(self) -> Authority:
        return open_authority(self.pki_dir)

    def client(self, token: str | None = None) -> httpx.Client:
        """A caller with an address of its own: too many failures of one do not concern the others."""
        # Each look while a manager starts is a caller too: one last octet would not be enough for them.
        address = str(ipaddress.IPv4Address("127.0.0.1") + next(_callers))
        context = ssl.create_default_context(cafile=self.ca_file)
        transport = httpx.HTTPTransport(verify=context, local_address=address, limits=ONE_CALL_EACH)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        client = httpx.Client(base_url=f"{self.url}/api/v1", transport=transport, headers=headers, timeout=DEADLINE_S)
        self.clients.append(client)
        return client

    def admin(self) -> httpx.Client:
        return self.client(self.admin_token)

    def token(self, **body: Any) -> str:
        answer = self.admin().post("/tokens", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["token"])

    def join(self, token: str, vm_id: str, key: Key) -> httpx.Response:
        return self.client(token).post("/join", json={"vm_id": vm_id, "request": key.request})

    def joined(self, vm_id: str) -> Certified:
        key = Key()
        answer = self.join(self.token(name="test", join=True, vm_id=vm_id), vm_id, key)
        assert answer.status_code == 200, answer.text
        return Certified(key, answer.json()["certificate"].encode(), self.authority().ca_pem)

    def certified(self, subject: AgentSubject, life: timedelta = timedelta(hours=1)) -> Certified:
        """Signed by the manager's own authority, without asking the manager."""
        authority, key = self.authority(), Key()
        return Certified(key, authority.sign_agent_certificate(key.public, subject, life), authority.ca_pem)

    def same_with_life(self, certified: Certified, life: timedelta) -> Certified:
        subject = read_agent_subject(certified.certificate)
        assert subject is not None
        return self.certified(subject, life)

    def hello(self, vm_id: str, credentials: ChannelCredentials | None) -> str:
        """What the manager answers to a Hello: `welcome`, the reason of its refusal, or gRPC's error."""
        with self.channel(credentials) as channel:
            hello = pb.Hello(vm_id=vm_id, incarnation="1", gpus=1, host="127.0.0.1")
            call = agent_pb2_grpc.AgentServiceStub(channel).Connect(
                iter([pb.AgentMessage(hello=hello)]), timeout=DEADLINE_S
            )
            try:
                message = next(iter(call))
            except grpc.RpcError as error:
                return str(error.details())
            finally:
                call.cancel()
            return message.refused.reason if message.HasField("refused") else str(message.WhichOneof("body"))

    def renewed(self, certified: Certified) -> Certified:
        """Raises grpc.RpcError."""
        key = Key()
        with self.channel(certified.credentials()) as channel:
            request = identity_pb2.RenewRequest(request_pem=key.request)
            answer = identity_pb2_grpc.IdentityServiceStub(channel).Renew(request, timeout=DEADLINE_S)
        return Certified(key, answer.certificate_pem.encode(), certified.ca)

    @contextlib.contextmanager
    def channel(self, credentials: ChannelCredentials | None) -> Iterator[Channel]:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        if credentials is None:
            channel = grpc.insecure_channel(self.grpc, options=options)
        else:
            channel = grpc.secure_channel(self.grpc, credentials, options=options)
        with channel:
            yield channel

    def vms(self) -> list[str]:
        return [vm["id"] for vm in self.admin().get("/vms", params={"gone": False}).json()]


@contextlib.contextmanager
def secure_manager(
    data_dir: Path,
    *flags: str,
    program: Sequence[str] = ("-m", "varuna_manager.main"),
    pki_dir: Path | None = None,
    stands_by: bool = False,
) -> Iterator[SecureManager]:
    """A manager with --secure on loopback; it and its VMs end with the block."""
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *program, "--data-dir", str(data_dir), "--secure"]
    http, grpc_port = own_ports(2)  # it is started again on them
    command += ["--http-port", str(http), "--grpc-port", str(grpc_port), "--no-keep-vms", *flags]
    manager = SecureManager(data_dir, command, _start(command, data_dir), pki_dir or data_dir / "pki")
    try:
        manager.wait_until_ready(stands_by=stands_by)
        yield manager
    finally:
        for client in manager.clients:
            client.close()
        _end(manager.process, data_dir)


def _start(command: list[str], data_dir: Path) -> subprocess.Popen[bytes]:
    with (data_dir / "manager.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)


def _end(process: subprocess.Popen[bytes], data_dir: Path) -> None:
    process.terminate()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    kill_left_vms(data_dir / "vms")
