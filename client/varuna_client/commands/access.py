"""`varuna token`, `varuna audit` and `varuna revoke`: who may call the manager, and who has called it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from varuna_client.commands.options import AsJson, ManagerUrl, connect, print_document
from varuna_client.errors import UserError

token_app = typer.Typer(help="Tokens of the manager's API, and tokens with which agents join.", no_args_is_help=True)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@token_app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="The user's name, which the audit log shows.")] = "",
    role: Annotated[str, typer.Option(help="viewer (reads), user (submits and cancels) or admin (all).")] = "user",
    join: Annotated[bool, typer.Option("--join", help="Make a token with which agents join.")] = False,
    ttl: Annotated[str, typer.Option(help="Lifetime: 90s, 30m, 1h, 7d (default: 90d; with --join 1h).")] = "",
    single_use: Annotated[bool, typer.Option(help="With --join: only one agent may join with it.")] = True,
    vm: Annotated[str | None, typer.Option(help="With --join: only this VM, even if it has joined before.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. It is printed once; the manager keeps only its hash."""
    if not name and not join:
        raise UserError("the token needs a name: varuna token create NAME --role user")
    body: dict[str, Any] = {"name": name or f"join-{vm or 'any'}", "ttl_s": _seconds(ttl)}
    body |= {"join": True, "single_use": single_use, "vm_id": vm} if join else {"role": role}
    with connect(manager_url) as client:
        made = client.create_token(body)
    print_document(made, Text(str(made["token"])), as_json)


@token_app.command("list")
def all_tokens(manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    with connect(manager_url) as client:
        tokens = client.tokens()
    table = Table("id", "name", "for", "created by", "expires", "last used", "revoked", box=None)
    for token in tokens:
        use = token["role"] or f"joining{' of ' + token['vm_id'] if token['vm_id'] else ''}"
        cells = (token["last_used_at"] or "–", token["revoked_at"] or "–")
        # Only a token that an earlier version has made never expires.
        table.add_row(token["id"], token["name"], use, token["created_by"], token["expires_at"] or "never", *cells)
    print_document(tokens, table, as_json)


@token_app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The token's id or name.")],
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token at once."""
    with connect(manager_url) as client:
        revoked = client.revoke_token(token)
    print_document(revoked, Text(f"token {revoked['name']} ({revoked['id']}) is revoked"), as_json)


def revoke(
    vm: Annotated[str, typer.Argument(metavar="VM", help="The VM's id.")],
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """End a VM's stream and reject its certificates from now on."""
    with connect(manager_url) as client:
        revoked = client.revoke_vm(vm)
    print_document(revoked, Text(f"the certificates of VM {vm} are revoked"), as_json)


def audit(
    after: Annotated[int, typer.Option(help="Only entries after this one.")] = 0,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the calls that changed something, and those that were refused."""
    with connect(manager_url) as client:
        entries = client.audit(after=after)
    table = Table("id", "at", "who", "role", "from", "call", "answer", box=None)
    for entry in entries:
        action = " ".join(entry["action"].splitlines())  # a path may have line feeds in it
        cells = (entry["at"], entry["who"], entry["role"] or "–", entry["address"], action)
        table.add_row(str(entry["id"]), *cells, str(entry["status"] or "not known"))
    print_document(entries, table, as_json)


def _seconds(text: str) -> float | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise UserError(f"--ttl {text!r}: expected a number and a unit, such as 90s, 30m, 1h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]
