"""Tokens, the audit log, and certificates for agents."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from varuna_manager.answers.errors import ConflictError
from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.access import AccessServices, get_principal
from varuna_manager.domain.access import Role
from varuna_proto import rest_fleet as rest

_DAY_S = 86_400.0
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$"
_MOST_REQUEST = 8192
_CA: dict[int | str, dict[str, Any]] = {
    200: {"description": "PEM", "content": {"application/x-pem-file": {"schema": {"type": "string"}}}}
}
_Service = TypeVar("_Service")


class TokenBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=_NAME, description="name of its user; the audit log names it")
    role: Role | None = Field(default=None, description="viewer, user or admin; null for a join token")
    join: bool = Field(default=False, description="make a join token (for agents) instead of one for REST")
    ttl_s: float | None = Field(
        default=None, gt=0, le=3650 * _DAY_S, description="lifetime; null: 90 days, for a join token one hour"
    )
    single_use: bool = Field(default=True, description="whether a join token serves only one agent")
    vm_id: str | None = Field(default=None, max_length=63, description="the only VM that may join with it")

    @model_validator(mode="after")
    def _one_kind(self) -> TokenBody:
        if self.join and self.role is not None:
            raise ValueError("a join token has no role: leave `role` out, or `join`")
        if not self.join and self.role is None:
            raise ValueError("`role` is missing: viewer, user or admin")
        if not self.join and self.vm_id is not None:
            raise ValueError("`vm_id` is for join tokens: leave it out, or add `join`")
        return self


class JoinBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    vm_id: str = Field(min_length=1, max_length=63)
    request: str = Field(max_length=_MOST_REQUEST, description="PKCS #10 in PEM, of an ECDSA P-256 key")


def access_routes(services: AccessServices) -> APIRouter:
    router = APIRouter()

    @router.get("/whoami")
    async def whoami(request: Request) -> rest.CallerDocument:
        """Name and role of the caller."""
        principal = get_principal(request)
        return {"name": principal.name, "role": principal.role.value, "open": services.tokens is None}

    @router.post("/tokens", status_code=201)
    async def create_token(body: TokenBody, request: Request) -> rest.NewTokenDocument:
        """Make a token. Only this answer has its text."""
        tokens = _secured(services.tokens)
        author = get_principal(request).name
        if body.role is not None:
            return await tokens.create_access_token(body.name, body.role, body.ttl_s, by=author)
        ttl_s = body.ttl_s or 3600.0
        return await tokens.create_join_token(body.name, ttl_s, single_use=body.single_use, vm_id=body.vm_id, by=author)

    @router.get("/tokens")
    async def list_tokens() -> list[rest.TokenDocument]:
        """All tokens, without their secrets."""
        return await _secured(services.tokens).list_tokens()

    @router.delete("/tokens/{token}")
    async def revoke_token(token: str) -> rest.TokenDocument:
        """Revoke a token by its id or its name: it is refused from now on."""
        return await _secured(services.tokens).revoke_token(token)

    @router.get("/audit")
    async def list_audit(
        request: Request,
        response: Response,
        after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> list[rest.AuditEntryDocument]:
        """The requests that changed something or were refused, oldest first."""
        found = await services.audit.list_entries(after, limit)
        if len(found) == limit:
            by.link_to(request, response, after=found[-1]["id"])
        return found

    @router.get("/ca", response_class=Response, responses=_CA)
    async def get_ca() -> Response:
        """The certificate of the manager's authority. Compare it with its SHA-256, which is in each join token."""
        return Response(_secured(services.enrolments).ca_pem, media_type="application/x-pem-file")

    @router.post("/join")
    async def join_agent(
        body: JoinBody, request: Request, authorization: Annotated[str, Header(max_length=600)] = ""
    ) -> rest.CertificateDocument:
        """Sign a certificate for an agent that has a join token (`Authorization: Bearer vj1...`)."""
        token = authorization.partition(" ")[2]
        certificate = await _secured(services.enrolments).join_agent(token.strip(), body.vm_id, body.request)
        request.scope["state"]["joined"] = body.vm_id  # for the audit log
        return {"vm_id": body.vm_id, "certificate": certificate}

    @router.post("/vms/{vm}/revoke")
    async def revoke_vm(vm: str) -> rest.RevokedVmDocument:
        """Revoke the VM's certificates and end its agent's connection."""
        return await _secured(services.enrolments).revoke_vm(vm)

    return router


def _secured(service: _Service | None) -> _Service:
    if service is None:
        raise ConflictError("this manager is open to its own machine and needs no tokens: start it with --secure")
    return service
