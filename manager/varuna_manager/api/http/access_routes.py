"""Tokens, the audit record, and the joining of agents."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.access import AccessServices, principal_of
from varuna_manager.domain.access import Role
from varuna_manager.services.errors import ConflictError
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

    name: str = Field(pattern=_NAME, description="of whoever uses it: the audit record names it")
    role: Role | None = Field(default=None, description="viewer, user or admin; null with `join`")
    join: bool = Field(default=False, description="a token with which agents join, instead of one of the REST API")
    ttl_s: float | None = Field(
        default=None, gt=0, le=3650 * _DAY_S, description="null: 90 days; of a join token: one hour"
    )
    single_use: bool = Field(default=True, description="of a join token")
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
    async def whoami(request: Request) -> rest.Whoami:
        """Whom the manager takes the caller for."""
        principal = principal_of(request)
        return {"name": principal.name, "role": principal.role.value, "open": services.tokens is None}

    @router.post("/tokens", status_code=201)
    async def create_token(body: TokenBody, request: Request) -> rest.NewToken:
        """The answer holds the token itself, for the only time."""
        tokens = _secured(services.tokens)
        author = principal_of(request).name
        if body.role is not None:
            return by.as_told(await tokens.create_access(body.name, body.role, body.ttl_s, by=author))
        ttl_s = body.ttl_s or 3600.0
        made = await tokens.create_join(body.name, ttl_s, single_use=body.single_use, vm_id=body.vm_id, by=author)
        return by.as_told(made)

    @router.get("/tokens")
    async def list_tokens() -> list[rest.Token]:
        """Every token, without what opens anything."""
        return by.as_told(await _secured(services.tokens).all())

    @router.delete("/tokens/{token}")
    async def revoke_token(token: str) -> rest.Token:
        """From now on it opens nothing. By its id or its name."""
        return by.as_told(await _secured(services.tokens).revoke(token))

    @router.get("/audit")
    async def list_audit(
        request: Request,
        response: Response,
        after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> list[rest.AuditEntry]:
        """The calls that changed something, and those that were refused, oldest first."""
        found = await services.audit.after(after, limit)
        if len(found) == limit:
            by.link_to(request, response, after=found[-1]["id"])
        return by.as_told(found)

    @router.get("/ca", response_class=Response, responses=_CA)
    async def get_ca() -> Response:
        """The certificate of the manager's authority. A join token holds its SHA-256: compare before you trust it."""
        return Response(_secured(services.enrolments).ca_pem, media_type="application/x-pem-file")

    @router.post("/join")
    async def join(
        body: JoinBody, request: Request, authorization: Annotated[str, Header(max_length=600)] = ""
    ) -> rest.Certificate:
        """A certificate for an agent that has a join token (`Authorization: Bearer vj1...`)."""
        token = authorization.partition(" ")[2]
        certificate = await _secured(services.enrolments).join(token.strip(), body.vm_id, body.request)
        request.scope["state"]["joined"] = body.vm_id  # for the audit record
        return {"vm_id": body.vm_id, "certificate": certificate}

    @router.post("/vms/{vm}/revoke")
    async def revoke_vm(vm: str) -> rest.Revoked:
        """End the VM's stream and take no certificate of it any more."""
        return by.as_told(await _secured(services.enrolments).revoke(vm))

    return router


def _secured(service: _Service | None) -> _Service:
    if service is None:
        raise ConflictError("this manager is open to its own machine and asks for no tokens: start it with --secure")
    return service
