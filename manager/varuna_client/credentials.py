"""Whom the client says it is, and whom it trusts: from the environment, or the configuration file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from varuna_client.errors import UserError

_KEYS = {"manager_url", "token", "ca"}


@dataclass(frozen=True, kw_only=True)
class Access:
    """`token` None: the manager is an open one. `ca` None: trusted is whom this machine trusts."""

    manager_url: str | None = None
    token: str | None = field(default=None, repr=False)
    ca: str | None = None


def config_path() -> Path:
    """VARUNA_CONFIG, or config.yaml in the user's configuration folder."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("VARUNA_CONFIG") or f"{home}/varuna/config.yaml").expanduser()


def find_access() -> Access:
    """The environment (VARUNA_TOKEN_FILE, VARUNA_TOKEN, VARUNA_CA) beats the file. Raises UserError.

    There is no option for the token itself: everybody on a machine can list the arguments of its processes.
    """
    config = _read_config(config_path())
    token_file = os.environ.get("VARUNA_TOKEN_FILE")
    token = _read_token(Path(token_file)) if token_file else os.environ.get("VARUNA_TOKEN") or config.get("token")
    authority = os.environ.get("VARUNA_CA") or config.get("ca")
    if token is not None:
        check_token(token)
    return Access(manager_url=config.get("manager_url"), token=token, ca=authority)


def check_token(token: str) -> None:
    """Raises UserError, which does not repeat it."""
    if not token.startswith("vt1.") or not token.isascii() or len(token.split()) != 1:
        raise UserError(
            "the token is malformed: a manager's begins with 'vt1.'; copy it whole (VARUNA_TOKEN, --token-file, "
            f"or 'token' in {config_path()})"
        )


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UserError(f"--token-file {path} cannot be read ({error.strerror}): give another") from error


def _read_config(path: Path) -> dict[str, str]:
    try:
        document: Any = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): mend or remove it") from error
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise UserError(f"{path}: expected lines such as 'manager_url: https://...', with {', '.join(sorted(_KEYS))}")
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        raise UserError(f"{path}: {unknown[0]!r} is none of {', '.join(sorted(_KEYS))}: take it out")
    return document
