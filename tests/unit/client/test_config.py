"""Where the client's settings come from (flags beat the environment, which beats the file), and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from varuna_client.cli import app
from varuna_client.config import VARIABLES, ClientSetting, config_path, find_config
from varuna_client.errors import UserError
from varuna_client.rest.client import DEFAULT_URL


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the configuration file. No environment variable sets anything."""
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "config.toml"
    monkeypatch.setenv("VARUNA_CONFIG", str(path))
    return path


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert config_path() == file
    monkeypatch.delenv("VARUNA_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/elsewhere")
    assert config_path() == Path("/elsewhere/varuna/config.toml")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert config_path() == Path("~/.config/varuna/config.toml").expanduser()


def test_flags_beat_the_environment_and_that_beats_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config().manager_url == ClientSetting(value=DEFAULT_URL, origin="default")
    file.write_text('manager_url = "https://file:1"\nca = "/file.pem"\n')
    assert find_config().manager_url == ClientSetting(value="https://file:1", origin=str(file))
    monkeypatch.setenv("VARUNA_MANAGER_URL", "https://environment:1")
    assert find_config().manager_url == ClientSetting(value="https://environment:1", origin="VARUNA_MANAGER_URL")
    flags = {"manager_url": DEFAULT_URL, "ca": None}
    assert find_config(flags).manager_url == ClientSetting(value=DEFAULT_URL, origin="--manager-url")
    assert find_config(flags).ca == ClientSetting(value="/file.pem", origin=str(file))


def test_a_token_hides_the_ones_that_come_after_it(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "token"
    kept.write_text("vt1.kept\n")
    assert find_config().token.value is None
    file.write_text(f'token_file = "{kept}"\n')
    assert find_config().token == ClientSetting(value="vt1.kept", origin=f"{file}: {kept}")
    monkeypatch.setenv("VARUNA_TOKEN", "vt1.environment")
    assert find_config().token == ClientSetting(value="vt1.environment", origin="VARUNA_TOKEN")
    monkeypatch.setenv("VARUNA_TOKEN_FILE", str(kept))
    assert find_config().token.value == "vt1.kept"
    assert find_config({"token_file": str(kept)}).token.origin == f"--token-file: {kept}"
    assert "vt1" not in repr(find_config())
    with pytest.raises(UserError, match=r"--token-file: .* cannot be read \(No such file or directory\)"):
        find_config({"token_file": str(tmp_path / "none")})


@pytest.mark.parametrize("token", ["secret", "vj1.a.b.c", "vt1.a b", "vt1.é"])
def test_a_malformed_token_is_not_repeated(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_TOKEN", token)
    with pytest.raises(UserError, match=r"the token is malformed \(VARUNA_TOKEN\)") as raised:
        find_config()
    assert token not in str(raised.value)


@pytest.mark.parametrize("text", ["- a", "token = ['vt1.a']", "tokens = 'x'", "token = {"])
def test_a_wrong_file_is_named(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=r"config\.toml"):
        find_config()


@pytest.mark.parametrize(
    "url",
    [
        *("manager:8750", "127.0.0.1", "ftp://manager", "http://", "http://manager:87S0", "http://manager:99999"),
        *("http://[::1:8750", "http://a..b:8750", f"http://{'a' * 64}:8750", "http://a b"),
    ],
)
def test_what_is_no_address_is_named_with_its_origin(url: str, file: Path) -> None:
    file.write_text(f'manager_url = "{url}"\n')
    with pytest.raises(UserError) as caught:
        find_config()
    assert str(caught.value).startswith(f"{url!r} is not an address ({file}): use http://HOST:PORT")


@pytest.mark.parametrize(
    "url", ["http://[::1]:8750", "https://manager", "http://10.0.0.1:8750/", "http://m\u00fcller:1"]
)
def test_an_address_may_be_of_any_kind(url: str, file: Path) -> None:
    file.write_text(f'manager_url = "{url}"\n')
    assert find_config().manager_url.value == url


def test_config_tells_what_holds_and_whence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('manager_url = "https://file:1"\n')
    monkeypatch.setenv("VARUNA_TOKEN", "vt1.a.secret")
    result = CliRunner().invoke(app, ["--ca", "/flag.pem", "config"])
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.output.splitlines()[:4]] == [
        ["SETTING", "VALUE", "FROM"],
        ["manager_url", "https://file:1", str(file)],
        ["token", "vt1.…", "VARUNA_TOKEN"],
        ["ca", "/flag.pem", "--ca"],
    ]
    document = json.loads(CliRunner().invoke(app, ["config", "--json"]).output)
    assert document["file"] == {"path": str(file), "exists": True}
    assert document["settings"]["manager_url"] == {"value": "https://file:1", "from": str(file)}
    assert "secret" not in json.dumps(document)
