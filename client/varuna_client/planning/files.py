"""Documents that the planning commands read and write, with errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from varuna_client.errors import UserError

if TYPE_CHECKING:
    from varuna_planner.hardware.table import Hardware
    from varuna_planner.profile.document import Profile


def read_text(path: Path, what: str) -> str:
    """Raises UserError when the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"cannot read {what} {path}: it is not text") from None
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from None


def write_text(path: Path, text: str, what: str) -> None:
    """Raises UserError when the file cannot be written."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {what} {path}: {error.strerror}") from None


def read_profile(path: Path) -> Profile:
    """Raises UserError naming the field that is wrong."""
    from varuna_planner.profile.document import Profile

    try:
        return Profile.from_json(read_text(path, "profile"))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_hardware(path: Path | None) -> Hardware:
    """The built-in table, with the file's entries added if there is a file. Raises UserError."""
    from varuna_planner.hardware.table import Hardware, built_in

    if path is None:
        return built_in()
    try:
        return built_in().with_entries(Hardware.from_json(read_text(path, "hardware")))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
