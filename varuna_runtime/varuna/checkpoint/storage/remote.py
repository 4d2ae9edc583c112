"""Opens object stores with limits that fit large files, and with the credentials that their own tools would use.

obstore finds Azure's and Google's credentials itself, and Amazon's in the environment and on VMs that have a role. It
does not read the files of the `aws` command, so this module does; boto3 handles anything in them but plain keys.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
from collections.abc import Generator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.store import ObjectStore, from_url

from varuna.checkpoint.storage.windows import map_ahead

__all__ = ["aws_settings", "open_remote", "stream_ranges"]

_RANGE_BYTES = 8 * 1024 * 1024
_RANGES_AT_ONCE = 4

_NO_RANGES = "non-partial response"
"""Part of obstore's message when an object store ignores ranges; it has an error class only for `http://`."""

_REQUEST_LIMIT = timedelta(seconds=180)
"""For one request of some megabytes, so that a file's limit grows with its size. obstore's default is 30 s."""
_RETRIES: dict[str, Any] = {"max_retries": 20, "retry_timeout": timedelta(seconds=180)}
"""Per request: enough for a store that is away for two minutes. obstore's ten retries may be over in two seconds."""

_PREFIXES = {
    "s3": "AWS",
    "s3a": "AWS",
    "gs": "GOOGLE",
    "az": "AZURE",
    "adl": "AZURE",
    "abfs": "AZURE",
    "abfss": "AZURE",
}
_SWITCHES = ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only")
_TEXTS = ("timeout", "connect_timeout", "proxy_url", "proxy_ca_certificate", "proxy_excludes", "user_agent")

_KEYS_IN_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
_NEEDS_BOTO3 = ("role_arn", "sso_session", "sso_start_url", "credential_process", "login_session")


def open_remote(url: str, environ: Mapping[str, str] | None = None) -> ObjectStore:
    """The object store at `url`. Makes no request, unless the profile of `aws` needs one.

    Raises ValueError, and obstore's errors, for a URL or credentials that cannot be used.
    """
    scheme = urlsplit(url).scheme
    environ = os.environ if environ is None else environ
    options: dict[str, Any] = {
        "client_options": _client_options(scheme, environ),
        "retry_config": _RETRIES,
    }
    if _PREFIXES.get(scheme) == "AWS":
        options |= aws_settings(environ)
    return from_url(url, **options)


def _client_options(scheme: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Our limits, and the environment's connection settings, which obstore ignores when it is given any options."""
    options: dict[str, Any] = {"timeout": _REQUEST_LIMIT}
    if scheme == "http":
        options["allow_http"] = True
    if (prefix := _PREFIXES.get(scheme)) is not None:
        for name in (*_SWITCHES, *_TEXTS):
            value = environ.get(f"{prefix}_{name.upper()}")
            if value:
                options[name] = value.lower() in ("1", "true", "yes", "on", "y") if name in _SWITCHES else value
    return options


def stream_ranges(store: ObjectStore, path: str, size: int) -> Generator[memoryview]:
    """An object of `size` bytes in ranges, several read at once. The time limit applies to each range.

    A server that does not support ranges (a simple `http://` one) sends the object as a whole.
    Raises obstore's errors, FileNotFoundError when there is no such object.
    """

    def read(start: int) -> memoryview:
        length = min(_RANGE_BYTES, size - start)
        return memoryview(obstore.get_range(store, path, start=start, length=length))

    if size == 0:
        return
    try:
        yield read(0)
    except (obstore.exceptions.GenericError, obstore.exceptions.NotSupportedError) as error:
        if isinstance(error, obstore.exceptions.GenericError) and _NO_RANGES not in str(error):
            raise
        for chunk in obstore.get(store, path).stream():
            yield memoryview(chunk)
        return
    with closing(map_ahead(read, range(_RANGE_BYTES, size, _RANGE_BYTES), ahead=_RANGES_AT_ONCE)) as ranges:
        yield from ranges


def aws_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Arguments for `from_url` from the files of `aws` (`~/.aws/credentials` and `config`), which obstore ignores.

    Raises ValueError when the profile needs boto3 and that is not installed.
    """
    profile = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    found = _read_profile(profile, environ)
    settings: dict[str, Any] = {}
    if "region" in found and not (environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")):
        settings["region"] = found["region"]
    if any(environ.get(name) for name in _KEYS_IN_ENVIRONMENT):
        return settings
    beyond = next((name for name in _NEEDS_BOTO3 if name in found), None)
    if beyond is not None:
        return settings | {"credential_provider": _boto3_provider(profile, beyond)}
    for key in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
        if key in found:
            settings[key.removeprefix("aws_")] = found[key]
    return settings


def _read_profile(name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """A profile's settings from both files; the credentials file takes precedence, as for `aws`."""
    home = Path(environ.get("HOME") or Path.home())
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = Path(environ.get(variable) or home / ".aws" / file).expanduser()
        parser = configparser.ConfigParser(interpolation=None, default_section="", strict=False)
        try:
            parser.read(path)
        except (configparser.Error, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error.__class__.__name__}): mend it, or set AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY"
            ) from error
        if parser.has_section(section):
            found |= dict(parser.items(section))
    return found


def _boto3_provider(profile: str, beyond: str) -> Any:
    if importlib.util.find_spec("boto3") is None:
        raise ValueError(
            f"profile {profile} of ~/.aws has {beyond}, which needs boto3: pip install 'varuna-spot[s3]', or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(boto3.Session(profile_name=profile))
