"""The webhook's settings: one clear line for a setting that can never work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from varuna_manager.domain.webhooks import sign
from varuna_manager.settings import ManagerSettings

URL = "https://hooks.example.com/varuna"


def secret_file(folder: Path, secret: bytes = b"0123456789abcdef\n") -> Path:
    path = folder / "secret"
    path.write_bytes(secret)
    return path


def test_the_target_is_as_it_is_set(tmp_path: Path) -> None:
    settings = ManagerSettings(
        webhook_url=URL, webhook_secret_file=secret_file(tmp_path), webhook_events="job_hung, job_failed"
    )
    target = settings.make_webhook_target()
    assert target is not None
    assert (target.url, target.secret, target.names) == (URL, b"0123456789abcdef", {"job_hung", "job_failed"})
    assert ManagerSettings().make_webhook_target() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"webhook_url": URL}, "give --webhook-secret-file"),
        ({"webhook_url": URL, "webhook_secret_file": "/nowhere/secret"}, "/nowhere/secret cannot be read"),
        ({"webhook_url": "file:///etc/passwd"}, "expected http://HOST"),
        ({"webhook_url": "https://"}, "expected http://HOST"),
        (
            {"webhook_events": "job_failed,job_lost"},
            "expected some of job_failed, job_succeeded, job_hung, fleet_short",
        ),
        ({"webhook_events": " "}, "expected some of"),
    ],
)
def test_what_would_never_work_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ManagerSettings(**given)


def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path, b"short\n")
    with pytest.raises(ValidationError, match="has 5 characters: put 16 or more there"):
        ManagerSettings(webhook_url=URL, webhook_secret_file=path)


def test_a_signature_is_of_its_time_and_its_body() -> None:
    signatures = {sign(b"key", at, body) for at in (1, 2) for body in (b"a", b"b")}
    assert len(signatures) == 4
    # printf 1.a | openssl dgst -sha256 -hmac key
    assert sign(b"key", 1, b"a") == "t=1,v1=32a5f52f8b585db06b5960c1b30992c0575588cf6343eeb646efa5bfd9ca5a17"
