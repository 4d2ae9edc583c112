"""The client's settings: manager, token and trusted authority, from flags, environment and file, in that order."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from varuna_client.errors import UserError
from varuna_client.rest.client import DEFAULT_URL

FLAGS = {"manager_url": "--manager-url", "token_file": "--token-file", "ca": "--ca"}
"""The token itself has no flag, because every user of a machine can list the arguments of its processes."""
VARIABLES = {
    "manager_url": "VARUNA_MANAGER_URL",
    "token_file": "VARUNA_TOKEN_FILE",
    "token": "VARUNA_TOKEN",
    "ca": "VARUNA_CA",
}


@dataclass(frozen=True, kw_only=True)
class ClientSetting:
    """A value and its `origin`: a flag, a variable, a file or `default`."""

    value: str | None
    origin: str


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """`token` None: the manager asks for none. `ca` None: the client trusts what this machine trusts."""

    manager_url: ClientSetting
    token: ClientSetting = field(repr=False)
    ca: ClientSetting


def config_path() -> Path:
    """VARUNA_CONFIG, or config.toml in the user's configuration folder."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("VARUNA_CONFIG") or f"{home}/varuna/config.toml").expanduser()


def find_config(flags: Mapping[str, str | None] | None = None) -> ClientConfig:
    """Find the settings in force. `flags`: the given ones, by the names of FLAGS. Raises UserError."""
    path = config_path()
    found: dict[str, ClientSetting] = {}
    for origins, values in (
        (dict.fromkeys(VARIABLES, str(path)), _read_file(path)),
        (VARIABLES, {name: os.environ.get(variable) for name, variable in VARIABLES.items()}),
        (FLAGS, flags or {}),
    ):
        given = {name: ClientSetting(value=text, origin=origins[name]) for name, text in values.items() if text}
        if "token" in given or "token_file" in given:  # either one hides both of a later source
            found = {name: setting for name, setting in found.items() if not name.startswith("token")}
        found |= given
    token = _read_token(found["token_file"]) if "token_file" in found else found.get("token")
    if token is not None:
        _check_token(token)
    url = found.get("manager_url", ClientSetting(value=DEFAULT_URL, origin="default"))
    _check_url(url)
    nothing = ClientSetting(value=None, origin="default")
    return ClientConfig(
        manager_url=url,
        token=token or nothing,
        ca=found.get("ca", nothing),
    )


def _check_url(url: ClientSetting) -> None:
    """Raises UserError."""
    if not _is_address(url.value or ""):
        raise UserError(f"{url.value!r} is not an address ({url.origin}): use http://HOST:PORT, such as {DEFAULT_URL}")


def _is_address(url: str) -> bool:
    try:
        parts = httpx.URL(url)
        parts.host.encode("idna")
    except (httpx.InvalidURL, ValueError):
        return False
    is_whole = bool(parts.host) and (parts.port or 0) < 2**16 and not any(sign.isspace() for sign in url)
    return parts.scheme in ("http", "https") and is_whole


def _check_token(token: ClientSetting) -> None:
    """Raises UserError, whose text does not contain the token."""
    text = token.value or ""
    if not text.startswith("vt1.") or not text.isascii() or len(text.split()) != 1:
        raise UserError(f"the token is malformed ({token.origin}): a manager's begins with 'vt1.'; copy all of it")


def _read_token(file: ClientSetting) -> ClientSetting:
    path = Path(file.value or "").expanduser()
    try:
        return ClientSetting(value=path.read_text().strip(), origin=f"{file.origin}: {path}")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"{file.origin}: the token file {path} cannot be read ({why}): give another") from error


def _read_file(path: Path) -> dict[str, str | None]:
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): correct or remove it") from error
    keys = ", ".join(VARIABLES)
    for name, value in document.items():
        if name not in VARIABLES:
            raise UserError(f"{path}: {name!r} is not one of {keys}: remove it")
        if not isinstance(value, str):
            raise UserError(f"{path}: {name} must be text, such as manager_url = 'https://manager:8750'")
    return document
