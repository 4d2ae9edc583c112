"""The commands for operators, on the manager's machine: backup, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from varuna_client.commands.options import AsJson, print_document
from varuna_client.errors import UserError
from varuna_proto.wording import count_of, render_bytes

DataDir = Annotated[
    Path | None, typer.Option(help="The manager's data directory (or set VARUNA_MANAGER_DATA_DIR).", show_default=False)
]


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="The backup file, which must not exist yet.")],
    data_dir: DataDir = None,
    database_url: Annotated[
        str | None,
        typer.Option(help="The manager's database, if it is elsewhere (VARUNA_MANAGER_DATABASE_URL)."),
    ] = None,
    pki_dir: Annotated[
        Path | None, typer.Option(help="The authority's folder, if it is elsewhere (VARUNA_MANAGER_PKI_DIR).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Save a manager's store, authority and secrets to one file, while it runs. Keep the file as safe as these."""
    try:
        from varuna_manager.backup import BackupError, save_backup
        from varuna_manager.settings import ManagerSettings
    except ImportError as error:
        raise _no_manager("backup") from error
    given: dict[str, Any] = {"data_dir": data_dir, "database_url": database_url, "pki_dir": pki_dir}
    try:
        settings = ManagerSettings(**{name: value for name, value in given.items() if value is not None})
        saved = save_backup(settings, file)
    except (BackupError, ValueError) as error:
        raise UserError(f"varuna backup: {error}") from error
    text = Text(f"{file}: {count_of(len(saved.files), 'file')}, {render_bytes(file.stat().st_size)}")
    if saved.left_out:
        text.append(f"\nnot in it: {', '.join(saved.left_out)}")
    if saved.revision is None:
        text.append(
            "\nnot in it: the store, which is in PostgreSQL. Save it with "
            'pg_dump --format=custom --file=FILE.dump "$VARUNA_MANAGER_DATABASE_URL"'
        )
    document = {"file": str(file), "revision": saved.revision, "files": sorted(saved.files), "left_out": saved.left_out}
    print_document(document, text, as_json)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="The file that varuna backup wrote.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Restore a saved manager into an empty data directory; then start the manager on it."""
    try:
        from varuna_manager.backup import BackupError, restore_backup
        from varuna_manager.settings import ManagerSettings
    except ImportError as error:
        raise _no_manager("restore") from error
    try:
        folder = data_dir or ManagerSettings().data_dir
        restored = restore_backup(file, folder)
    except (BackupError, ValueError) as error:
        raise UserError(f"varuna restore: {error}") from error
    text = Text(f"{folder} has what was saved ({len(restored.files)} files, by Varuna {restored.version})")
    if restored.revision is None:
        text.append("\nThe store is in PostgreSQL: restore it with pg_restore, if that is needed")
    print_document(
        {"data_dir": str(folder), "revision": restored.revision, "files": sorted(restored.files)}, text, as_json
    )


def _no_manager(command: str) -> UserError:
    return UserError(f"varuna {command} is run where the manager is: pip install 'varuna-spot[manager]'")
