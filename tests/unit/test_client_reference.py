"""The page about the command is written from the command."""

from __future__ import annotations

from pathlib import Path

from varuna_client.errors import EXIT_CODES, JobEndedError, VarunaError
from varuna_client.reference import page

CLI = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_the_page_is_what_the_command_says() -> None:
    assert CLI.read_text() == page(), "write it anew: make docs"


def test_exit_codes_are_what_the_page_says() -> None:
    assert set(EXIT_CODES) == {"0", "1", "2", "130", "another"}
    assert VarunaError("no").exit_code == 1
    ended = [JobEndedError("over", code).exit_code for code in (None, 0, 7, -9)]
    assert ended == [1, 1, 7, 137]
