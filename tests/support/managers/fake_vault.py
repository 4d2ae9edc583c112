"""A small Azure Key Vault: it speaks the REST API's own JSON over TLS, with the challenge that comes before a token."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
import uvicorn
from azure.core.credentials import AccessToken
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from varuna_manager.jobs.vault import VaultSecrets, vault_client

TOKEN = "a-token-of-the-managers-identity"
CHALLENGE = 'Bearer authorization="https://login.microsoftonline.com/tenant", resource="https://vault.azure.net"'
_FOREVER_S = 3600.0


class StaticCredential:
    """An identity whose token is at hand."""

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        assert scopes == ("https://vault.azure.net/.default",)
        return AccessToken(TOKEN, 2**31)

    async def close(self) -> None:
        return


def vault_of(
    url: str, ca_file: Path, *, credential: Any = None, verify_challenge_resource: bool = False, **options: Any
) -> VaultSecrets:
    """As the manager makes it, for a fake vault: its address is in no domain of Azure's."""
    credential = credential or StaticCredential()
    trust = {"verify_challenge_resource": verify_challenge_resource, "connection_verify": str(ca_file)}
    return VaultSecrets(vault_client(url, credential, **trust), credential, **options)


@dataclass
class FakeVault:
    """The secrets, and the knobs: change them while it runs."""

    url: str = ""
    ca_file: Path = Path()
    secrets: dict[str, str | None] = field(default_factory=dict)
    refuses: str = ""
    """The inner code of its 403."""
    status: int = 200
    """The status of every answer to a caller with a token."""
    retry_after: str = ""
    is_slow: bool = False
    """Whether it accepts requests and never answers them."""
    body: bytes = b""
    """If not empty, the body of a 200 in place of a secret."""
    requests: list[str] = field(default_factory=list)
    """Names, of requests with a token."""
    versions: set[str | None] = field(default_factory=set)

    async def answer(self, name: str) -> Response:
        self.requests.append(name)
        if self.is_slow:
            await asyncio.sleep(_FOREVER_S)
        if self.refuses:
            return _error(403, "Forbidden", {"code": self.refuses})
        if self.status != 200:
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return _error(self.status, "Wrong", headers=headers)
        if self.body:
            return Response(self.body, media_type="application/json")
        if name not in self.secrets:
            return _error(404, "SecretNotFound")
        about = {"id": f"{self.url}/secrets/{name}/0123", "attributes": {"enabled": True}}
        return JSONResponse({"value": self.secrets[name], **about})


def _error(
    status: int, code: str, inner: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> Response:
    text = "Caller: appid=11111111-2222;oid=33333333-4444"
    error = {"code": code, "message": text, **({"innererror": inner} if inner else {})}
    return JSONResponse({"error": error}, status, headers=headers)


def _app(vault: FakeVault) -> FastAPI:
    app = FastAPI()

    @app.get("/secrets/{name}")
    @app.get("/secrets/{name}/")
    async def get_secret(name: str, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return Response(status_code=401, headers={"WWW-Authenticate": CHALLENGE})
        vault.versions.add(request.query_params.get("api-version"))
        return await vault.answer(name)

    return app


@contextmanager
def fake_vault(folder: Path) -> Iterator[FakeVault]:
    """The server, on a port of its own, in a thread of its own. `folder`: for its certificate."""
    authority = trustme.CA()
    files = {"ca": authority.cert_pem, "cert": authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem}
    for name, pem in files.items():
        pem.write_to_path(str(folder / f"vault-{name}.pem"))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    vault = FakeVault(url=url, ca_file=folder / "vault-ca.pem")
    config = uvicorn.Config(
        _app(vault),
        ssl_certfile=folder / "vault-cert.pem",
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,  # requests that it never answers may be under way
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield vault
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
